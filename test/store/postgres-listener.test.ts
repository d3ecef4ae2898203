import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import type { Lanes } from '../../src/store/postgres/lanes.ts'
import type { SqlArg, SqlRow } from '../../src/store/postgres/link.ts'
import { Listener } from '../../src/store/postgres/listener.ts'
import { fakeLinks } from '../support/fake-links.ts'
import { newId } from './fixtures.ts'

// How waiting replicas are notified, at a time that the test passes.

type Call = readonly [name: string, ...args: SqlArg[]]

async function open(t: Test, timeoutMs = 5000) {
  const fake = fakeLinks(t)
  fake.onSent = (sent) => sent.answer()
  const self = {
    fake,
    calls: [] as Call[],
    events: [] as string[],
    /** Of the functions, which do nothing by themselves. */
    answer: async (_call: Call): Promise<void> => {},
    hears: true,
    told: [] as RecordId[],
    of: (name: string) => self.calls.filter(([one]) => one === name),
    listens: () => fake.links.flatMap(({ sent }) => sent.map(({ text }) => text)),
    channel: () => /^LISTEN (idempotency_[0-9a-f]{16})$/.exec(self.listens().at(-1) ?? '')?.[1] ?? '',
    open: () => fake.links.filter(({ isOver }) => !isOver).length,
    cut: () => fake.links.forEach((link) => link.cut()),
  }
  const run = async (text: string, args: readonly SqlArg[], kind: string): Promise<SqlRow> => {
    const call: Call = [/idempotency\.(\w+)/.exec(text)?.[1] ?? '', ...args]
    t.equal(kind, 'local')
    self.calls.push(call)
    if (call[0] === 'tell' && self.hears)
      for (const channel of args[0] as string[]) fake.notify(channel, String(args[1]))
    await self.answer(call)
    return []
  }
  const address = { host: 'db', port: 1, user: 'u', password: 'p', database: 'd', tls: null }
  const onEvent = (kind: string, detail: string) => void self.events.push(`${kind}: ${detail}`)
  const listener = new Listener({ address, timeoutMs, onEvent, service: 'pay' }, { run } as Lanes, () => 6)
  t.teardown(() => listener.close())
  const watch = (id: RecordId) => listener.watch(id, () => void self.told.push(id))
  return Object.assign(self, { listener, watch })
}

void t.test('watchers share one connection, opened for the first, and are written down', async (t) => {
  const { fake, calls, channel, listens, watch, told, listener } = await open(t)
  const [id, other] = [newId(), newId()]
  listener.resubscribe()
  t.equal(fake.attempts.length, 0)
  await Promise.all([watch(id), watch(other)])
  t.match(channel(), /^idempotency_[0-9a-f]{16}$/)
  t.same(calls, [
    ['tell', [channel()], 'pay hello'],
    ['watch', 'pay', id, 6, 1250, channel()],
    ['watch', 'pay', other, 6, 1250, channel()],
  ])
  await watch(id)
  t.equal(calls.length, 3)
  t.same([fake.attempts.length, listens().length, told], [1, 1, []])
})

void t.test('messages that are not of a record of the service are ignored', async (t) => {
  const { fake, channel, watch, told } = await open(t)
  const id = newId()
  await watch(id)
  for (const message of [`other ${id}`, 'pay', id, '', `pay ${id}`]) fake.notify(channel(), message)
  await fake.settled()
  t.same(told, [id])
})

void t.test('a new connection tells watchers that they may have missed something', async (t) => {
  const { fake, of, watch, told, listener, channel, cut } = await open(t)
  const id = newId()
  await watch(id)
  for (const act of [() => listener.resubscribe(), cut]) {
    const { length } = of('watch')
    act()
    await fake.pass(50)
    t.same(told.splice(0), [id])
    t.same(of('watch').slice(length), [['watch', 'pay', id, 6, 1250, channel()]])
  }
  t.equal(fake.attempts.length, 3)
})

void t.test('without watchers there is no new connection until the next one comes', async (t) => {
  const { fake, watch, of, cut } = await open(t)
  for (const time of [200, 0]) {
    const stop = await watch(newId())
    stop()
    cut()
    const { length } = fake.attempts
    await fake.pass(time)
    t.equal(fake.attempts.length, length)
    await watch(newId())
    t.equal(fake.attempts.length, length + 1)
    await fake.pass(200)
    t.equal(fake.attempts.length, length + 1)
  }
  t.equal(of('watch').length, 5, 'and two that were there before')
})

