import { setTimeout as wait } from 'node:timers/promises'
import { Clients, isFinal } from './clients.ts'
import { Disk } from './disk.ts'
import { faultsOf, inRandomOrder, torment } from './faults.ts'
import { Fleet, type Held, LEASE } from './fleet.ts'
import { History, type Operation } from './history.ts'
import { Random } from './random.ts'
import { TORMENTED, type TormentedStore } from './stores.ts'
import { upstream } from './upstream.ts'
import { type Figures, judge } from './verdict.ts'

/** When it ends: after a time, or after this many requests and faults, the faults spread evenly over the requests. */
export type Goal = { readonly milliseconds: number } | { readonly requests: number; readonly faults: number }

export interface TortureOptions {
  readonly store: string
  readonly seed: number
  readonly goal: Goal
  readonly replicas?: number
  /** Processes of each. */
  readonly workers?: number
  readonly lanes?: number
  /** Instead of the store's own grace: without one a failover executes twice, and torture must find that. */
  readonly grace?: 'off'
  /** Only faults whose name contains this. */
  readonly only?: string
  /** For the proxies' processes, for example to plant a bug. */
  readonly env?: Readonly<Record<string, string>>
  readonly say?: (line: string) => void
  /** Ends it before its goal; the round is still judged. */
  readonly signal?: AbortSignal
}

/** A promise that was broken, and what happened to its operation. */
export interface Finding {
  readonly what: string
  readonly timeline: string
}

/** What each replica held at the end of a round, after this many requests; the first was never restarted. */
export interface Rest {
  readonly requests: number
  readonly held: readonly Held[]
}

export interface TortureResult extends Figures {
  readonly requests: number
  readonly seconds: number
  /** How many of each kind. */
  readonly faults: ReadonlyMap<string, number>
  readonly findings: readonly Finding[]
  /** What healed processes still hold, or hold too much of. */
  readonly leftOvers: readonly string[]
  readonly rests: readonly Rest[]
}

/** Faults at the same time. */
const TORMENTORS = 3
/** After this many requests or milliseconds everything heals, and what happened so far is judged and forgotten. */
const ROUND = { requests: 50_000, milliseconds: 120_000 }
/** How many clients settle operations at once: more would keep a busy machine's store from answering in time. */
const SETTLERS = 48
/** A healed fleet has to settle another operation within this; how fast it is depends on the machine. */
const SETTLES_WITHIN = 120_000
/** After this an operator reports the truth: the pauses between status queries double. */
const OPERATOR_AFTER = 10_000
/** Gauges that are 0 when nothing is going on. */
const RESTING = [
  'idempotency_in_flight',
  'idempotency_waiters',
  'idempotency_spooled',
  'idempotency_buffered_bytes',
]
/** The first few findings are enough to begin with; thousands are no help. */
const TIMELINES = 10

/**
 * Clients that retry, replicas that die, links and a store that fail; then everything heals, every operation is retried once more, and
 * each is judged. Round after round with the same processes, until the goal is reached or a promise is broken.
 */
export async function torture(options: TortureOptions): Promise<TortureResult> {
  const { seed, goal, replicas = 3, workers = 1, lanes = 32, env = {}, say = () => {} } = options
  const openStore = TORMENTED[options.store]
  if (openStore === undefined)
    throw new Error(`--store: found ${options.store}; allowed: ${Object.keys(TORMENTED).join(', ')}`)
  const history = new History()
  let calm = false
  const random = new Random(seed + 2)
  await using disk = new Disk()
  await using store: TormentedStore = await openStore(disk.folder, random)
  await using bank = await upstream(history, new Random(seed), () => calm)
  await using fleet = await Fleet.start(
    replicas,
    disk.folder,
    options.grace === undefined ? store : { ...store, grace: options.grace },
    bank.port,
    { workers, env },
  )
  const ports = fleet.replicas.map(({ port }) => port)
  await using clients = new Clients(history, new Random(seed + 1), ports, lanes)
  const possible = faultsOf(fleet.replicas, store, disk, random, workers)
  const names = [...possible.keys()].filter((name) => name.includes(options.only ?? ''))
  if (names.length === 0)
    throw new Error(`--only: found ${options.only}; faults are ${[...possible.keys()].join(', ')}`)
  const next = inRandomOrder(names, random)
  const faults = new Map<string, number>()
  let begun = 0
  const began = performance.now()
  const hasEnded = (): boolean =>
    options.signal?.aborted === true ||
    ('milliseconds' in goal
      ? performance.now() - began >= goal.milliseconds
      : clients.requests >= goal.requests && begun >= goal.faults)
  const isDue = (): boolean =>
    'milliseconds' in goal || begun * goal.requests <= clients.requests * goal.faults
  const figures: Figures = { operations: 0, executed: 0, unknown: 0, replays: 0 }
  const findings: Finding[] = []
  const leftOvers: string[] = []
  const rests: Rest[] = []
  using ticker = setInterval(
    () => say(`${history.now} ms: ${clients.requests} requests, ${begun} faults`),
    10_000,
  )
  ticker.unref()
  while (!hasEnded() && findings.length + leftOvers.length === 0) {
    calm = false
    const upTo = { requests: clients.requests + ROUND.requests, time: performance.now() + ROUND.milliseconds }
    const over = (): boolean =>
      hasEnded() || history.hasDoubles || clients.requests >= upTo.requests || performance.now() >= upTo.time
    const due = (): boolean => isDue() && ++begun > 0
    await Promise.all([
      ...Array.from({ length: TORMENTORS }, () =>
        torment(possible, next, history, random, { over, due }, faults),
      ),
      ...Array.from({ length: lanes }, async () => {
        while (!over()) await clients.operation()
      }),
    ])
    history.fault('everything heals')
    calm = true
    for (const replica of fleet.replicas) replica.heal()
    for (const replica of fleet.replicas) await replica.ready()
    await settle([...history.operations.values()], clients, fleet, lanes)
    for (const { operation, what } of judge(history, figures))
      if (findings.length < TIMELINES)
        findings.push({
          what: `${operation.route} ${operation.name}: ${what}`,
          timeline: history.timeline(operation),
        })
    for (const name of history.strays)
      findings.push({ what: `${name}: sent after it was judged`, timeline: '' })
    leftOvers.push(...(await leftIn(fleet)))
    const held = await Promise.all(fleet.replicas.map((replica) => replica.held()))
    rests.push({ requests: clients.requests, held })
    say(`round ${rests.length}: ${JSON.stringify({ ...rests.at(-1), ...figures })}`)
    history.forget()
  }
  leftOvers.push(...growth(rests, lanes))
  const seconds = Math.round((performance.now() - began) / 1000)
  return { ...figures, requests: clients.requests, seconds, faults, findings, leftOvers, rests }
}

