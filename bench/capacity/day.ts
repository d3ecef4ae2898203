import { COSTS, FAILOVER, SHARDS } from './measured.ts'

/** A day of a Redis cluster, second by second. */
export interface Day {
  readonly masters: number
  /** New keys per second, all day. */
  readonly first: number
  /** Repeated requests per second, of which {@link HOT} go to the keys of one shard at a time. */
  readonly replays: number
}

export interface DayReport {
  /** How busy the mean and the busiest master is while nothing fails. */
  readonly load: { readonly mean: number; readonly busiest: number }
  /** Milliseconds that a command waits at its master: the first is exceeded by half of them. */
  readonly waits: { readonly p50: number; readonly p99: number; readonly p999: number }
  /** Requests refused with 503 (clients retry): of all, in the worst second, and after one failover on average. */
  readonly refused: { readonly share: number; readonly worst: number; readonly perFailover: number }
  /** Seconds with a refusal, apart from the lost region. */
  readonly secondsOfFailovers: number
  /** The same for the region: a third of the masters, replaced at once. */
  readonly region: { readonly refused: number; readonly seconds: number }
  /** Keys whose client gave up, all attempts refused. */
  readonly givenUp: number
}

const SECONDS = 86_400
const HOUR = 3600
/** The part of all replays that one shard gets, another one each hour. */
const HOT = 0.1
/** When a third of the masters is lost. */
const REGION_LOST_AT = 12.25 * HOUR
/** A client waits this many seconds before each further attempt, and then gives up: docs/clients.md. */
const BACKOFF = [1, 2, 4, 8, 16, 32, 64]
/** `store.timeout`, in seconds: a claim that would wait longer is refused. */
const TIMEOUT = 0.5
/** The exponential tail of the waits is added up in steps of a millisecond up to this, and then by backlog. */
const STEPS = 1000

const { server } = COSTS.redis
const DOWN = Math.ceil((FAILOVER.nodeTimeout * FAILOVER.pinged + FAILOVER.election) / 1000)
const GRACE = Math.ceil(FAILOVER.grace / 1000)

/**
 * A queue per master. Within a second arrivals are Poisson and each command takes as long as the last (M/D/1); what a second cannot serve
 * is left for the next. A failed master refuses everything until its replica is promoted, which then refuses new keys for the grace.
 */
export function simulateDay({ masters, first, replays }: Day): DayReport {
  const shares = Array.from(
    { length: masters },
    (_, n) => Math.floor(SHARDS / masters) + (n < SHARDS % masters ? 1 : 0),
  )
  const backlog = new Float64Array(masters)
  const failedAt = new Int32Array(masters).fill(-SECONDS)
  /** New keys that come again in a second, by how often they were refused. */
  const retries = BACKOFF.map(() => new Float64Array(SECONDS + 128))
  const waits = new Waits()
  const refusals = new Float64Array(SECONDS)
  let [asked, givenUp, busiest] = [0, 0, 0]
  for (let second = 0; second < SECONDS; second++) {
    if (second % HOUR === HOUR / 2) failedAt[(second / HOUR - 0.5) % masters] = second
    if (second === REGION_LOST_AT) for (let n = 0; n < masters; n += 3) failedAt[n] = second
    const hot = Math.floor(second / HOUR) % masters
    const again = retries.map((due) => due[second] as number)
    const keys = first + again.reduce((sum, n) => sum + n, 0)
    for (let n = 0; n < masters; n++) {
      const share = (shares[n] as number) / SHARDS
      const known = replays * (1 - HOT) * share + (n === hot ? replays * HOT : 0)
      const since = second - (failedAt[n] as number)
      asked += keys * share + known
      let part = since < DOWN + GRACE ? 1 : 0
      let work = since < DOWN ? 0 : known * server.replay
      if (part === 0) work += keys * share * server.first
      const load = work / 1e6
      const queued = (backlog[n] as number) + load - 1
      // What would wait for too long is refused, not served.
      if (queued > TIMEOUT) part = Math.max(part, Math.min(1, (queued - TIMEOUT) / load))
      backlog[n] = Math.min(TIMEOUT, Math.max(0, queued))
      if (since >= DOWN + GRACE) waits.add(keys * share + known, load, backlog[n] as number)
      if (failedAt[n] === -SECONDS) busiest = Math.max(busiest, load)
      if (part === 0) continue
      refusals[second] = (refusals[second] as number) + keys * share * part + (since < DOWN ? known : 0)
      for (const [attempt, due] of [first, ...again].entries()) {
        const left = due * share * part
        const pause = BACKOFF[attempt]
        if (pause === undefined) givenUp += left
        else spread(retries[attempt] as Float64Array, second, pause, left)
      }
    }
  }
  return reportOf(refusals, asked, {
    load: { mean: (first * server.first + replays * server.replay) / 1e6 / masters, busiest },
    waits: waits.percentiles(),
    givenUp: Math.round(givenUp),
  })
}

