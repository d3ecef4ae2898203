import t, { type Test } from 'tap'
import { BREAKER_DEFAULTS, type BreakerState, withBreaker } from '../../src/store/around.ts'
import {
  CorruptRecord,
  RecordLocked,
  type Store,
  StoreFull,
  StoreUnavailable,
} from '../../src/store/register.ts'
import { newId, newToken, SPANS, settling, until } from './fixtures.ts'

/** Timers of the breaker wait until the test lets them go. Returns how long each is to wait, in order. */
function byHand(t: Test) {
  const { setTimeout, clearTimeout } = globalThis
  t.teardown(() => Object.assign(globalThis, { setTimeout, clearTimeout }))
  const waits: number[] = []
  let due: (() => void) | null = null
  Object.assign(globalThis, {
    setTimeout: (run: () => void, wait: number) => {
      waits.push(wait)
      due = run
      return { unref: () => run }
    },
    clearTimeout: (timer: unknown) => {
      if (timer === due) due = null
    },
  })
  /** The time of the timer that waits, if one does, has come. Returns whether it had not been cleared. */
  const elapse = async (): Promise<boolean> => {
    const run = due
    due = null
    run?.()
    await turn()
    return run !== null
  }
  return { waits, elapse }
}

const turn = (): Promise<void> => new Promise((next) => setImmediate(next))

/** A store that does what the test says. */
function scripted() {
  const script = { fail: null as Error | null, calls: [] as string[] }
  const call = (name: string) => async () => {
    script.calls.push(name)
    if (script.fail !== null) throw script.fail
    return name
  }
  const names = [
    'put',
    'swap',
    'get',
    'renew',
    'due',
    'remove',
    'list',
    'note',
    'notes',
    'watch',
    'throttle',
    'ping',
    'traits',
  ] as const
  const methods = Object.fromEntries(names.map((name) => [name, call(name)]))
  const close = async () => void script.calls.push('close')
  const { note, notes, throttle, ...rest } = methods
  const ports = { history: { append: note, read: notes }, limits: { take: throttle } }
  return { script, store: { name: 'scripted', close, ...ports, ...rest } as unknown as Store }
}

function setup(over = {}) {
  const { script, store } = scripted()
  const states: BreakerState[] = []
  const onState = (state: BreakerState) => void states.push(state)
  const options = { ...BREAKER_DEFAULTS, probeAfter: 5, probeAtMost: 20, onState, ...over }
  return { script, states, breaker: withBreaker(store, options) }
}

const id = newId()
const down = new StoreUnavailable('no answer', true)

void t.test('every operation goes through while it is closed', async (t) => {
  const told: string[] = []
  const { script, breaker } = setup({ onOperation: (operation: string) => void told.push(operation) })
  const b = Buffer.alloc(1)
  t.equal(breaker.name, 'scripted')
  const replies = [
    await breaker.put(id, b, SPANS),
    await breaker.swap(id, { version: 1 }, b, SPANS, false),
    await breaker.get(id),
    await breaker.renew([{ id, token: newToken(), dueIn: 1, dropIn: 0 }]),
    await breaker.due(1),
    await breaker.remove(id, 1),
    await breaker.list('all', null, 1),
    await breaker.history.append(id, []),
    await breaker.history.read(id),
    await breaker.watch(id, () => {}),
    await breaker.limits.take(id, { count: 1, per: 1 }, 1),
    await breaker.ping(),
    await breaker.traits(),
  ]
  t.same(script.calls, replies)
  t.equal(new Set(replies).size, 13)
  t.same(
    told,
    (replies as readonly unknown[]).filter((name) => name !== 'watch'),
    'each under its name in metrics',
  )
})

void t.test('a record as it is stored is read like any other, where it makes no difference', async (t) => {
  const { store } = scripted()
  const told: string[] = []
  const onOperation = (operation: string): void => void told.push(operation)
  const options = { ...BREAKER_DEFAULTS, onState: () => {}, onOperation }
  t.equal(await withBreaker(store, options).stored?.(id), 'get')
  const sealed = { ...store, stored: async () => 'as stored' as never }
  t.equal(await withBreaker(sealed, options).stored?.(id), 'as stored')
  t.same(told, ['get', 'get'])
})

