import { pino } from 'pino'
import t from 'tap'
import { Metrics } from '../../src/observe/metrics.ts'
import { StoreHealth } from '../../src/observe/observer.ts'
import { memoryStore } from '../../src/store/memory.ts'
import {
  CorruptRecord,
  type Store,
  type StoreTraits,
  StoreUnavailable,
  Unreplicated,
} from '../../src/store/register.ts'

const log = pino({ level: 'silent' })
const memory = (): Store => memoryStore({ clock: () => 1000, maxBytes: 2 ** 20 })
const traits = (evicts: boolean | null): StoreTraits => ({
  durable: true,
  evicts,
  forgets: null,
  hasIdentity: true,
  findings: [],
  refusals: [],
})

/** A logger, and the messages that it was told. */
function logged() {
  const lines: string[] = []
  const write = (line: string) => void lines.push((JSON.parse(line) as { msg: string }).msg)
  return { lines, told: pino({}, { write }) }
}

/** A store that the test answers for, one call after the other. */
function asked() {
  const waiting: PromiseWithResolvers<StoreTraits>[] = []
  const store: Store = {
    ...memory(),
    traits: () => {
      const reply = Promise.withResolvers<StoreTraits>()
      waiting.push(reply)
      return reply.promise
    },
  }
  return { store, waiting }
}

void t.test('V09 a store may evict unless it says that it does not', async (t) => {
  for (const [evicts, fitness] of [
    [false, 'fit'],
    [true, 'unfit'],
    [null, 'unfit'],
  ] as const) {
    const store = { ...memory(), traits: async () => traits(evicts) }
    const health = new StoreHealth(store.name, new Metrics(), log)
    t.equal(health.fitness(), 'not known yet')
    await health.watch(store, 2000)
    t.teardown(() => health.stop())
    t.equal(health.fitness(), fitness, `evicts: ${evicts}`)
  }
})

void t.test('V09 an answer from before a reconnect does not count for the new server', async (t) => {
  const { store, waiting } = asked()
  const health = new StoreHealth(store.name, new Metrics(), log)
  const watching = health.watch(store, 2000)
  waiting[0]?.resolve(traits(false))
  await watching
  t.teardown(() => health.stop())
  t.equal(health.fitness(), 'fit')
  health.checkAgain()
  t.equal(health.fitness(), 'not known yet', 'until it has answered')
  health.checkAgain()
  waiting[1]?.resolve(traits(false))
  await waiting[1]?.promise
  await new Promise(setImmediate)
  t.equal(health.fitness(), 'not known yet', 'the first answer came over another connection')
  waiting[2]?.reject(new Error('down'))
  await new Promise(setImmediate)
  t.equal(health.fitness(), 'not known yet')
})

void t.test('V09 changes of the grade are logged; a store that grants a key twice is unfit', async (t) => {
  const { lines, told } = logged()
  const metrics = new Metrics()
  const gradeOf = async () =>
    /^idempotency_store_grade\{store="memory"\} (\d)$/m.exec((await metrics.exposition()).text)?.[1]
  let now: Partial<StoreTraits> = {}
  let handsOut = false
  const sound = memory()
  const store: Store = {
    ...sound,
    traits: async () => ({ ...traits(false), ...now }),
    put: (id, bytes, spans, entry) => (handsOut ? memory() : sound).put(id, bytes, spans, entry),
  }
  const health = new StoreHealth('memory', metrics, told)
  t.teardown(() => health.stop())
  await health.watch(store, 2000)
  t.equal(await gradeOf(), '3')
  const again = async () => {
    const before = lines.length
    health.checkAgain()
    for (let turns = 0; turns < 50; turns++) await new Promise(setImmediate)
    return lines.slice(before)
  }
  t.same(await again(), [], 'nothing has changed')
  now = { durable: false, findings: ['appendonly is off'] }
  t.same(await again(), ['the store is graded volatile', 'appendonly is off'])
  t.equal(await gradeOf(), '1')
  t.equal(health.fitness(), 'fit')
  now = { refusals: ['claims are answered 503'] }
  t.same(
    await again(),
    ['the store is graded strict', 'claims are answered 503'],
    'what it keeps is safe, but nobody can use it',
  )
  now = {}
  t.same(await again(), ['the store is graded strict'])
  handsOut = true
  t.same(await again(), [], 'a store is tested once')
  const other = new StoreHealth('memory', metrics, told)
  t.teardown(() => other.stop())
  await other.watch(store, 2000)
  t.match(lines.slice(-2), ['the store is graded unfit', /lets two owners claim one key/])
  t.equal(await gradeOf(), '0')
  t.equal(other.fitness(), 'unfit', 'strict is not served')
})

void t.test('a grace is counted when it begins', async (t) => {
  const metrics = new Metrics()
  const health = new StoreHealth('redis', metrics, log)
  for (const left of [0, 2000, 1500, 0, 0, 700, 0]) health.onHeld(left)
  t.match((await metrics.exposition()).text, /^idempotency_store_graces_total\{store="redis"\} 2$/m)
})

void t.test('store operations are timed, failures counted, and both set idempotency_store_up', async (t) => {
  const metrics = new Metrics(false)
  const health = new StoreHealth('redis', metrics, log)
  const values = async (name: string) =>
    (await metrics.exposition()).text.split('\n').filter((line) => line.startsWith(name))
  t.strictSame(await values('idempotency_store_operation_seconds_count'), [])
  health.onOperation('put', 2, null)
  health.onOperation('put', 3, new CorruptRecord('bad'))
  health.onOperation('note', 3, new StoreUnavailable('down', true))
  t.strictSame(await values('idempotency_store_operation_seconds_count'), [
    'idempotency_store_operation_seconds_count{store="redis",operation="put"} 2',
  ])
  t.strictSame(await values('idempotency_store_errors_total'), [
    'idempotency_store_errors_total{store="redis"} 1',
  ])
  t.strictSame(await values('idempotency_store_up'), ['idempotency_store_up{store="redis"} 1'])
  health.onOperation('get', 3, new StoreUnavailable('down', true))
  t.strictSame(await values('idempotency_store_up'), ['idempotency_store_up{store="redis"} 0'])
  t.strictSame(await values('idempotency_store_errors_total'), [
    'idempotency_store_errors_total{store="redis"} 2',
  ])
})

void t.test('claims that do not reach the replicas are counted, and logged once', async (t) => {
  const { lines, told } = logged()
  const metrics = new Metrics()
  const health = new StoreHealth('redis', metrics, told)
  health.startWaits()
  const waits = async () => {
    const { text } = await metrics.exposition()
    return [...text.matchAll(/^idempotency_store_waits_total\{.*result="(.*)"\} (\d+)$/gm)].map((match) => [
      match[1],
      Number(match[2]),
    ])
  }
  t.strictSame(await waits(), [
    ['satisfied', 0],
    ['unsatisfied', 0],
  ])
  for (const satisfied of [true, false, false, true, true]) health.onWaited(satisfied)
  t.strictSame(await waits(), [
    ['satisfied', 3],
    ['unsatisfied', 2],
  ])
  t.strictSame(lines, [
    'claims do not reach the replicas (store.wait): they are withdrawn and answered 503',
    'claims reach the replicas again (store.wait)',
  ])
  health.onOperation('put', 1, new Unreplicated('no replica has it'))
  t.match((await metrics.exposition()).text, /idempotency_store_up\{store="redis"\} 1/, 'the store answers')
  t.match((await metrics.exposition()).text, /idempotency_store_errors_total\{store="redis"\} 0/)
})
