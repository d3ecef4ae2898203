import type { Socket } from 'node:net'
import { composeWorker, type TrafficParts } from '../compose/proxy.ts'
import { formatConfigError, type Loaded, loadConfig } from '../config/load.ts'
import { drain } from '../drain.ts'
import { enter, settledOf, tuneForTraffic } from '../main.ts'
import { openLog } from '../observe/log.ts'
import { prepareReload, type Readiness } from '../reload.ts'
import type { Begin, FromWorker, Question, Questions, ToWorker } from './messages.ts'

/*
 * One of several processes that serve traffic (docs/adr/0130). It is like a replica, except that the first process starts it, accepts its
 * connections and answers operators on its behalf.
 */

type Announced = Extract<ToWorker, { kind: 'state' }>

type Answers = {
  readonly [Q in Question]: (
    takes: Questions[Q]['takes'],
  ) => Questions[Q]['gives'] | Promise<Questions[Q]['gives']>
}

/** Resolved once no more connections will come: the first process said so, or is gone. */
const unlistened = Promise.withResolvers<void>()
let isOrphan = false
/** The latest state of the whole proxy. */
let asked: Announced = { kind: 'state', draining: false, stopping: false }
let parts: TrafficParts | null = null
let answers: Answers | null = null

// Signals of a terminal or a service manager reach all processes of the group; the first one decides.
for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP'] as const) process.on(signal, () => {})
process.on('message', (message: ToWorker, connection?: Socket) => {
  if (message.kind === 'begin') void run(message.begin)
  else if (message.kind === 'connection') {
    say({ kind: 'took' })
    // It may have been closed on the way.
    if (connection !== undefined) parts?.data.take(connection)
  } else if (message.kind === 'question') void answer(message.id, message.name, message.takes)
  else if (message.kind === 'end') unlistened.resolve()
  else {
    asked = message
    if (parts !== null) announce(parts, asked)
  }
})
process.on('disconnect', () => {
  isOrphan = true
  unlistened.resolve()
})

async function run(begin: Begin): Promise<void> {
  const { place, source, acceptsRescope } = begin
  const read = (text: string): Loaded => loadConfig({ ...source, text, env: process.env, isReload: true })
  const loaded = read(source.text)
  if (!loaded.ok) return fail(loaded.errors.map(formatConfigError).join('; '))
  const { config } = loaded
  const { logger: log, output } = openLog(config.log, place.number)
  try {
    const made = await composeWorker(config, log, output, { place, acceptsRescope })
    await enter(made)
    parts = made
  } catch (error) {
    return fail((error as Error).message)
  }
  const { state, data, reconciler } = parts
  answers = answersOf(parts, read)
  state.started = true
  data.takeConnections()
  if (!isOrphan) reconciler.start(config)
  announce(parts, asked)
  void settledOf(parts).then(() => tuneForTraffic(config.store.url))
  say({ kind: 'serves' })
  await unlistened.promise
  if (isOrphan) log.error('the first process is gone: this worker finishes its requests and ends')
  await drain(parts, Promise.resolve())
  process.exit(isOrphan ? 1 : 0)
}

/** The immediate part of a drain; traffic is served until no more connections come. */
function announce({ state, reconciler }: TrafficParts, { draining, stopping }: Announced): void {
  state.stopping = stopping
  state.draining = draining
  if (stopping) void reconciler.stop()
}

function answersOf(own: TrafficParts, read: (text: string) => Loaded): Answers {
  const { metrics, running, settler } = own
  let ready: Extract<Readiness, { use: unknown }> | null = null
  let turn: Promise<unknown> = Promise.resolve()
  // One at a time: a configuration whose preparation took too long must not be used in place of the next one.
  const inTurn = <T>(make: () => Promise<T>): Promise<T> => {
    const made = turn.then(make)
    turn = made.catch(() => {})
    return made
  }
  const drop = (): null => {
    ready?.drop()
    ready = null
    return null
  }
  return {
    turn: () => null,
    metrics: () => metrics.collected(),
    isRunning: (id) => running.has(id),
    tell: (id) => settler.flush(id),
    drop: () => inTurn(async () => drop()),
    prepare: (text) =>
      inTurn(async () => {
        drop()
        const found = await prepareReload(own, read(text))
        if ('refused' in found) return found.refused
        ready = found
        return null
      }),
    use: () =>
      inTurn(async () => {
        if (ready === null) throw new Error('nothing is prepared')
        const { use } = ready
        ready = null
        await use()
        return null
      }),
  }
}

async function answer(id: number, name: Question, takes: unknown): Promise<void> {
  try {
    if (answers === null) throw new Error('it has not started')
    say({ kind: 'answer', id, gives: await answers[name](takes as never) })
  } catch (error) {
    say({ kind: 'failure', id, why: (error as Error).message })
  }
}

/** The first process may be gone. */
function say(message: FromWorker): void {
  process.send?.(message, undefined, undefined, () => {})
}

function fail(why: string): void {
  const leave = (): never => process.exit(1)
  process.send?.({ kind: 'cannot start', why } satisfies FromWorker, undefined, undefined, leave)
}
