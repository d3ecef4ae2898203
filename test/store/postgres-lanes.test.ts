import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { Lanes } from '../../src/store/postgres-lanes.ts'
import type { Identity } from '../../src/store/postgres-layout.ts'
import { PartlyUnavailable, StoreUnavailable } from '../../src/store/register.ts'
import { type Asked, type FakePostgres, fakePostgres } from '../support/fake-postgres.ts'
import { until } from './fixtures.ts'

/** Longer than any test that does not wait for it. */
const LONG: Millis = 60_000
const APPLIED = { name: 'StoreUnavailable', maybeApplied: true }
const NOT_APPLIED = { name: 'StoreUnavailable', maybeApplied: false }
t.setTimeout(60_000)

type Mutable<T> = { -readonly [K in keyof T]: T[K] }

interface Opened {
  readonly server: FakePostgres
  readonly lanes: Lanes
  /** Statements that wait for an answer, but those that ask which ones are running. */
  readonly asked: Asked[]
  readonly events: string[]
  readonly looks: Asked[]
  /** Answers them: the numbers of the connections whose statements run; null: the test does. */
  running: (() => string | null) | null
  /** What the next connections find out about their server. */
  identity: Identity | null
  ups: number
}

async function open(t: Test, { timeoutMs = LONG, grace = 0, welcomes = true } = {}): Promise<Opened> {
  const server = await fakePostgres()
  server.welcomes = welcomes
  t.teardown(() => server[Symbol.asyncDispose]())
  const self: Mutable<Omit<Opened, 'lanes'>> = {
    server,
    asked: [],
    events: [],
    looks: [],
    running: () => '',
    identity: { system: '1', timeline: 1 },
    ups: 0,
  }
  server.onAsked = (one) => {
    const isLook = one.text.includes('pg_stat_activity')
    ;(isLook ? self.looks : self.asked).push(one)
    if (isLook && self.running !== null) answer(one, self.running())
  }
  const onEvent = (kind: string, detail: string) => void self.events.push(`${kind}: ${detail}`)
  const { address } = server
  const lanes = new Lanes(
    { address, timeoutMs, grace, onEvent },
    async () => self.identity,
    () => void self.ups++,
  )
  t.teardown(() => lanes.close())
  await lanes.open()
  return Object.assign(self, { lanes })
}

/** Answers as the functions of the schema do: the number comes back. */
function answer(one: Asked | undefined, ...columns: (string | null)[]): void {
  one?.answer([one.args[0] ?? null, ...columns])
}

const failureOf = (asked: Promise<unknown>): Promise<Error> =>
  asked.then(
    (done) => new Error(`none but ${String(done)}`),
    (error: Error) => error,
  )

const numbersOf = (asked: readonly Asked[]) => asked.map(({ connection }) => connection).join(' ')

/** Whether a claim is sent. */
async function claims({ lanes, asked }: Opened): Promise<boolean> {
  const { length } = asked
  const reply = failureOf(lanes.run('claim', [], 'urgent'))
  await Promise.race([reply, until(() => asked.length > length)])
  answer(asked[length])
  return asked.length > length
}

const soon = () => new Promise((next) => setTimeout(next, 30))

void t.test('a statement gets a number, gives it back, and its other columns are the reply', async (t) => {
  const { server, lanes, asked, events } = await open(t)
  t.same(events, [`connected: 127.0.0.1:${server.port}`])
  const reply = lanes.run('SELECT it', ['a', null, 7])
  await until(() => asked.length > 0)
  t.match(asked[0]?.text, /^\/\* idempotency-proxy [0-9a-f]{12} 1 \*\/ SELECT it$/)
  t.same(asked[0]?.args.slice(1), ['a', null, '7'])
  answer(asked[0], 'x', null)
  t.same(await reply, ['x', null])
})

void t.test('a reply to another statement is not believed, and ends the connection', async (t) => {
  const opened = await open(t)
  const { server, lanes, asked } = opened
  for (const [n, row] of [['0', 'x'], [null]].entries()) {
    const reply = failureOf(lanes.run('SELECT it', []))
    await until(() => asked.length > n)
    asked[n]?.answer(row)
    t.match(await reply, { ...APPLIED, message: /replies do not match/ })
    await until(() => opened.ups === n + 2)
    t.equal(server.opened, n + 2)
  }
})

