import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import type { Lanes } from '../../src/store/postgres-lanes.ts'
import type { SqlArg, SqlRow } from '../../src/store/postgres-link.ts'
import { Listener } from '../../src/store/postgres-listener.ts'
import { fakePostgres } from '../support/fake-postgres.ts'
import { newId, until } from './fixtures.ts'

t.setTimeout(60_000)

type Call = readonly [name: string, ...args: SqlArg[]]

async function open(t: Test, timeoutMs = 5000) {
  const server = await fakePostgres()
  t.teardown(() => server[Symbol.asyncDispose]())
  const listens: string[] = []
  server.onAsked = (asked) => {
    listens.push(asked.text)
    asked.answer()
  }
  const self = {
    server,
    listens,
    calls: [] as Call[],
    events: [] as string[],
    /** Of the functions, which do nothing by themselves. */
    answer: async (_call: Call): Promise<void> => {},
    hears: true,
    of: (name: string) => self.calls.filter(([one]) => one === name),
    channel: () => /LISTEN (idempotency_[0-9a-f]{16})$/.exec(listens.at(-1) ?? '')?.[1] ?? '',
  }
  const run = async (text: string, args: readonly SqlArg[], kind: string): Promise<SqlRow> => {
    const call: Call = [/idempotency\.(\w+)/.exec(text)?.[1] ?? '', ...args]
    t.equal(kind, 'local')
    self.calls.push(call)
    if (call[0] === 'tell' && self.hears)
      for (const channel of args[0] as string[]) server.notify(channel, String(args[1]))
    await self.answer(call)
    return []
  }
  const { address } = server
  const onEvent = (kind: string, detail: string) => void self.events.push(`${kind}: ${detail}`)
  const listener = new Listener({ address, timeoutMs, onEvent, service: 'pay' }, { run } as Lanes, () => 6)
  t.teardown(() => listener.close())
  let told: RecordId[] = []
  const watch = (id: RecordId) => listener.watch(id, () => void told.push(id))
  const takeTold = () => {
    const all = told
    told = []
    return all
  }
  return Object.assign(self, { listener, watch, told: () => told, takeTold })
}

const soon = () => new Promise((next) => setTimeout(next, 40))
/** The first delay before an attempt is 50 ms. */
const afterRetry = () => new Promise((next) => setTimeout(next, 200))

void t.test('the first watcher opens one connection, which all share, and is written down', async (t) => {
  const { server, calls, channel, listens, watch, told, listener } = await open(t)
  const [id, other] = [newId(), newId()]
  listener.resubscribe()
  t.equal(server.opened, 0)
  await watch(id)
  t.match(channel(), /^idempotency_[0-9a-f]{16}$/)
  t.same(calls, [
    ['tell', [channel()], 'pay hello'],
    ['watch', 'pay', id, 6, 1250, channel()],
  ])
  await watch(other)
  await watch(id)
  t.equal(calls.length, 3)
  t.same(calls[2], ['watch', 'pay', other, 6, 1250, channel()])
  t.same([server.opened, listens.length], [1, 1])
  t.same(told(), [])
})

void t.test('watchers are notified of their record, and of their service alone', async (t) => {
  const { server, channel, watch, told, calls, takeTold, listener } = await open(t)
  const [id, other] = [newId(), newId()]
  for (const one of [id, other]) await watch(one)
  for (const message of [`other ${id}`, 'pay', id, '']) server.notify(channel(), message)
  server.notify(channel(), `pay ${id}`)
  await until(() => told().length > 0)
  await soon()
  t.same(takeTold(), [id])

  const { length } = calls
  listener.tell(other, '')
  listener.tell(other, channel())
  await until(() => told().length > 1)
  t.same(takeTold(), [other, other])
  t.equal(calls.length, length)
  listener.tell(id, `a ${channel()} b`)
  t.same(calls.slice(length), [['tell', ['a', 'b'], `pay ${id}`]], 'others are told by the server')
  listener.tell(id, 'c')
  t.same(calls.at(-1), ['tell', ['c'], `pay ${id}`])
})

