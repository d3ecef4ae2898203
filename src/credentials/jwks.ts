import type { JSONWebKeySet } from 'jose'
import { Agent, request } from 'undici'
import type { Millis } from '../core/record.ts'
import { type CachedKeys, type KeyRing, type Keys, publicKeys } from './keys.ts'

/** How long a set is believed without asking again, and so how long a key lives on that was taken out of it. */
const FRESH: Millis = 600_000
/**
 * How long it serves while it cannot be had anew. Who cannot publish keys mostly cannot give out tokens either, and those
 * under way rarely live longer.
 */
const STALE: Millis = 3_600_000
/** Least time from one fetch to the next: tokens with made-up key ids cannot turn this proxy on the issuer. */
const COOLDOWN: Millis = 10_000
/** The same after a fetch that failed: until the next one nobody can be let in. */
const PAUSE: Millis = 1000
/** A request waits for it, before anything is claimed. */
export const FETCH_TIMEOUT: Millis = 3000
/** The largest known sets, with certificate chains, have some 50 KiB. */
const MAX_BYTES = 1024 ** 2

export interface JwksOptions {
  /** Wall clock. */
  readonly clock: () => Millis
  readonly fetchTimeout: Millis
}

/**
 * A JWK Set behind a URL: fetched when it is first needed, by one request for all who wait. `createRemoteJWKSet` of jose
 * neither pauses after a failed fetch, nor goes on with the keys it had, nor bounds what it reads.
 */
export class RemoteKeys implements KeyRing {
  readonly #url: URL
  readonly #clock: () => Millis
  readonly #timeout: Millis
  readonly #agent: Agent
  #keys: Keys | null = null
  /** When the fetch of `#keys` began. */
  #fetchedAt: Millis = Number.NEGATIVE_INFINITY
  /** When the last fetch ended. */
  #triedAt: Millis = Number.NEGATIVE_INFINITY
  /** Why it failed. */
  #failure: string | null = null
  #pending: Promise<void> | null = null

  constructor(url: string, { clock, fetchTimeout }: JwksOptions) {
    this.#url = new URL(url)
    this.#clock = clock
    this.#timeout = fetchTimeout
    this.#agent = new Agent({
      connections: 1,
      // A connection is closed after its answer: the next one is minutes away.
      pipelining: 0,
      allowH2: false,
      maxResponseSize: MAX_BYTES,
      connect: { timeout: fetchTimeout },
    })
  }

  async current(): Promise<CachedKeys> {
    if (!this.#within(this.#fetchedAt, FRESH)) {
      const fetched = this.#refresh()
      // While the issuer is known to be away nobody waits for it again.
      const away = this.#failure !== null && this.#within(this.#triedAt, FRESH)
      if (!away || !this.#usable()) await fetched
    }
    return this.#held()
  }

  async renewed(unfit: Keys): Promise<CachedKeys> {
    if (this.#keys === unfit) await this.#refresh()
    // The key that is missing may be in the set that could not be fetched.
    if (this.#keys === unfit && this.#failure !== null) return this.#unavailable(this.#failure)
    return this.#held()
  }

  async close(): Promise<void> {
    await this.#agent.destroy()
  }

  #held(): CachedKeys {
    return this.#keys !== null && this.#usable()
      ? { kind: 'keys', keys: this.#keys }
      : this.#unavailable(this.#failure ?? 'not fetched')
  }

  #unavailable(why: string): CachedKeys {
    return { kind: 'unavailable', detail: `the key set of scope.jwt.jwks could not be fetched (${why})` }
  }

  #usable(): boolean {
    return this.#within(this.#fetchedAt, STALE)
  }

  /** A clock that was put back makes things old, not young. */
  #within(since: Millis, period: Millis): boolean {
    const age = this.#clock() - since
    return age >= 0 && age < period
  }

  /** Never rejects. */
  #refresh(): Promise<void> {
    if (this.#pending !== null) return this.#pending
    if (this.#within(this.#triedAt, this.#failure === null ? COOLDOWN : PAUSE)) return Promise.resolve()
    const began = this.#clock()
    this.#pending = this.#fetch()
      .then(
        (keys) => {
          this.#keys = keys
          this.#fetchedAt = began
          this.#failure = null
        },
        (error: unknown) => {
          this.#failure = whyFailed(error)
        },
      )
      .finally(() => {
        this.#triedAt = this.#clock()
        this.#pending = null
      })
    return this.#pending
  }

  async #fetch(): Promise<Keys> {
    const signal = AbortSignal.timeout(this.#timeout)
    // undici hears the signal only once it is connected.
    const late = new Promise<never>((_, reject) => {
      signal.addEventListener('abort', () => reject(new FetchFailed('timed out')), { once: true })
    })
    const text = await Promise.race([this.#read(signal), late])
    try {
      return publicKeys(JSON.parse(text) as JSONWebKeySet)
    } catch {
      throw new FetchFailed('the answer is no JWK Set')
    }
  }

  /** Redirects are not followed: the configured host says who calls, nobody else. */
  async #read(signal: AbortSignal): Promise<string> {
    const { statusCode, body } = await request(this.#url, {
      dispatcher: this.#agent,
      signal,
      headers: { accept: 'application/jwk-set+json, application/json' },
    })
    const text = await body.text()
    if (statusCode !== 200) throw new FetchFailed(`answered ${statusCode}`)
    return text
  }
}

class FetchFailed extends Error {}

function whyFailed(error: unknown): string {
  if (error instanceof FetchFailed) return error.message
  const code = error instanceof Error && 'code' in error ? String(error.code) : ''
  return code === 'UND_ERR_RES_EXCEEDED_MAX_SIZE' ? `more than ${MAX_BYTES} bytes` : code || 'no answer'
}
