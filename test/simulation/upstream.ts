import { firstOf } from '../../src/core/headers.ts'
import type { Millis, StoredResponse } from '../../src/core/record.ts'
import type { Forward, Forwarded, LiveSink, UpstreamRequest } from '../../src/upstream/port.ts'
import type { Bytes } from '../protect/harness.ts'
import { type Judge, nameOf } from './judge.ts'
import { type Arrival, CALM, QUERY_TIMEOUT, UPSTREAM_TIMEOUT, type Weather, type Wish } from './scenario.ts'
import { type Owner, type Scheduler, WORLD } from './scheduler.ts'

/** What it does with a request, and what it says. */
type Manner =
  | 'pays'
  | 'declines'
  | 'fails'
  | 'pays, overloaded'
  | 'overloaded'
  | 'limits'
  | 'says no'
  | 'streams'
const ODD: readonly Manner[] = [
  'declines',
  'fails',
  'pays, overloaded',
  'overloaded',
  'limits',
  'says no',
  'streams',
]

const STATUS: Readonly<Record<Manner, number>> = {
  pays: 201,
  declines: 402,
  fails: 500,
  'pays, overloaded': 503,
  overloaded: 503,
  limits: 429,
  'says no': 200,
  streams: 200,
}
const DOES: ReadonlySet<Manner> = new Set<Manner>([
  'pays',
  'declines',
  'fails',
  'pays, overloaded',
  'streams',
])

interface Entry {
  readonly record: string
  readonly payment: unknown
}

/** Does what it is asked as often as it is asked: that nobody asks twice is what the proxy is for. */
export class SimulatedUpstream {
  weather: Weather
  /** A process calls. `risk`: how many times as likely as usual it is that something happens to it. */
  onCall: (by: Owner, risk: number) => void = () => {}
  readonly #scheduler: Scheduler
  readonly #judge: Judge
  readonly #ledger: Entry[] = []
  #answers = 0

  readonly #arrival: Arrival | null

  /** `arrival`: what holds of requests where it is asked by status queries, of which one may free a key; null: it is not. */
  constructor(scheduler: Scheduler, judge: Judge, weather: Weather, arrival: Arrival | null) {
    this.#arrival = arrival
    this.#scheduler = scheduler
    this.#judge = judge
    this.weather = weather
  }

  /** The port of one process. */
  forward(by: Owner, bytes: Bytes): Forward {
    return (request) =>
      request.method === 'GET' ? this.#asked(by, bytes, request) : this.#sent(by, bytes, request)
  }