void t.test('R13 it opens after five failures in a row, refuses at once, and closes by itself', async (t) => {
  const { script, states, breaker } = setup()
  script.fail = down
  for (let n = 0; n < 4; n++) await t.rejects(breaker.get(id), down)
  script.fail = null
  await breaker.get(id)
  script.fail = down
  for (let n = 0; n < 5; n++) await t.rejects(breaker.get(id), down)
  t.same(states, ['open'], 'a success in between resets the count')
  const asked = script.calls.length
  await t.rejects(breaker.get(id), {
    name: 'StoreUnavailable',
    maybeApplied: false,
    message: /breaker open/,
  })
  await t.rejects(breaker.ping(), { message: /breaker open/ })
  t.equal(script.calls.length, asked, 'the store is not asked')
  await until(() => script.calls.length >= asked + 3)
  t.ok(script.calls.slice(asked).every((name) => name === 'ping'))
  script.fail = null
  await until(() => states.at(-1) === 'closed')
  t.same(states.slice(0, 5), ['open', 'half_open', 'open', 'half_open', 'open'])
  t.equal(await breaker.get(id), 'get')
  script.fail = down
  await t.rejects(breaker.get(id), down)
  t.equal(states.at(-1), 'closed', 'earlier failures are forgotten')
  await breaker.close()
})

void t.test('watching bypasses it: not refused while it is open, and not a sign of life', async (t) => {
  const { script, store } = scripted()
  const watch = async () => () => {}
  const states: BreakerState[] = []
  const onState = (state: BreakerState) => void states.push(state)
  const options = { threshold: 2, probeAfter: 60_000, probeAtMost: 60_000, onState }
  const breaker = withBreaker({ ...store, watch }, options)
  t.teardown(() => breaker.close())
  script.fail = down
  await t.rejects(breaker.limits.take(id, { count: 1, per: 1 }, 1), down)
  await breaker.watch(id, () => {})
  t.same(states, [])
  await t.rejects(breaker.limits.take(id, { count: 1, per: 1 }, 1), down)
  t.same(states, ['open'], 'the watch in between did not count as a success')
  t.type(await breaker.watch(id, () => {}), Function)
  await t.rejects(breaker.limits.take(id, { count: 1, per: 1 }, -1), { message: /breaker open/ })
})

void t.test('lists and histories do not open it, and are refused while it is open', async (t) => {
  const { script, states, breaker } = setup({ probeAfter: 60_000, probeAtMost: 60_000 })
  t.teardown(() => breaker.close())
  const looks: readonly (() => Promise<unknown>)[] = [
    () => breaker.list('all', null, 1),
    () => breaker.history.append(id, []),
    () => breaker.history.read(id),
  ]
  script.fail = down
  for (let n = 0; n < 4; n++) for (const look of looks) await t.rejects(look(), down)
  t.same(states, [])
  for (let n = 0; n < 5; n++) await t.rejects(breaker.get(id), down)
  t.same(states, ['open'])
  for (const look of looks) await t.rejects(look(), { message: /breaker open/ })
})

void t.test('errors that are answers do not open it', async (t) => {
  const { script, states, breaker } = setup()
  for (const error of [
    new StoreFull('full'),
    new RecordLocked('locked'),
    new CorruptRecord('bad'),
    new TypeError('bug'),
  ]) {
    script.fail = error
    for (let n = 0; n < 10; n++) await t.rejects(breaker.get(id), error)
  }
  t.same(states, [])
})

void t.test('failures of operations from before it opened do not open it again', async (t) => {
  const { script, store } = scripted()
  const failures: ((error: Error) => void)[] = []
  const successes: ((reply: never) => void)[] = []
  const slow = () =>
    new Promise<never>((resolve, reject) => {
      failures.push(reject)
      successes.push(resolve)
    })
  const states: BreakerState[] = []
  const options = {
    threshold: 2,
    probeAfter: 1,
    probeAtMost: 1,
    onState: (s: BreakerState) => void states.push(s),
  }
  const breaker = withBreaker({ ...store, get: slow }, options)
  const pending = Array.from({ length: 6 }, () => breaker.get(id))
  const settled = Promise.allSettled(pending)
  failures[0]?.(down)
  failures[1]?.(down)
  await until(() => states.at(-1) === 'closed')
  for (const fail of failures.slice(2, 5)) fail(down)
  successes[5]?.({} as never)
  await settled
  t.same(states, ['open', 'half_open', 'closed'])
  t.same(script.calls, ['ping'])
})

void t.test('each probe waits twice as long as the one before, up to a limit', async (t) => {
  const { waits, elapse } = byHand(t)
  const { script, breaker } = setup({ threshold: 1, probeAfter: 100, probeAtMost: 500 })
  script.fail = down
  await t.rejects(breaker.get(id), down)
  for (let n = 0; n < 4; n++) t.ok(await elapse())
  await breaker.close()
  t.same(waits, [100, 200, 400, 500, 500])
})

void t.test('close waits for the store to close', async (t) => {
  const { store } = scripted()
  const { promise: closed, resolve } = Promise.withResolvers<void>()
  const breaker = withBreaker({ ...store, close: () => closed }, { ...BREAKER_DEFAULTS, onState: () => {} })
  const closing = breaker.close()
  const isClosed = settling(closing)
  await new Promise((next) => setImmediate(next))
  t.equal(isClosed(), false)
  resolve()
  await closing
})