/** The environment of processes with a bug of test/simulation/plants.ts in them. */
export function planted(name: string): Readonly<Record<string, string>> {
  const plant = new URL('../simulation/plant.ts', import.meta.url).href
  return { PLANT: name, NODE_OPTIONS: `--import=${plant}` }
}

/** Retries every operation until its response no longer changes. */
async function settle(
  operations: readonly Operation[],
  clients: Clients,
  { replicas }: Fleet,
  lanes: number,
): Promise<void> {
  const began = performance.now()
  let left = operations
  let moved = began
  while (left.length > 0 && performance.now() - moved < SETTLES_WITHIN) {
    const isLong = performance.now() - began > OPERATOR_AFTER
    const queue = left.values()
    const open: Operation[] = []
    const lane = async (): Promise<void> => {
      for (const operation of queue) {
        operation.final = await clients.ask(operation)
        if (stays(operation)) continue
        open.push(operation)
        if (isLong && operation.final.code === 'idempotency_outcome_unknown')
          await replicas[0]?.tell(truthOf(operation))
      }
    }
    await Promise.all(Array.from({ length: Math.min(lanes, SETTLERS) }, lane))
    if (open.length < left.length) moved = performance.now()
    left = open
    if (left.length > 0) await wait(LEASE / 2)
  }
}

/**
 * On the route without a status query `unknown` stays, unless a client had a response: then a replica still holds it, and writes it when
 * its pause is over.
 */
function stays({ route, answers, final }: Operation): boolean {
  if (final === null) return false
  const mayStay = route === 'keep' && !answers.some(isFinal)
  return isFinal(final) || (mayStay && final.code === 'idempotency_outcome_unknown')
}

function truthOf({ route, caller, key, executions }: Operation): Readonly<Record<string, unknown>> {
  const [execution] = executions
  const headers = [['Content-Type', 'application/json']]
  return {
    key,
    method: 'POST',
    path: `/${route}`,
    caller: { authorization: caller },
    reason: 'the books say so',
    by: 'torture',
    ...(execution === undefined
      ? { outcome: 'retryable' }
      : { outcome: 'completed', response: { status: execution.status, body: execution.body, headers } }),
  }
}

async function leftIn({ replicas }: Fleet): Promise<string[]> {
  const found: string[] = []
  for (const replica of replicas)
    for (const gauge of RESTING) {
      let value = await replica.metric(gauge)
      for (let n = 0; value !== 0 && n < 50; n++) {
        await wait(200)
        value = await replica.metric(gauge)
      }
      if (value !== 0) found.push(`${gauge} of ${replica.port} is ${value}`)
    }
  return found
}

/**
 * What any replica has at the end beyond the first one's maximum in the first tenth of the run: half as much memory again, or more
 * additional open files than lanes. The maximum, since V8 keeps a hundred MiB for its heap and returns them when it chooses.
 */
function growth(rests: readonly Rest[], lanes: number): string[] {
  const last = rests.at(-1)
  if (last === undefined || rests.length < 10) return []
  const tenth = rests.findIndex(({ requests }) => requests * 10 >= last.requests)
  const early = rests.slice(0, tenth + 1).map(({ held }) => held[0] as Held)
  const memoryThen = Math.max(...early.map(({ memory }) => memory))
  const filesThen = Math.max(...early.map(({ descriptors }) => descriptors))
  return last.held.flatMap(({ memory, descriptors }, n) => [
    ...(memory > memoryThen * 1.5 ? [`memory of replica ${n}: ${memoryThen} MiB, then ${memory} MiB`] : []),
    ...(descriptors > filesThen + lanes
      ? [`open files of replica ${n}: ${filesThen}, then ${descriptors}`]
      : []),
  ])
}