void t.test('a watcher that cannot be written down polls, and is told later', async (t) => {
  const opened = await open(t)
  const { fake, watch, told, listener } = opened
  await watch(newId())
  opened.answer = async ([name]) => {
    if (name === 'watch') throw new Error('locked')
  }
  const id = newId()
  await watch(id)
  t.same(told, [], 'without waiting for the timeout')
  const { length } = opened.of('watch')
  listener.resubscribe()
  await fake.pass(50)
  t.equal(opened.of('watch').length, length + 2)
  t.same(told, [], 'no sooner than it is written down: a write after that would be missed')
  opened.answer = async () => {}
  listener.resubscribe()
  await fake.pass(50)
  t.ok(told.includes(id))
})

void t.test('a server that refuses is asked less and less often, until it listens', async (t) => {
  const { fake, watch, told, events } = await open(t)
  fake.onSent = (sent) => sent.fail('42501')
  const id = newId()
  await watch(id)
  for (const delay of [50, 100, 200, 400]) {
    const { length } = fake.attempts
    await fake.pass(delay - 1)
    t.equal(fake.attempts.length, length)
    await fake.pass(1)
    t.equal(fake.attempts.length, length + 1)
  }
  t.same(told, [])
  fake.onSent = (sent) => sent.answer()
  await fake.pass(500)
  t.same([fake.attempts.length, told], [6, [id]])
  t.same(events, [], 'the other connections report it')
})

void t.test('if nothing arrives, watchers poll, and that is reported once', async (t) => {
  const opened = await open(t, 100)
  const { fake, watch, events, of } = opened
  opened.hears = false
  void watch(newId())
  await fake.pass(199)
  t.same([events, opened.open()], [[], 1])
  await fake.pass(1)
  t.match(events[0], /^error: notifications do not arrive: a pooler/)
  t.equal(opened.open(), 0)
  await watch(newId())
  await fake.pass(1000)
  t.same([fake.attempts.length, events.length, of('watch').length], [1, 1, 0])
})

void t.test('a connection that ends before its first message says nothing of the next one', async (t) => {
  const opened = await open(t, 200)
  const { fake, watch, events } = opened
  opened.hears = false
  const watching = watch(newId())
  await fake.settled()
  opened.hears = true
  opened.cut()
  await watching
  await fake.pass(500)
  t.same([opened.listens().length, opened.open(), events], [2, 1, []])
})

void t.test('where a connection cannot be tried out, the next one is', async (t) => {
  const opened = await open(t)
  const { fake, watch, told } = opened
  const id = newId()
  opened.hears = false
  opened.answer = async ([name]) => {
    if (name !== 'tell' || opened.hears) return
    opened.hears = true
    throw new Error('down')
  }
  await watch(id)
  await fake.pass(50)
  t.same([fake.attempts.length, told], [2, [id]])
})

void t.test('after the end nobody waits, and no connection is left or made again', async (t) => {
  const { fake, watch, listener, told, open: left } = await open(t)
  await watch(newId())
  await listener.close()
  t.equal(left(), 0)
  await watch(newId())
  t.same([fake.attempts.length, told, fake.timers()], [1, [], 0])

  for (const end of ['accept', 'refuse'] as const)
    await t.test(`while one is made, then ${end}ed`, async (t) => {
      const { fake, watch, listener, listens, open: left } = await open(t)
      fake.accepts = false
      const watching = watch(newId())
      await fake.settled()
      await listener.close()
      await watching
      fake.attempts[0]?.[end]('refused')
      await fake.pass(1000)
      t.same([fake.attempts.length, left(), listens()], [1, 0, []])
    })
  await t.test('while one waits to be made again', async (t) => {
    const { fake, watch, listener, cut } = await open(t)
    await watch(newId())
    cut()
    await listener.close()
    await fake.pass(1000)
    t.equal(fake.attempts.length, 1)
  })
})

void t.test('who stops watching while there is no connection has no row to be taken out', async (t) => {
  const { fake, watch, of, cut } = await open(t)
  const stops = await Promise.all([newId(), newId(), newId()].map(watch))
  fake.accepts = false
  cut()
  for (const stop of stops) stop()
  await fake.pass(50)
  t.same(of('unwatch'), [])
})