void t.test('who no longer watches is taken out, before the next one is written down', async (t) => {
  const opened = await open(t)
  const { channel, watch, of, listener } = opened
  const id = newId()
  const [first, second] = [await watch(id), await watch(id)]
  first()
  t.same(of('unwatch'), [])
  let release = (): void => {}
  opened.answer = ([name]) =>
    name === 'unwatch' ? new Promise((resolve) => (release = resolve)) : Promise.resolve()
  second()
  t.same(of('unwatch'), [['unwatch', 'pay', id, channel()]])
  const again = watch(id)
  await soon()
  t.equal(of('watch').length, 1)
  release()
  await again
  t.equal(of('watch').length, 2)
  // A failure is not reported: the row goes by itself.
  opened.answer = () => Promise.reject(new Error('down'))
  ;(await again)()
  listener.tell(id, 'a')
  await soon()
})

void t.test('a new connection tells watchers that they may have missed something', async (t) => {
  const { server, of, watch, told, takeTold, listener, channel } = await open(t)
  const id = newId()
  await watch(id)
  for (const act of [() => listener.resubscribe(), () => server.open.forEach((one) => one.destroy())]) {
    const { length } = of('watch')
    act()
    await until(() => told().length > 0)
    t.same(takeTold(), [id])
    t.same(of('watch').slice(length), [['watch', 'pay', id, 6, 1250, channel()]])
  }
  t.equal(server.opened, 3)
})

void t.test('without watchers there is no new connection until the next one comes', async (t) => {
  const { server, watch, of } = await open(t)
  const stop = await watch(newId())
  stop()
  server.open.forEach((one) => one.destroy())
  await until(() => server.open.size === 0)
  await afterRetry()
  t.equal(server.opened, 1)
  await watch(newId())
  t.same([server.opened, of('watch').length], [2, 2])
})

void t.test('a watcher that comes before the next attempt makes the connection itself', async (t) => {
  const { server, watch, listener } = await open(t)
  const stop = await watch(newId())
  stop()
  listener.resubscribe()
  await until(() => server.open.size === 0)
  await watch(newId())
  await afterRetry()
  t.equal(server.opened, 2)
})

void t.test('a watcher that cannot be written down polls, and is told later', async (t) => {
  const opened = await open(t)
  const { watch, told, listener } = opened
  const first = newId()
  await watch(first)
  opened.answer = async ([name]) => {
    if (name === 'watch') throw new Error('locked')
  }
  const id = newId()
  const begun = performance.now()
  await watch(id)
  t.ok(performance.now() - begun < 2000, 'without waiting for the timeout')
  t.same(told(), [])
  const { length } = opened.of('watch')
  listener.resubscribe()
  await until(() => opened.of('watch').length === length + 2)
  await soon()
  t.same(told(), [], 'no sooner than it is written down: a write after that would be missed')
  opened.answer = async () => {}
  listener.resubscribe()
  await until(() => told().includes(id))
})

void t.test('a connection that fails is tried again', async (t) => {
  const opened = await open(t)
  const { server, watch, told } = opened
  let refused = 0
  const { onAsked } = server
  server.onAsked = (asked) => {
    if (refused++ < 3) asked.fail('42501')
    else onAsked(asked)
  }
  const id = newId()
  await watch(id)
  await until(() => told().length > 0)
  t.same(told(), [id])
  t.equal(server.opened, 4)
  t.same(opened.events, [], 'the other connections report it')
})

void t.test('a server that refuses is asked less and less often', async (t) => {
  const { server, watch } = await open(t)
  server.onAsked = (asked) => asked.fail('42501')
  await watch(newId())
  await new Promise((next) => setTimeout(next, 700))
  // After 50, 150, 350 and 750 ms, at the earliest.
  t.ok(server.opened <= 5, `${server.opened}`)
})

