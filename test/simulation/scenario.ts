import type { Phase } from '../../src/core/copies.ts'
import type { RoutePolicy } from '../../src/core/policy.ts'
import type { Millis } from '../../src/core/record.ts'
import { KEPT_FOR } from '../../src/store/safety.ts'
import { route } from '../protect/harness.ts'
import { RECONCILE } from '../reconcile/harness.ts'
import type { Random } from './scheduler.ts'

export const LEASE: Millis = 3_000
export const STORE_TIMEOUT: Millis = 500
/** Of a whole exchange with the upstream. */
export const UPSTREAM_TIMEOUT: Millis = 6_000
export const QUERY_TIMEOUT: Millis = 1_000
/** `reconcile.after`: as long as the whole exchange may take, which is the default. */
export const AFTER: Millis = 6_000
/** Shorter: then only the lease keeps a late first byte from leaving. */
const SOON_AFTER: Millis = 2_600
/** Of `after`, one second is what the proxy's clocks may be wrong by (core/store-clock.ts), the rest is for clocks of different speeds. */
const UNSURE: Millis = 1_600
/** Incidents happen until then. */
export const HEALED: Millis = 9_000
/** `store.grace`. */
export const GRACE: Millis = 1_000
/** The longest `ttl.body`. */
export const MAX_TTL_BODY: Millis = 8_000
/** `drain.delay` and `drain.timeout`: longer than any exchange. */
export const DRAIN = { delay: 300, timeout: 20_000 }
/** By then everything is settled, or it never will be. */
export const PATIENCE: Millis = 10_000_000

/** What one client wants done. */
export interface Wish {
  readonly caller: string
  readonly key: string
  readonly payload: string
}

/** How often what goes wrong: shares of one message, exchange or second. */
export interface Weather {
  /** Messages to and from the store. */
  readonly lost: number
  readonly refused: number
  readonly full: number
  /** Messages that take up to seconds. */
  readonly slow: number
  /** Exchanges with the upstream. */
  readonly slowConnections: number
  readonly broken: number
  readonly unreachable: number
  /** Answers other than a plain success. */
  readonly odd: number
  /** Calls of a port in which the process pauses, or soon after which it dies. */
  readonly pauses: number
  readonly deaths: number
  /** Claims that are applied, and reach no replica of the store (`store.wait`). */
  readonly unreplicated: number
}

export const CALM: Weather = {
  lost: 0,
  refused: 0,
  full: 0,
  slow: 0,
  slowConnections: 0,
  broken: 0,
  unreachable: 0,
  odd: 0,
  pauses: 0,
  deaths: 0,
  unreplicated: 0,
}

/** Something that happens at an instant. */
export type Incident =
  | { readonly kind: 'crash'; readonly at: Millis; readonly replica: number; readonly backIn: Millis }
  | { readonly kind: 'stall'; readonly at: Millis; readonly replica: number; readonly time: Millis }
  | { readonly kind: 'store clock'; readonly at: Millis; readonly by: Millis; readonly store: Side }
  | { readonly kind: 'store outage'; readonly at: Millis; readonly time: Millis; readonly store: Side }
  | { readonly kind: 'rollback'; readonly at: Millis; readonly to: Millis }
  /**
   * The same, announced by another identity: a grace follows. Until it is back, after `down`, the store is not reached; then it answers
   * reads alone for as long as it `refuses` writes, among them the one that begins the grace.
   */
  | {
      readonly kind: 'failover'
      readonly at: Millis
      readonly to: Millis
      readonly down: Millis
      readonly refuses: Millis
      readonly store: Side
    }
  /** A graceful end, by which everything that runs is finished, and a new start. */
  | { readonly kind: 'drain'; readonly at: Millis; readonly replica: number; readonly backIn: Millis }
  | { readonly kind: 'operator'; readonly at: Millis; readonly says: 'completed' | 'retryable' }

/** The store that a fleet moves from, or to. Without a migration there is one, `from`. */
export type Side = 'from' | 'to'