  #latency(most: Millis): Millis {
    const { random } = this.#scheduler
    if (random.chance(this.weather.slow)) return random.between(10, most)
    return random.chance(0.7) || this.weather === CALM ? random.between(0.5, 30) : random.between(10, 800)
  }

  #sent(by: Owner, bytes: Bytes, request: UpstreamRequest): Promise<Forwarded> {
    const { random } = this.#scheduler
    const { weather } = this
    this.onCall(by, 5)
    const wish = wishOf(request)
    const name = nameOf(wish)
    const tell = (what: string): void => this.#scheduler.tell(by.name, what, name)
    const fence = firstOf(request.headers, 'x-fence')
    const known = this.#judge.of(name)
    const mayRepeat = fence !== '0' && firstOf(request.headers, 'x-on-response-lost') === 'retry'
    return new Promise((resolve) => {
      let isOver = false
      let isExecuted = false
      let isResponseLost = false
      const judgeLoss = (): void => {
        if (mayRepeat && isExecuted && isResponseLost) this.#judge.lostResponse(name)
      }
      const lose = (): void => {
        isResponseLost = true
        judgeLoss()
      }
      const end = (result: Forwarded): void => {
        if (isOver) {
          if (result.proof === 'responded') result.release()
          return
        }
        isOver = true
        timeout.isCancelled = true
        resolve(result)
      }
      const unknown = (reason: string, timedOut = false, status: number | null = null): void => {
        if (isOver) return
        tell(`the exchange ends: ${reason}`)
        lose()
        end({ proof: 'unknown', reason, timedOut, status })
      }
      let hasBegun = false
      const timeout = this.#scheduler.after(
        UPSTREAM_TIMEOUT / by.rate,
        by,
        'upstream times out',
        () => {
          if (hasBegun) unknown('no whole answer in time', true)
          else end({ proof: 'not_sent', reason: 'connect timeout' })
        },
        true,
      )
      const isUnreachable = random.chance(weather.unreachable)
      const isSlow = weather.slowConnections > 0 && random.chance(weather.slowConnections)
      const connecting = isSlow
        ? random.between(UPSTREAM_TIMEOUT / 2, UPSTREAM_TIMEOUT)
        : this.#latency(UPSTREAM_TIMEOUT)
      this.#scheduler.after(connecting, by, 'connects', () => {
        if (isOver) return
        if (isUnreachable) {
          tell('the upstream cannot be reached')
          return end({ proof: 'not_sent', reason: 'refused' })
        }
        if (request.mayBegin?.() === false) {
          tell('does not send: the lease is too old')
          return end({ proof: 'not_sent', reason: 'the lease is too old' })
        }
        hasBegun = true
        tell(`sends, fence …${Number(fence) % 1_000_000}`)
        this.#judge.sends(name, Number(fence))
        const { now } = this.#scheduler
        const manner = random.chance(weather.odd) ? random.pick(ODD) : 'pays'
        const fate = random.chance(weather.broken)
          ? random.pick(['lost', 'reset', 'reset at once', 'silent'] as const)
          : 'whole'
        const travel =
          fate === 'reset at once'
            ? random.between(10, this.#arrival === null ? 20_000 : 5_000)
            : this.#latency(1_500)
        const { afterClaim, afterBegin } = this.#arrival ?? {
          afterClaim: Number.POSITIVE_INFINITY,
          afterBegin: 0,
        }
        const latest = Math.max(known.claimedAt + afterClaim, now + afterBegin)
        const isLost = fate === 'lost' || now + travel > latest
        if (isLost || fate === 'reset at once')
          this.#scheduler.after(random.between(0, 100), by, 'reset', () => unknown('reset'))
        if (isLost) return
        this.#scheduler.after(travel, WORLD, 'upstream', () => {
          isExecuted = DOES.has(manner)
          judgeLoss()
          const response = this.#does(manner, wish, request, fence)
          if (fate === 'silent') return
          this.#scheduler.after(this.#latency(4_000), by, 'upstream answers', () => {
            if (isOver) return
            if (fate === 'reset') return unknown('reset', false, random.chance(0.3) ? response.status : null)
            tell(`is answered ${response.status}`)
            if (manner === 'streams') return end(this.#streams(by, response, lose))
            const declaredOutcome = manner === 'says no' ? 'not-applied' : null
            end({ proof: 'responded', response, declaredOutcome, release: bytes.take(response.body.length) })
          })
        })
      })
    })
  }

  /** The request has arrived. */
  #does(manner: Manner, wish: Wish, request: UpstreamRequest, fence: string | null): StoredResponse {
    const name = nameOf(wish)
    const isDone = DOES.has(manner)
    const payment = { ...wish, payment: isDone ? ++this.#answers : 'nothing', said: ++this.#answers }
    const response: StoredResponse = {
      status: STATUS[manner],
      reason: 'Said',
      headers: ['Content-Type', 'application/json', 'X-Said', `${this.#answers}`],
      body: Buffer.from(JSON.stringify(payment)),
      trailers: [],
    }
    this.#scheduler.tell(
      'upstream',
      isDone ? `EXECUTES "${wish.payload}" (${manner})` : `does nothing (${manner})`,
      name,
    )
    if (!isDone) return response
    if (fence === null) this.#judge.shadowed(name)
    if (fence === '0') this.#judge.bypassed(name)
    this.#ledger.push({ record: firstOf(request.headers, 'idempotency-record') as string, payment })
    this.#judge.executed(wish, response, fence !== null && fence !== '0')
    return response
  }

  /** A status query: it tells the truth, or nothing that could be taken for it. */
  #asked(by: Owner, bytes: Bytes, { target }: UpstreamRequest): Promise<Forwarded> {
    const { random } = this.#scheduler
    const record = decodeURIComponent(/record=([^&]*)/.exec(target)?.[1] ?? '')
    const name = this.#judge.nameOf(record as never)
    return new Promise((resolve) => {
      let isOver = false
      this.#scheduler.after(
        QUERY_TIMEOUT / by.rate,
        by,
        'query times out',
        () => {
          isOver = true
          resolve({ proof: 'unknown', reason: 'no answer', timedOut: true, status: null })
        },
        true,
      )
      if (random.chance(this.weather.unreachable)) return resolve({ proof: 'not_sent', reason: 'refused' })
      this.#scheduler.after(this.#latency(900), WORLD, 'status query', () => {
        const found = this.#ledger.find((entry) => entry.record === record)
        const isUnsure = random.chance(this.weather.odd / 4)
        const [status, said] = isUnsure ? [202, {}] : found === undefined ? [404, {}] : [200, found]
        this.#scheduler.tell('upstream', `says ${status} to a status query`, name)
        if (random.chance(this.weather.broken)) return
        this.#scheduler.after(this.#latency(900), by, 'status', () => {
          if (isOver) return
          const body = Buffer.from(JSON.stringify(said))
          const headers = ['Content-Type', 'application/json']
          const release = bytes.take(body.length)
          resolve({
            proof: 'responded',
            declaredOutcome: null,
            response: { status, reason: 'Said', headers, body, trailers: [] },
            release,
          })
        })
      })
    })
  }

  #streams(by: Owner, { status, reason, headers }: StoredResponse, onBroken: () => void): Forwarded {
    const { random } = this.#scheduler
    const end = random.chance(this.weather.broken) ? 'broken' : 'complete'
    const { promise: done, resolve } = Promise.withResolvers<'complete' | 'broken'>()
    this.#scheduler.after(this.#latency(3_000), by, 'stream ends', () => resolve(end))
    void done.then((ended) => {
      if (ended === 'broken') onBroken()
    })
    const live = {
      status,
      reason,
      headers,
      done,
      brokenBy: 'a reset',
      trailers: [],
      declaredOutcome: null,
      attach: (_sink: LiveSink) => {},
      drain: () => {},
      abandon: () => resolve('broken'),
      kept: null,
      release: () => {},
    }
    return { proof: 'live', why: 'streamed', live }
  }
}

function wishOf({ headers, body }: UpstreamRequest): Wish {
  const { caller, payload } = JSON.parse(body.toString()) as Pick<Wish, 'caller' | 'payload'>
  return { caller, key: firstOf(headers, 'idempotency-key') as string, payload }
}