void t.test('eight connections, of which two serve outcomes and leases alone', async (t) => {
  const { server, lanes, asked } = await open(t)
  for (let n = 0; n < 5; n++) void lanes.run(`plain ${n}`, []).catch(() => {})
  for (let n = 0; n < 5; n++) void lanes.run(`local ${n}`, [], 'local').catch(() => {})
  await until(() => asked.length === 6)
  await soon()
  t.equal(asked.length, 6)
  for (let n = 0; n < 5; n++) void lanes.run(`urgent ${n}`, [], 'urgent').catch(() => {})
  await until(() => asked.length === 8)
  await soon()
  t.equal(asked.length, 8)
  t.equal(server.open.size, 8)
  t.same(new Set(asked.map(({ connection }) => connection)).size, 8, 'one statement each')
  t.ok(asked.slice(6).every(({ text }) => text.includes('urgent')))
  for (const one of asked.slice(0, 8)) answer(one)
  await until(() => asked.length === 15)
  t.same(
    asked.slice(8).map(({ text }) => text.split('*/ ')[1]),
    ['urgent 2', 'urgent 3', 'urgent 4', 'local 1', 'local 2', 'local 3', 'local 4'],
    'outcomes first, then in their order',
  )
  t.equal(server.opened, 8)
})

void t.test('reads and claims go in the order in which they came', async (t) => {
  const { lanes, asked } = await open(t)
  for (let n = 0; n < 6; n++) void lanes.run('first', []).catch(() => {})
  await until(() => asked.length === 6)
  for (const name of ['a', 'b', 'c', 'd']) {
    void lanes.run(name, [], name < 'c' ? 'local' : 'plain').catch(() => {})
    await soon()
  }
  const next = async (): Promise<string> => {
    const { length } = asked
    answer(asked[length - 6])
    await until(() => asked.length > length)
    return asked.at(-1)?.text.at(-1) ?? ''
  }
  t.same([await next(), await next(), await next(), await next()], ['a', 'b', 'c', 'd'])
  for (const name of ['e', 'f']) {
    void lanes.run(name, [], name === 'e' ? 'plain' : 'local').catch(() => {})
    await soon()
  }
  t.same([await next(), await next()], ['e', 'f'])
})

void t.test('a statement that was sent may be applied when it is late; one that waited is not', async (t) => {
  const opened = await open(t, { timeoutMs: 60 })
  const { server, lanes, asked, events } = opened
  opened.running = () => numbersOf(asked)
  const sent = Array.from({ length: 6 }, () => failureOf(lanes.run('sent', [])))
  const waiting = failureOf(lanes.run('waiting', []))
  for (const error of await Promise.all(sent)) t.match(error, { ...APPLIED, message: /timed out/ })
  t.match(await waiting, { ...NOT_APPLIED, message: /no connection free: timed out/ })
  await soon()
  t.notOk(
    asked.some(({ text }) => text.includes('waiting')),
    'nor is it sent later',
  )

  for (const one of asked) answer(one, 'late')
  const { opened: before } = server
  const reply = lanes.run('next', [])
  await until(() => asked.length === 7)
  answer(asked[6], 'x')
  t.same(await reply, ['x'])
  await soon()
  t.equal(server.opened, before, 'connections whose answers were only late are used again')
  t.same(events, [`connected: 127.0.0.1:${server.port}`])
})

void t.test('what conflicts is sent again, four times at most, unless it is late', async (t) => {
  const { lanes, asked } = await open(t)
  const reply = failureOf(lanes.run('conflicting', []))
  for (let n = 0; n < 4; n++) {
    await until(() => asked.length > n)
    asked[n]?.fail(n % 2 === 0 ? '40001' : '40P01')
  }
  t.match(await reply, { ...NOT_APPLIED, message: /\(40P01\)/ })
  await soon()
  t.equal(asked.length, 4)
  t.equal(new Set(asked.map(({ args }) => args[0])).size, 1, 'under its number')

  const other = await open(t, { timeoutMs: 60 })
  t.match(await failureOf(other.lanes.run('late', [])), APPLIED)
  other.asked[0]?.fail('40001')
  await soon()
  t.equal(other.asked.length, 1)
})

void t.test('a refusal keeps the connection; an uncertain outcome does not', async (t) => {
  const opened = await open(t)
  const { server, lanes, asked } = opened
  const refused = failureOf(lanes.run('refused', []))
  await until(() => asked.length === 1)
  asked[0]?.fail('22012')
  t.match(await refused, NOT_APPLIED)
  await soon()
  t.equal(server.open.size, 1)
  const uncertain = failureOf(lanes.run('uncertain', []))
  await until(() => asked.length === 2)
  asked[1]?.fail('57P01')
  t.match(await uncertain, APPLIED)
  await until(() => opened.ups === 2)
  t.same([...server.open.keys()], [2])
})

void t.test('a server that has become a standby is left', async (t) => {
  const opened = await open(t)
  const { server, lanes, asked } = opened
  const replies = Array.from({ length: 3 }, () => failureOf(lanes.run('it', [])))
  await until(() => asked.length === 3)
  answer(asked[0])
  asked[1]?.fail('IP001')
  t.match(await replies[1], NOT_APPLIED)
  await until(() => server.open.size === 1)
  t.ok(server.open.has(asked[2]?.connection ?? 0), 'what waits for an answer stays')
  asked[2]?.fail('IP001')
  await until(() => opened.ups === 2)
})