void t.test('if nothing arrives, watchers poll, and that is reported once', async (t) => {
  const opened = await open(t, 100)
  const { server, watch, events, of } = opened
  opened.hears = false
  const begun = performance.now()
  await watch(newId())
  await until(() => events.length > 0)
  t.ok(performance.now() - begun > 190, 'after two timeouts')
  t.match(events[0], /^error: notifications do not arrive: a pooler/)
  await until(() => server.open.size === 0)
  await watch(newId())
  await afterRetry()
  t.same([server.opened, events.length, of('watch').length], [1, 1, 0])
})

void t.test('where messages arrive, a connection is kept', async (t) => {
  const { server, watch, events } = await open(t, 200)
  await watch(newId())
  await new Promise((next) => setTimeout(next, 600))
  t.same([server.opened, server.open.size, events], [1, 1, []])
})

void t.test('a connection that ends before its first message says nothing of the next one', async (t) => {
  const opened = await open(t, 200)
  const { server, watch, events, of, listens } = opened
  opened.hears = false
  const watching = watch(newId())
  await until(() => of('tell').length > 0)
  opened.hears = true
  server.open.forEach((one) => one.destroy())
  await watching
  await until(() => listens.length > 1)
  await new Promise((next) => setTimeout(next, 500))
  t.same([server.open.size, events], [1, []])
})

void t.test('where a connection cannot be tried out, the next one is', async (t) => {
  const opened = await open(t)
  const { server, watch, of, told } = opened
  const id = newId()
  opened.hears = false
  opened.answer = async ([name]) => {
    if (name !== 'tell' || opened.hears) return
    opened.hears = true
    throw new Error('down')
  }
  await watch(id)
  await until(() => of('watch').length > 0)
  t.equal(server.opened, 2)
  await until(() => told().length > 0)
  t.same(told(), [id])
})

void t.test('after the end nobody waits, and no connection is left', async (t) => {
  const { server, watch, listener, told } = await open(t)
  await watch(newId())
  await listener.close()
  t.equal(server.open.size, 0)
  const begun = performance.now()
  await watch(newId())
  t.ok(performance.now() - begun < 2000)
  await afterRetry()
  t.same([server.opened, told()], [1, []])

  for (const act of ['welcomeAll', 'end'] as const) {
    // Longer than the test may take.
    const { server, watch, listener, listens } = await open(t, 120_000)
    server.welcomes = false
    const watching = watch(newId())
    await until(() => server.opened === 1)
    await listener.close()
    await watching
    await soon()
    t.equal(server.open.size, 1, 'nobody waited for the connection')
    if (act === 'welcomeAll') server.welcomeAll()
    else server.open.forEach((one) => one.destroy())
    await until(() => server.open.size === 0)
    await afterRetry()
    t.same([server.opened, listens], [1, []])
  }
})

void t.test('after the end a lost connection is not made again', async (t) => {
  const { server, watch, listener } = await open(t)
  await watch(newId())
  server.welcomes = false
  listener.resubscribe()
  await until(() => server.opened === 2)
  server.open.forEach((one) => one.destroy())
  await until(() => server.open.size === 0)
  await soon()
  await listener.close()
  const before = server.opened
  await new Promise((next) => setTimeout(next, 700))
  t.equal(server.opened, before)
})

void t.test('watchers that come together share the connection that is being made', async (t) => {
  const opened = await open(t)
  const { server, watch, of, channel } = opened
  const ids = [newId(), newId(), newId()]
  const stops = await Promise.all(ids.map(watch))
  t.equal(server.opened, 1)
  t.same(
    of('watch').map(([, , id]) => id),
    ids,
  )
  server.welcomes = false
  server.open.forEach((one) => one.destroy())
  await until(() => server.open.size === 0)
  for (const stop of stops) stop()
  await soon()
  t.same(of('unwatch'), [], 'on a new connection there is no row')
  t.ok(channel())
})