/** What `store.migrate` says; `before`: there is no such thing yet. */
export type Stage = 'before' | Phase

/** A rollout: from then on the file has this stage, and each replica is restarted with it a while later. */
export interface Rollout {
  readonly at: Millis
  readonly stage: Stage
  readonly lags: readonly Millis[]
}

/** A fleet moves from one store to another. */
export interface Move {
  readonly first: Stage
  readonly rollouts: readonly Rollout[]
  /** By how much the clock of the new store differs. */
  readonly skew: Millis
}

/** A configuration file. */
export interface Settings {
  readonly policy: RoutePolicy
  /** `limits.inFlight` and `limits.waiters`. */
  readonly inFlight: number
  readonly waiters: number
}

/**
 * What `reconcile` assumes of the network, and the simulation keeps to where it is on: a request reaches the upstream within so much of
 * its claim, or of its first byte, or never. Of a lease a third is left after the last first byte.
 */
export interface Arrival {
  readonly afterClaim: Millis
  readonly afterBegin: Millis
}

/** A replaced configuration file: each replica reads it a while later, or is started with it. */
export interface Reload {
  /** Null: once nothing goes wrong any more. */
  readonly at: Millis | null
  readonly lags: readonly Millis[]
  readonly to: Settings
}

export interface Scenario {
  readonly replicas: number
  readonly first: Settings
  readonly reloads: readonly Reload[]
  readonly arrival: Arrival
  readonly wishes: readonly (Wish & { readonly at: Millis })[]
  readonly weather: Weather
  readonly incidents: readonly Incident[]
  readonly hasSpool: boolean
  /** Null: none. */
  readonly move: Move | null
}

/** All that is in force at one time or another. */
export function policiesOf({ first, reloads }: Pick<Scenario, 'first' | 'reloads'>): RoutePolicy[] {
  return [first, ...reloads.map(({ to }) => to)].map(({ policy }) => policy)
}

/** What is tried under one seed. `more` and the rest: draws for what was added later, so that seeds without it stay the same runs. */
export function scenarioOf(
  random: Random,
  more: Random,
  latest: Random,
  bodies: Random,
  outages: Random,
  moves: Random,
  pressures: Random,
  losses: Random,
): Scenario {
  const usual = usualScenario(random, more, latest, bodies, outages)
  return moving({ ...usual, ...withLosses(usual, losses) }, moves, pressures.chance(0.3))
}

function usualScenario(
  random: Random,
  more: Random,
  latest: Random,
  bodies: Random,
  outages: Random,
): Scenario {
  const replicas = random.pick([1, 2, 2, 3])
  const usual = policyOf(random)
  const bad = random.pick([0.01, 0.05, 0.15, 0.3])
  const share = (least: number, most: number): number =>
    random.chance(0.6) ? random.between(least, most) : 0
  const weather: Weather = {
    lost: share(0, bad),
    refused: share(0, bad / 2),
    full: random.chance(0.1) ? share(0, bad) : 0,
    slow: share(0, bad),
    slowConnections: 0,
    broken: share(0, 2 * bad),
    unreachable: share(0, bad),
    odd: share(0, 0.4),
    pauses: random.chance(0.4) ? random.pick([0.01, 0.05]) : 0,
    deaths: random.chance(0.4) ? random.pick([0.01, 0.04]) : 0,
    unreplicated: more.chance(0.15) ? more.between(0.05, 0.4) : 0,
  }
  const wishes = wishesOf(random)
  const incidents = withOutages(withMore(incidentsOf(random, replicas), more, replicas), outages)
  const hasSpool = random.chance(0.4)
  if (usual.reconcile !== null && replicas > 1 && latest.chance(0.04))
    return { replicas, ...waiting(usual, latest, replicas), wishes, hasSpool, move: null }
  const settings = withTtlBody(settingsOf(usual, latest, replicas), bodies)
  return {
    replicas,
    ...settings,
    arrival: arrivalOf(settings),
    wishes,
    weather,
    incidents,
    hasSpool,
    move: null,
  }
}