/** Clients draw their pause: half of it, and up to as much again. */
function spread(due: Float64Array, second: number, pause: number, count: number): void {
  const [from, to] = [second + Math.ceil(pause / 2), second + pause]
  for (let at = from; at <= to; at++) due[at] = (due[at] as number) + count / (to - from + 1)
}

function reportOf(
  refusals: Float64Array,
  asked: number,
  rest: Pick<DayReport, 'load' | 'waits' | 'givenUp'>,
): DayReport {
  const ofRegion = (second: number): boolean => second >= REGION_LOST_AT && second < REGION_LOST_AT + HOUR / 4
  const sums = { region: 0, regionSeconds: 0, others: 0, seconds: 0, worst: 0 }
  for (const [second, refused] of refusals.entries()) {
    if (refused < 1) continue
    sums.worst = Math.max(sums.worst, refused)
    if (ofRegion(second)) [sums.region, sums.regionSeconds] = [sums.region + refused, sums.regionSeconds + 1]
    else [sums.others, sums.seconds] = [sums.others + refused, sums.seconds + 1]
  }
  return {
    ...rest,
    refused: {
      share: (sums.region + sums.others) / asked,
      worst: Math.round(sums.worst),
      perFailover: Math.round(sums.others / (SECONDS / HOUR)),
    },
    secondsOfFailovers: sums.seconds,
    region: { refused: Math.round(sums.region), seconds: sums.regionSeconds },
  }
}

/** How long commands wait, by milliseconds. */
class Waits {
  readonly #counts = new Float64Array(STEPS + 1)
  /** By load in percent: most seconds of most masters are alike. */
  readonly #alike = new Map<number, number>()

  add(count: number, load: number, backlog: number): void {
    if (backlog > 0) {
      const at = Math.min(STEPS, Math.round(backlog * 1000))
      this.#counts[at] = (this.#counts[at] as number) + count
    } else {
      const percent = Math.min(99, Math.round(load * 100))
      this.#alike.set(percent, (this.#alike.get(percent) ?? 0) + count)
    }
  }

  percentiles(): DayReport['waits'] {
    const total = [...this.#alike.values(), ...this.#counts].reduce((sum, n) => sum + n, 0)
    const at = (part: number): number => {
      let [low, high] = [0, STEPS]
      for (let n = 0; n < 40; n++) {
        const middle = (low + high) / 2
        if (this.#longer(middle) > total * (1 - part)) low = middle
        else high = middle
      }
      return high
    }
    return { p50: at(0.5), p99: at(0.99), p999: at(0.999) }
  }

  /** How many wait for longer. An M/D/1 queue: busy with probability ρ, then about exponential around its mean. */
  #longer(milliseconds: number): number {
    let sum = 0
    for (const [percent, count] of this.#alike) {
      const busy = percent / 100
      const mean = server.first / 1000 / (2 * (1 - busy))
      sum += count * busy * Math.exp(-milliseconds / mean)
    }
    for (let n = Math.ceil(milliseconds); n <= STEPS; n++) sum += this.#counts[n] as number
    return sum
  }
}