void t.test('while many answers are late, only reads go on, and that is reported once', async (t) => {
  const opened = await open(t, { timeoutMs: 200 })
  const { server, lanes, asked, events } = opened
  opened.running = () => numbersOf(asked)
  const late: Promise<Error>[] = []
  const isHanging = () => events.some((event) => event.includes('does not finish'))
  while (!isHanging()) {
    late.push(failureOf(lanes.run('claim', [])))
    await new Promise((next) => setTimeout(next, 10))
  }
  await Promise.all(late)
  // Two of sixteen connections are for reads.
  t.equal(asked.length, 14)
  t.ok(server.open.size <= 16, `${server.open.size}`)
  for (const kind of ['plain', 'urgent'] as const) {
    const refused = await failureOf(lanes.run('claim', [], kind))
    t.match(refused, { ...NOT_APPLIED, message: /does not finish the statements/ })
    t.ok(refused instanceof PartlyUnavailable)
  }
  const read = lanes.run('read', [], 'local')
  await until(() => asked.length === 15)
  answer(asked[0])
  await until(() => claims(opened))
  t.equal(asked.length, 16, 'a read takes the place of no claim')
  answer(asked[14], 'x')
  t.same(await read, ['x'])
  t.equal(events.filter((event) => event.includes('does not finish')).length, 1)
  for (const one of asked.slice(1, 14)) answer(one)
  await until(() => server.open.size <= 8)
  t.equal(server.open.size, 8, 'surplus connections are closed')
})

void t.test(
  'the server is asked which late statements still run; others were answered in vain',
  async (t) => {
    const opened = await open(t, { timeoutMs: 300 })
    const { server, lanes, asked, looks } = opened
    opened.running = null
    const replies = ['slow', 'lost'].map((text) => failureOf(lanes.run(text, [])))
    for (const reply of replies) t.match(await reply, APPLIED)
    await until(() => looks.length === 1)
    const [slow, lost] = asked.map(({ connection }) => connection)
    t.match(looks[0]?.args[1], /^\/\* idempotency-proxy [0-9a-f]{12} $/, 'of this process')
    answer(looks[0], `${slow} ${looks[0]?.connection}`)
    await until(() => !server.open.has(lost ?? 0))
    t.ok(server.open.has(slow ?? 0))
    await until(() => looks.length === 2)
    // Not even this statement: the server does not tell.
    answer(looks[1], null)
    await until(() => looks.length === 3)
    t.ok(server.open.has(slow ?? 0))
    answer(asked[0])
    answer(looks[2], `${looks[2]?.connection}`)
    await new Promise((next) => setTimeout(next, 1200))
    t.equal(looks.length, 3, 'as long as answers are late')
  },
)

void t.test('statements of lost connections count until the server no longer runs them', async (t) => {
  const opened = await open(t)
  const { server, lanes, asked, events } = opened
  const isHanging = () => events.some((event) => event.includes('does not finish'))
  opened.running = () => numbersOf(asked)
  for (let n = 0; n < 14; n++) {
    t.notOk(isHanging())
    const reply = failureOf(lanes.run('claim', []))
    await until(() => asked.length > n)
    server.open.get(asked[n]?.connection ?? 0)?.destroy()
    t.match(await reply, APPLIED)
    await until(() => opened.ups === n + 2)
  }
  t.ok(isHanging())
  t.ok((await failureOf(lanes.run('claim', []))) instanceof PartlyUnavailable)
  opened.running = () => null
  await until(() => claims(opened))
})

void t.test('a later timeline of the same server takes over; an earlier one is refused', async (t) => {
  const opened = await open(t)
  const { server, lanes, asked, events } = opened
  opened.running = () => numbersOf(asked)
  const left = failureOf(lanes.run('on the old primary', []))
  await until(() => asked.length === 1)
  opened.identity = { system: '1', timeline: 2 }
  lanes.recheck()
  t.match(await left, APPLIED)
  await until(() => server.open.size === 1)
  t.same([...server.open.keys()], [2])
  t.equal(opened.ups, 2)
  t.match(events.slice(1), [/^error: PostgreSQL has failed over \(timeline 2\)/])
  for (const identity of [
    { system: '1', timeline: 1 },
    { system: '2', timeline: 9 },
  ]) {
    opened.identity = identity
    const { length } = events
    await until(() => {
      lanes.recheck()
      return events.length > length
    })
    t.match(
      events.at(-1),
      identity.timeline === 1
        ? /^error: the server is an old primary: its timeline is 1, that of its successor 2/
        : /^error: the name leads to a different server while the one in use still answers/,
    )
    await until(() => server.open.size === 1)
    t.ok(server.open.has(2))
  }
  for (const identity of [null, { system: '1', timeline: 2 }]) {
    opened.identity = identity
    const { opened: before } = server
    const { length } = events
    await until(() => {
      lanes.recheck()
      return server.opened > before
    })
    await soon()
    t.equal(events.length, length, 'the same one, or one that does not tell')
  }
})