/** `ttl.body` in most of the files. */
function withTtlBody(settings: Pick<Scenario, 'first' | 'reloads'>, random: Random): typeof settings {
  if (!random.chance(0.2)) return settings
  const ttlBody = random.pick([300, 1_000, 3_000, MAX_TTL_BODY])
  return inMostFiles(settings, random, { ttlBody })
}

/** `onResponseLost: retry` in most of the files. */
function withLosses(settings: Pick<Scenario, 'first' | 'reloads'>, random: Random): typeof settings {
  return random.chance(0.15) ? inMostFiles(settings, random, { onResponseLost: 'retry' }) : settings
}

function inMostFiles(
  settings: Pick<Scenario, 'first' | 'reloads'>,
  random: Random,
  policy: Partial<Settings['policy']>,
): typeof settings {
  const has = (one: Settings): Settings =>
    random.chance(0.8) ? { ...one, policy: { ...one.policy, ...policy } } : one
  const reloads = settings.reloads.map((reload) => ({ ...reload, to: has(reload.to) }))
  return { first: has(settings.first), reloads }
}

function arrivalOf(settings: Pick<Scenario, 'first' | 'reloads'>): Arrival {
  const policies = policiesOf(settings)
  const lease = Math.min(...policies.map((one) => one.lease))
  const after = Math.min(...policies.map(({ reconcile }) => reconcile?.after ?? AFTER))
  return { afterClaim: after - UNSURE, afterBegin: 0.8 * (lease / 3) }
}

/**
 * What chance hardly brings together: a request waits for its connection while its key is asked about. Under a long lease, beyond which the
 * store's clock steps, by somebody who has read of a short one; or while its process stands still for longer than its lease.
 */
function waiting(
  { reconcile, ...usual }: RoutePolicy,
  random: Random,
  replicas: number,
): Pick<Scenario, 'first' | 'reloads' | 'arrival' | 'weather' | 'incidents'> {
  const most = { inFlight: 1000, waiters: 1000 }
  const asking = reconcile === null ? null : { ...reconcile, after: SOON_AFTER, every: 300 }
  const short: Settings = { ...most, policy: { ...usual, reconcile: asking, lease: 1_000 } }
  const long: Settings = { ...most, policy: { ...short.policy, lease: 8 * LEASE } }
  const lags = Array.from({ length: replicas }, () => random.between(0, 1_000))
  const isReloaded = random.chance(0.5)
  const settings = isReloaded
    ? { first: long, reloads: [{ at: random.between(20, 500), lags, to: short }] }
    : { first: short, reloads: [] }
  const at = random.between(100, 1_500)
  const incident: Incident = isReloaded
    ? { kind: 'store clock', at, by: random.between(8 * LEASE, 13 * LEASE), store: 'from' }
    : { kind: 'stall', at, replica: random.whole(replicas), time: random.between(3_500, 5_500) }
  const weather = {
    ...CALM,
    slow: random.between(0, 0.05),
    slowConnections: random.between(0.3, 0.8),
  }
  return { ...settings, arrival: arrivalOf(settings), weather, incidents: [incident] }
}