void t.test('close ends the probing', async (t) => {
  const { elapse } = byHand(t)
  const { script, states, breaker } = setup({ threshold: 1 })
  script.fail = down
  await t.rejects(breaker.get(id), down)
  await breaker.close()
  t.notOk(await elapse())
  t.same(script.calls, ['get', 'close'])
  t.same(states, ['open'])
})

/** A store that is down, whose answer to a probe the test gives. */
async function probed(t: Test) {
  const { elapse } = byHand(t)
  const { store } = scripted()
  const states: BreakerState[] = []
  let fail: (error: Error) => void = () => {}
  const ping = () => new Promise<never>((_, reject) => (fail = reject))
  const onState = (state: BreakerState) => void states.push(state)
  const options = { threshold: 1, probeAfter: 1, probeAtMost: 1, onState }
  const breaker = withBreaker({ ...store, get: () => Promise.reject(down), ping }, options)
  t.teardown(() => breaker.close())
  breaker.heard()
  t.same(states, [])
  await t.rejects(breaker.get(id), down)
  t.ok(await elapse())
  t.same(states, ['open', 'half_open'])
  return { breaker, states, elapse, fail: () => fail(down) }
}

void t.test('close during a probe ends it, too', async (t) => {
  const { breaker, states, elapse, fail } = await probed(t)
  await breaker.close()
  fail()
  await turn()
  t.notOk(await elapse())
  t.same(states, ['open', 'half_open', 'open'])
})

void t.test('any sign of life from the store closes it at once, whatever a probe does', async (t) => {
  const { breaker, states, elapse, fail } = await probed(t)
  breaker.heard()
  fail()
  await turn()
  t.notOk(await elapse())
  t.same(states, ['open', 'half_open', 'closed'])
})

void t.test('a sign of life ends the probing, and the count of failures starts over', async (t) => {
  const { elapse } = byHand(t)
  const { script, states, breaker } = setup({ threshold: 2 })
  script.fail = down
  for (let n = 0; n < 2; n++) await t.rejects(breaker.get(id), down)
  breaker.heard()
  t.notOk(await elapse())
  t.same(script.calls, ['get', 'get'], 'no probe')
  await t.rejects(breaker.get(id), down)
  t.same(states, ['open', 'closed'])
  await t.rejects(breaker.get(id), down)
  t.same(states, ['open', 'closed', 'open'])
  await breaker.close()
})

void t.test('a synchronous answer is passed on synchronously and reported', async (t) => {
  const told: unknown[] = []
  const onOperation = (operation: string, _time: number, error: unknown) => void told.push([operation, error])
  const { store } = scripted()
  const reply = { done: false, now: 1, bytes: Buffer.alloc(0) } as const
  const onState = () => {}
  const breaker = withBreaker({ ...store, put: () => reply }, { ...BREAKER_DEFAULTS, onState, onOperation })
  t.equal(breaker.put(id, Buffer.alloc(1), SPANS), reply)
  t.same(told, [['put', null]])
})

void t.test('an operation took as long as its caller waited, at most', async (t) => {
  let took = Number.NaN
  const onOperation = (_operation: string, time: number): void => void (took = time)
  const { breaker } = setup({ onOperation })
  const began = performance.now()
  await breaker.get(id)
  t.ok(took > 0 && took <= performance.now() - began)
})

void t.test('the end of every operation is reported, refused ones included', async (t) => {
  const told: unknown[] = []
  const onOperation = (operation: string, time: number, error: unknown) =>
    void told.push([operation, time > 0, error])
  const { script, breaker } = setup({ threshold: 1, probeAfter: 60_000, probeAtMost: 60_000, onOperation })
  t.teardown(() => breaker.close())
  await breaker.get(id)
  script.fail = down
  await t.rejects(breaker.list('all', null, 1), down)
  await t.rejects(async () => breaker.put(id, Buffer.alloc(1), SPANS), down)
  t.same(told, [
    ['get', true, null],
    ['list', true, down],
    ['put', true, down],
  ])
  await t.rejects(breaker.get(id), { message: /breaker open/ })
  t.match(told[3], ['get', false, { message: /breaker open/ }], 'these take no time')
  script.fail = null
  await breaker.watch(id, () => {})
  t.equal(told.length, 4, 'watching is not reported')
})

void t.test('V08 the time of another store is asked for like that of this one', async (t) => {
  const { store } = scripted()
  const told: string[] = []
  const onOperation = (operation: string): void => void told.push(operation)
  const options = { ...BREAKER_DEFAULTS, onState: () => {}, onOperation }
  t.notOk('pingOther' in withBreaker(store, options))
  const both = withBreaker({ ...store, pingOther: async () => 42 }, options)
  t.equal(await both.pingOther?.(), 42)
  t.same(told, ['ping'])
})
