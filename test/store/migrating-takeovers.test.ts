import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { decodeRecord, readStamps } from '../../src/store/codec.ts'
import { migrating } from '../../src/store/migrating.ts'
import type { Store } from '../../src/store/register.ts'
import { bytesOf, newId, newToken, SPANS } from './fixtures.ts'
import { answeringLater } from './migrating-fixtures.ts'

/*
 * Phase both, where phase new has written to the new store alone: the old store still has what was there before.
 */

const [FIRST, SECOND] = [newToken(), newToken()]
const completed = (token: Buffer) => bytesOf('completed', token)

async function stateIn(store: Store, id: RecordId) {
  const { bytes } = await store.get(id)
  if (bytes === null) return null
  const { state, token } = decodeRecord(bytes)
  return { state, by: token.equals(FIRST) ? 'first' : token.equals(SECOND) ? 'second' : 'another' }
}

function pair() {
  const clock = { now: 1_795_000_000_000 }
  const [from, to] = [answeringLater(() => clock.now), answeringLater(() => clock.now)]
  return { clock, from, to, both: migrating(from, to, 'both'), id: newId() }
}

void t.test('the outcome of an attempt that the new store alone has is kept in both', async (t) => {
  const { from, to, both, id } = pair()
  await both.put(id, bytesOf('in_progress', FIRST), SPANS)
  const given = { token: FIRST, states: ['in_progress'] } as const
  await both.swap(id, given, bytesOf('failed_retryable', FIRST), SPANS, false)
  const { version } = readStamps((await to.get(id)).bytes as Buffer)
  t.ok((await to.swap(id, { version }, bytesOf('in_progress', SECOND), SPANS, true)).done)
  t.strictSame(await stateIn(from, id), { state: 'failed_retryable', by: 'first' })
  const swap = both.swap(id, { token: SECOND, states: ['in_progress'] }, completed(SECOND), SPANS, false)
  t.match(await swap, { done: true })
  for (const store of [from, to]) t.strictSame(await stateIn(store, id), { state: 'completed', by: 'second' })
})

void t.test('an outcome that is written anew is refused with that of the new store', async (t) => {
  const { from, to, both, id } = pair()
  await both.put(id, bytesOf('in_progress', FIRST), SPANS)
  const { version } = readStamps((await to.get(id)).bytes as Buffer)
  t.ok((await to.swap(id, { version }, completed(SECOND), SPANS, true)).done)
  t.strictSame(await stateIn(from, id), { state: 'in_progress', by: 'first' })
  const put = await both.put(id, completed(FIRST), SPANS, 'again')
  t.equal(put.done, false)
  t.ok(!put.done && decodeRecord(put.bytes).token.equals(SECOND))
})

void t.test('an outcome of nobody’s attempt writes nothing', async (t) => {
  const { from, to, both, id } = pair()
  await from.put(id, bytesOf('in_progress', FIRST), SPANS)
  const token = newToken()
  const swap = both.swap(id, { token, states: ['in_progress'] }, completed(token), SPANS, false)
  t.match(await swap, { done: false })
  t.equal(await stateIn(to, id), null)
})

void t.test(
  'a lease that the new store alone has renewed keeps out a takeover, but no outcome',
  async (t) => {
    const { clock, to, both, id } = pair()
    await both.put(id, bytesOf('in_progress', FIRST), SPANS)
    clock.now += SPANS.dueIn
    t.same(await to.renew([{ id, token: FIRST, ...SPANS }]), [true])
    const { version } = readStamps((await both.get(id)).bytes as Buffer)
    const swap = async (bytes: Buffer, nextFence: boolean) =>
      both.swap(id, { version }, bytes, SPANS, nextFence)
    t.match(await swap(bytesOf('in_progress', SECOND), true), { done: false })
    t.match(await swap(completed(FIRST), false), { done: true })
    t.strictSame(await stateIn(to, id), { state: 'completed', by: 'first' })
  },
)

void t.test(
  'a write that depends on the version of a record that neither store has is refused',
  async (t) => {
    const { both, id } = pair()
    t.match(await both.swap(id, { version: 7 }, completed(FIRST), SPANS, false), { done: false, bytes: null })
  },
)