/** The file that replicas start with, and those that replace it. */
function settingsOf(
  usual: RoutePolicy,
  random: Random,
  replicas: number,
): Pick<Scenario, 'first' | 'reloads'> {
  const most = { inFlight: 1000, waiters: 1000 }
  const hasShort = random.chance(0.15) && usual.reconcile !== null
  const reconcile = hasShort ? { ...usual.reconcile, after: SOON_AFTER } : usual.reconcile
  const policy = { ...usual, reconcile, lease: random.chance(0.1) ? 4 * LEASE : LEASE }
  const lags = (): Millis[] => Array.from({ length: replicas }, () => random.between(0, 1_000))
  const mayReload = random.chance(0.25)
  if (random.chance(0.1)) {
    // What shadow mode has seen is honoured from the moment that its records are written: or it is known what there should be.
    const at = random.chance(0.5) ? null : random.between(500, HEALED - 2_000)
    return {
      first: { ...most, policy: { ...policy, mode: 'shadow' } },
      reloads: [{ at, lags: lags(), to: { ...most, policy } }],
    }
  }
  const first = { ...most, policy }
  if (!mayReload) return { first, reloads: [] }
  const to = changed(first, random)
  const reload = { at: random.between(500, HEALED - 3_000), lags: lags(), to }
  const again = random.chance(0.3)
    ? [
        {
          at: reload.at + random.between(10, 1_900),
          lags: lags(),
          to: random.chance(0.5) ? first : changed(to, random),
        },
      ]
    : []
  return { first, reloads: [reload, ...again] }
}

/** Changes that a reload takes. */
function changed({ policy, inFlight, waiters }: Settings, random: Random): Settings {
  const or = <T>(now: T, ...others: readonly T[]): T => (random.chance(0.4) ? random.pick(others) : now)
  const { limits, reconcile } = policy
  return {
    inFlight: or(inFlight, 2, 1000),
    waiters: or(waiters, 1, 1000),
    policy: {
      ...policy,
      name: random.chance(0.1) ? `${policy.name}-2` : policy.name,
      lease: or(policy.lease, 1_000, 2_000, LEASE, 4 * LEASE),
      ttl: or(policy.ttl, policy.ttl / 2, policy.ttl * 2),
      unresolvedTtl: or(policy.unresolvedTtl, policy.unresolvedTtl * 2),
      inFlight: or(
        policy.inFlight,
        { ...policy.inFlight, mode: 'wait', wait: 2_000 },
        { ...policy.inFlight, mode: 'reject' },
      ),
      onLeaseExpired: random.chance(0.1) ? 'retry' : policy.onLeaseExpired,
      onStoreUnavailable: random.chance(0.07) ? 'bypass' : policy.onStoreUnavailable,
      respondWithin: or(policy.respondWithin, 700, null),
      keep: or(policy.keep, 'outcome', 'response'),
      reconcile:
        reconcile === null || random.chance(0.1)
          ? null
          : { ...reconcile, every: or(reconcile.every, 300, 2_000) },
      limits: { ...limits, newKeys: or(limits.newKeys, null, { count: 100, per: 1_000 }) },
    },
  }
}

function policyOf(random: Random): RoutePolicy {
  const mode = random.pick(['reject', 'wait'] as const)
  const every = random.pick([300, 1_000])
  const reconcile = {
    ...RECONCILE,
    request: { method: 'GET', path: '/payments?record={record}', headers: [] },
    identity: [{ pointer: '/record', value: '{record}' }],
    completed: [{ status: 200, when: [], json: '/payment', response: { status: 201, headers: [] } }],
    after: AFTER,
    every,
    attempts: 1000,
  }
  const plain = route()
  return {
    ...plain,
    lease: LEASE,
    inFlight: { mode, wait: random.pick([800, 4_000]), status: 409 },
    reconcile: random.chance(0.5) ? reconcile : null,
    onLeaseExpired: random.chance(0.1) ? 'retry' : 'unknown',
    onStoreUnavailable: random.chance(0.07) ? 'bypass' : 'reject',
    respondWithin: random.chance(0.2) ? 700 : null,
    keep: random.chance(0.1) ? 'outcome' : 'response',
    limits: { ...plain.limits, newKeys: random.chance(0.1) ? { count: 100, per: 1_000 } : null },
  }
}

