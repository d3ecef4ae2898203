import t from 'tap'
import { Once } from '../../src/runtime/scheduling.ts'

void t.test('Once makes its value once, on first use', async (t) => {
  let times = 0
  const once = new Once(async () => ++times)
  t.equal(once.made, null)
  t.same(await Promise.all([once.get(), once.get()]), [1, 1])
  t.equal(await once.get(), 1)
  t.equal(await once.made, 1)
})

void t.test('after a failure the next caller tries again', async (t) => {
  let times = 0
  const once = new Once(async () => {
    if (++times === 1) throw new Error('no file descriptor')
    return times
  })
  const first = once.get()
  await t.rejects(Promise.all([first, once.get()]), { message: 'no file descriptor' })
  t.equal(once.made, null)
  t.equal(await once.get(), 2)
})