void t.test('a different server is used once the one in use has been silent for long', async (t) => {
  const opened = await open(t, { timeoutMs: 40 })
  const { server, lanes, asked, events } = opened
  opened.running = () => numbersOf(asked)
  const begun = performance.now()
  t.match(await failureOf(lanes.run('silent', [])), APPLIED)
  opened.identity = { system: '2', timeline: 1 }
  while (opened.ups < 2) {
    lanes.recheck()
    await new Promise((next) => setTimeout(next, 10))
  }
  const took = performance.now() - begun
  t.ok(took > 10 * 40, `after ten timeouts, not ${took}`)
  await until(() => !server.open.has(1))
  t.ok(events.some((event) => event.startsWith('error: PostgreSQL is a different server now')))
})

void t.test('without a connection everything is refused, and one is tried again and again', async (t) => {
  const opened = await open(t)
  const { server, lanes, events } = opened
  const name = `127.0.0.1:${server.port}`
  // Once it was read: before that, some would end with a reset, which is another error.
  const cut = () => server.open.forEach((socket) => socket.bytesRead > 0 && socket.destroy())
  server.welcomes = false
  cut()
  await until(() => events.length === 2)
  t.match(await failureOf(lanes.run('it', [], 'local')), {
    ...NOT_APPLIED,
    message: /is not connected: (?!closed)/,
  })
  for (let n = 0; n < 4; n++) {
    const { opened: before } = server
    await until(() => {
      cut()
      return server.opened > before
    })
  }
  server.welcomes = true
  cut()
  await until(() => opened.ups === 2)
  t.equal(events[1], `disconnected: ${name}`)
  t.equal(events.at(-1), `connected: ${name}`)
  t.equal(new Set(events).size, events.length - 1, 'each error is reported once')
})

void t.test('close() refuses what waits, fails what was sent, and leaves no connection', async (t) => {
  const { server, lanes, asked } = await open(t)
  const replies = Array.from({ length: 7 }, () => failureOf(lanes.run('it', [])))
  await until(() => asked.length === 6)
  await lanes.close()
  for (const reply of replies.slice(0, 6)) t.match(await reply, APPLIED)
  t.match(await replies[6], { ...NOT_APPLIED, message: /is not connected: closed/ })
  t.match(await failureOf(lanes.run('later', [])), { ...NOT_APPLIED, message: /is not connected: closed/ })
  lanes.recheck()
  await until(() => server.open.size === 0)
  const { opened } = server
  await new Promise((next) => setTimeout(next, 200))
  t.equal(server.opened, opened)
})

void t.test('a close waits until no connection is left', async (t) => {
  const { server, lanes } = await open(t)
  await lanes.close()
  t.equal(server.open.size, 0)
})

void t.test('what only a person can fix ends it', async (t) => {
  const server = await fakePostgres()
  t.teardown(() => server[Symbol.asyncDispose]())
  const address = { host: '127.0.0.1', port: server.port, user: 'u', password: '', database: 'd', tls: null }
  const events: string[] = []
  const onEvent = (kind: string) => void events.push(kind)
  const lanes = new Lanes(
    { address, timeoutMs: LONG, onEvent },
    async () => {
      throw new StoreUnavailable('of a later release', false)
    },
    () => {},
  )
  await t.rejects(lanes.open(), { message: 'of a later release' })
  t.match(await failureOf(lanes.run('it', [])), { message: /closed/ })
  await new Promise((next) => setTimeout(next, 300))
  t.equal(server.opened, 1)
})

void t.test('a connection takes half a grace at most, or the next would come too late', async (t) => {
  const begun = performance.now()
  const { server } = await open(t, { grace: 400, welcomes: false })
  const took = performance.now() - begun
  t.ok(took > 190 && took < 700, `${took}`)
  await until(() => server.opened === 3)
  const again = performance.now()
  await until(() => server.open.size === 0)
  t.ok(performance.now() - again < 700)
})

void t.test('one connection is made at a time, and none before its time', async (t) => {
  const opened = await open(t)
  const { server, lanes, events } = opened
  for (let n = 0; n < 5; n++) lanes.recheck()
  await until(() => server.opened === 2)
  await soon()
  t.equal(server.opened, 2)
  opened.identity = { system: '2', timeline: 1 }
  lanes.recheck()
  await until(() => events.length === 2)
  // The first delay is 50 ms.
  for (let n = 0; n < 5; n++) lanes.recheck()
  await new Promise((next) => setTimeout(next, 20))
  t.equal(server.opened, 3)
})