/** A few clients: most send one thing, some of them twice, some under a key that was used for something else. */
function wishesOf(random: Random): Scenario['wishes'] {
  const wishes: (Wish & { at: Millis })[] = []
  const operations = random.pick([1, 1, 2])
  for (let n = 0; n < operations; n++) {
    // The second is another caller's key of the same name, half of the time.
    const [caller, key] = n === 0 || random.chance(0.5) ? [`caller-${n}`, 'key-1'] : ['caller-0', 'key-2']
    const clients = random.pick([1, 2, 2, 3, 4])
    for (let c = 0; c < clients; c++) {
      const payload = c > 0 && random.chance(0.12) ? 'another' : 'first'
      wishes.push({
        caller,
        key,
        payload,
        at: random.chance(0.5) ? random.between(0, 20) : random.between(0, 5_000),
      })
    }
  }
  return wishes
}

/** A failover stands alone: without it, the store going back is told to nobody, and a step of its clock would end the grace. */
function withMore(incidents: Incident[], more: Random, replicas: number): Incident[] {
  const at = (): Millis => more.between(0, HEALED - 1_000)
  const all = [...incidents]
  if (more.chance(0.2))
    all.push({ kind: 'drain', at: at(), replica: more.whole(replicas), backIn: more.between(1, 2_000) })
  if (!more.chance(0.25)) return all
  const from = more.between(50, 5_500)
  const quiet = all.filter(({ kind }) => kind !== 'rollback' && kind !== 'store clock')
  const to = Math.max(0, from - more.between(0, 2_500))
  return [...quiet, { kind: 'failover', at: from, to, down: 0, refuses: 0, store: 'from' }]
}

/**
 * Half of the failovers take their time: some longer than outcomes are remembered while the store is up. After some of them the new server
 * takes no writes for a while.
 */
function withOutages(incidents: readonly Incident[], random: Random): Incident[] {
  const failover = incidents.find((incident) => incident.kind === 'failover')
  if (failover === undefined) return [...incidents]
  const time = (): Millis => random.between(0, random.pick([5_000, 2 * KEPT_FOR]))
  const down = random.chance(0.5) ? 0 : time()
  const refuses = random.chance(0.7) ? 0 : time()
  // The end of another outage would end this one.
  const others = incidents.filter((one) => one !== failover && (down === 0 || one.kind !== 'store outage'))
  return [...others, { ...failover, down, refuses }]
}

const STAGES: readonly Stage[] = ['before', 'mirror', 'both', 'new']
/** A replica that enters `new` is sure of it by then, whatever lives yet (src/store/moving/phases.ts). */
const ENTERED: Millis = 30_000

/**
 * Some fleets move to another store meanwhile, stage by stage, or too fast. `isPressed`: whatever their settings, with clocks that step and
 * leases that must be renewed. No store of theirs forgets anything without saying so: what the judge knows of a record it knows of one store.
 */
function moving(scenario: Scenario, random: Random, isPressed: boolean): Scenario {
  const isPlain = policiesOf(scenario).every(
    ({ mode, onStoreUnavailable, onLeaseExpired, ttlBody }) =>
      mode === 'enforce' && onStoreUnavailable !== 'bypass' && onLeaseExpired !== 'retry' && ttlBody === null,
  )
  if (!random.chance(0.2) || !(isPlain || isPressed)) return scenario
  const first = random.whole(STAGES.length - 1)
  const last = first + 1 + random.whole(STAGES.length - 1 - first)
  const pauses = random.pick([1_000, 6_000, 20_000])
  const rollouts: Rollout[] = []
  let at = random.between(0, 3_000)
  let end = at
  // Some go from one end to the other at once, which no replica must put up with.
  const isHasty = random.chance(0.25)
  for (let n = isHasty ? last : first + 1; n <= last; n++) {
    // Replicas of two neighbouring phases may live together for long.
    const most = random.pick([300, 3_000, 25_000])
    const lags = Array.from({ length: scenario.replicas }, () => random.between(0, most))
    rollouts.push({ at, stage: STAGES[n] as Stage, lags })
    end = Math.max(end, at + Math.max(...lags))
    at += random.between(0, pauses)
  }
  const stretch = Math.max(1, end / 5_000)
  const together = random.between(0, end)
  const later = <T extends { readonly at: Millis }>(one: T): T => ({ ...one, at: one.at * stretch })
  const incidents = scenario.incidents.flatMap((incident): Incident[] => {
    const { kind } = incident
    if (kind === 'rollback' || (kind === 'store clock' && !isPressed)) return []
    if (kind === 'failover') {
      const store = random.pick(['from', 'to'] as const)
      const moved = later(incident)
      return [{ ...moved, to: moved.at - (incident.at - incident.to), store }]
    }
    return [
      kind === 'store outage' || kind === 'store clock'
        ? { ...later(incident), store: random.pick(['from', 'to']) }
        : later(incident),
    ]
  })
  const moved: Scenario = {
    ...scenario,
    weather: { ...scenario.weather, unreplicated: 0 },
    wishes: [
      ...scenario.wishes.map((wish) => (wish.at < 20 ? { ...wish, at: together + wish.at } : later(wish))),
      // Retries under way while the fleet moves are what may execute again.
      ...scenario.wishes.flatMap((wish) =>
        Array.from({ length: random.whole(4) }, () => ({ ...wish, at: random.between(0, end + 15_000) })),
      ),
    ],
    incidents,
    move: { first: STAGES[first] as Stage, rollouts, skew: random.pick([0, 0, -3_600_000, 3_600_000]) },
  }
  return isPressed ? pressing(moved) : moved
}

/** Executions outlast their leases, which are renewed. */
function pressing({ first, reloads, weather, ...others }: Scenario): Scenario {
  const short = (one: Settings): Settings => ({ ...one, policy: { ...one.policy, lease: 1_000 } })
  const settings = {
    first: short(first),
    reloads: reloads.map((reload) => ({ ...reload, to: short(reload.to) })),
  }
  const slow = Math.max(weather.slow, 0.2)
  return { ...others, ...settings, arrival: arrivalOf(settings), weather: { ...weather, slow } }
}

/** Faults happen until then. */
export function healedAt({ incidents, move }: Pick<Scenario, 'incidents' | 'move'>): Millis {
  const back = incidents.map((incident) =>
    incident.kind === 'failover' ? incident.at + incident.down + incident.refuses : 0,
  )
  const ends = incidents.map((one) => one.at + 1_000 + ('time' in one ? one.time : 0))
  const entered = move?.rollouts.map(({ at, lags }) => at + Math.max(...lags) + ENTERED) ?? []
  const moved = move === null ? [] : [...ends, ...entered]
  return Math.max(HEALED, ...moved, ...back.map((at) => at + 3 * GRACE))
}

function incidentsOf(random: Random, replicas: number): Incident[] {
  const incidents: Incident[] = []
  const at = (): Millis => random.between(0, HEALED - 1_000)
  const some = (share: number, most: number): number => (random.chance(share) ? 1 + random.whole(most) : 0)
  for (let n = some(0.4, 3); n > 0; n--)
    incidents.push({
      kind: 'crash',
      at: at(),
      replica: random.whole(replicas),
      backIn: random.between(1, 4_000),
    })
  for (let n = some(0.4, 2); n > 0; n--)
    incidents.push({
      kind: 'stall',
      at: at(),
      replica: random.whole(replicas),
      time: random.between(100, random.pick([500, LEASE, 4 * LEASE])),
    })
  for (let n = some(0.15, 2); n > 0; n--)
    incidents.push({ kind: 'store clock', at: at(), by: random.between(-8_000, 8_000), store: 'from' })
  for (let n = some(0.15, 1); n > 0; n--)
    incidents.push({ kind: 'store outage', at: at(), time: random.between(50, 4_000), store: 'from' })
  for (let n = some(0.06, 1); n > 0; n--) {
    const from = at()
    incidents.push({ kind: 'rollback', at: from, to: random.between(0, from) })
  }
  for (let n = some(0.1, 2); n > 0; n--)
    incidents.push({ kind: 'operator', at: at(), says: random.pick(['completed', 'retryable'] as const) })
  return incidents
}
