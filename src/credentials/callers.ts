import {
  base64url,
  type CryptoKey,
  createLocalJWKSet,
  decodeProtectedHeader,
  errors,
  type JSONWebKeySet,
  type JWK,
  type JWTPayload,
  type JWTVerifyOptions,
  jwtVerify,
  type ProtectedHeaderParameters,
} from 'jose'
import { Agent, request } from 'undici'
import { linesOf, type RawHeaders } from '../core/headers.ts'
import type { VerifiedToken } from '../core/identity.ts'
import type { JwtPolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import { parseKeyText } from './key-text.ts'

export interface Verifier {
  /** The caller that the bearer token proves. `policy` must be one that the verifier was created with. */
  verify(policy: JwtPolicy, headers: RawHeaders): Promise<VerifiedToken>
  close(): Promise<void>
}

/** Seconds that a token outlives its `exp`. Server clocks kept by NTP differ by less. */
const CLOCK_TOLERANCE = 30

/**
 * Verifies bearer tokens for these policies; routes with the same key source share its keys. Results are not cached: a verification
 * costs 0.1 to 0.2 ms, and a cached result could outlive its key.
 * @throws if a key file holds no usable key.
 */
export function verifier(policies: readonly JwtPolicy[], options: Partial<JwksOptions> = {}): Verifier {
  const { clock = Date.now, fetchTimeout = FETCH_TIMEOUT } = options
  const rings = new Map<string, KeyRing>()
  for (const policy of policies) {
    const name = ringName(policy)
    if (!rings.has(name)) rings.set(name, openRing(policy, { clock, fetchTimeout }))
  }
  return {
    async verify(policy, headers) {
      const bearer = bearerOf(headers)
      if (bearer.kind !== 'token') return bearer
      const ring = rings.get(ringName(policy))
      if (ring === undefined) throw new Error('a policy unknown to this verifier')
      return verifyWith(ring, bearer.token, {
        ...(policy.issuer === null ? {} : { issuer: policy.issuer }),
        ...(policy.audience.length === 0 ? {} : { audience: [...policy.audience] }),
        // A token without an expiry would authenticate its caller forever.
        requiredClaims: ['exp'],
        clockTolerance: CLOCK_TOLERANCE,
        currentDate: new Date(clock()),
      })
    },
    async close() {
      await Promise.all([...rings.values()].map((ring) => ring.close()))
    },
  }
}

function ringName({ jwks, keyFile }: JwtPolicy): string {
  return jwks === null ? `file ${keyFile ?? ''}` : `url ${jwks}`
}

function openRing({ jwks, keyFile }: JwtPolicy, options: JwksOptions): KeyRing {
  if (jwks !== null) return new RemoteKeys(jwks, options)
  const reading = parseKeyText(keyFile ?? '')
  if (!reading.ok) throw new Error(`scope.jwt.keyFile: ${reading.message}`)
  return fixedKeys(reading.keys.shared, reading.keys.secret)
}

type Bearer = { readonly kind: 'token'; readonly token: string } | Exclude<VerifiedToken, { kind: 'claims' }>

/** The token of `Authorization: Bearer …` (RFC 6750 §2.1). Two lines are refused: which one the upstream reads is unknown. */
function bearerOf(headers: RawHeaders): Bearer {
  const lines = linesOf(headers, 'authorization')
  if (lines.length > 1) return refused(`${lines.length} Authorization lines; one is allowed`)
  const [scheme = '', ...rest] = (lines[0] ?? '').trim().split(/[ \t]+/)
  if (scheme.toLowerCase() !== 'bearer') return { kind: 'absent' }
  const [token = ''] = rest
  return rest.length === 1 && /^[\w-]+\.[\w-]+\.[\w-]+$/.test(token) ? { kind: 'token', token } : NO_JWT
}

function refused(detail: string): VerifiedToken & { kind: 'refused' } {
  return { kind: 'refused', detail }
}

const NO_JWT = refused('the bearer token is not a signed JWT')
const NO_KEY = refused('the bearer token is not signed with a key of its issuer')
const FORGED = refused('the signature of the bearer token is wrong')
const ALGORITHM = refused('the bearer token is signed in a way that is not accepted here ("alg" or "crit")')

async function verifyWith(ring: KeyRing, token: string, options: JWTVerifyOptions): Promise<VerifiedToken> {
  const held = await ring.current()
  if (held.kind === 'unavailable') return held
  const first = await attempt(held.keys, token, options)
  // The key may have been published since then, under a new id or the old one.
  if (first !== NO_KEY && first !== FORGED) return first
  const renewed = await ring.renewed(held.keys)
  if (renewed.kind === 'unavailable') return first === NO_KEY ? renewed : first
  return renewed.keys === held.keys ? first : attempt(renewed.keys, token, options)
}

async function attempt(keys: Keys, token: string, options: JWTVerifyOptions): Promise<VerifiedToken> {
  let verdict: VerifiedToken = NO_KEY
  try {
    const header = decodeProtectedHeader(token)
    if (header.alg === undefined || !keys.algorithms.includes(header.alg)) return ALGORITHM
    for (const key of await keys.candidates(header)) {
      verdict = await judge(jwtVerify(token, key, { ...options, algorithms: [header.alg] }))
      if (verdict !== FORGED && verdict !== NO_KEY) return verdict
    }
  } catch {
    return NO_JWT // its header is unreadable
  }
  return verdict
}

/** Errors in our own words, because jose's messages and causes quote the token. */
async function judge(verification: Promise<{ readonly payload: JWTPayload }>): Promise<VerifiedToken> {
  try {
    const { payload } = await verification
    // No prototype: a claim named `constructor` exists only if the token has it.
    return { kind: 'claims', claims: { __proto__: null, ...payload } }
  } catch (error) {
    if (error instanceof errors.JWSSignatureVerificationFailed) return FORGED
    if (error instanceof errors.JWTExpired) return refused('the bearer token has expired')
    if (error instanceof errors.JWTClaimValidationFailed) return refused(whyClaim(error))
    if (error instanceof errors.JOSENotSupported) return ALGORITHM
    if (error instanceof errors.JOSEError) return NO_JWT
    // The key does not fit the algorithm, such as RSA below 2048 bits.
    return NO_KEY
  }
}

function whyClaim({ claim, reason }: errors.JWTClaimValidationFailed): string {
  if (reason === 'missing') return `the bearer token has no "${claim}"`
  if (reason === 'invalid') return `"${claim}" of the bearer token is not a time`
  if (claim === 'nbf') return 'the bearer token is not valid yet'
  return claim === 'iss'
    ? 'the bearer token is from another issuer'
    : 'the bearer token is for another audience'
}

/** A snapshot of the keys that verify tokens. */
interface Keys {
  readonly algorithms: readonly string[]
  /** The keys that may have signed a token with this header. */
  candidates(header: ProtectedHeaderParameters): Promise<readonly VerificationKey[]>
}
type VerificationKey = CryptoKey | Uint8Array

type CachedKeys =
  | { readonly kind: 'keys'; readonly keys: Keys }
  | { readonly kind: 'unavailable'; readonly detail: string }

/** The source of a policy's keys. */
interface KeyRing {
  current(): Promise<CachedKeys>
  /** Keys newer than those that failed; the same ones if there are none. */
  renewed(unfit: Keys): Promise<CachedKeys>
  close(): Promise<void>
}

const ASYMMETRIC = 'RS256 RS384 RS512 PS256 PS384 PS512 ES256 ES384 ES512 EdDSA Ed25519'.split(' ')
const SYMMETRIC = ['HS256', 'HS384', 'HS512']

/** Maximum keys tried for a token without `kid`; each costs a verification, even for a forged token. */
const MAX_CANDIDATES = 8

/**
 * Public keys, for asymmetric algorithms only. A key without `kid` may have signed a token that has one.
 * @throws {errors.JWKSInvalid} if `set` is not a JWK Set.
 */
function publicKeys(set: JSONWebKeySet): Keys {
  const all = createLocalJWKSet(set)
  const nameless = createLocalJWKSet({ keys: set.keys.filter(({ kid }) => kid === undefined) })
  return {
    algorithms: ASYMMETRIC,
    candidates: async (header) => {
      const { alg, kid } = header
      if (alg === undefined || kid === undefined) return fitting(all, header)
      return [...(await fitting(all, header)), ...(await fitting(nameless, { alg }))]
    },
  }
}

async function fitting(
  set: ReturnType<typeof createLocalJWKSet>,
  header: ProtectedHeaderParameters,
): Promise<VerificationKey[]> {
  try {
    return [await set(header)]
  } catch (error) {
    const keys: VerificationKey[] = []
    // No key matches, or the one that does is malformed or private.
    if (!(error instanceof errors.JWKSMultipleMatchingKeys)) return keys
    for await (const key of error) if (keys.push(key) === MAX_CANDIDATES) break
    return keys
  }
}

/** `oct` keys, for HMAC only: a public key is never used as a secret. */
function secretKeys(jwks: readonly JWK[]): Keys {
  return {
    algorithms: SYMMETRIC,
    candidates: async ({ alg, kid }) =>
      jwks
        .filter((jwk) => jwk.alg === undefined || jwk.alg === alg)
        .filter((jwk) => kid === undefined || jwk.kid === undefined || jwk.kid === kid)
        .slice(0, MAX_CANDIDATES)
        .map(({ k }) => base64url.decode(k as string)),
  }
}

/** The keys of a file never change. */
function fixedKeys(shared: readonly JWK[], secret: readonly JWK[]): KeyRing {
  const asymmetric = publicKeys({ keys: [...shared] })
  const symmetric = secretKeys(secret)
  const keys: Keys = {
    algorithms: [
      ...(shared.length > 0 ? asymmetric.algorithms : []),
      ...(secret.length > 0 ? symmetric.algorithms : []),
    ],
    candidates: (header) =>
      (SYMMETRIC.includes(header.alg ?? '') ? symmetric : asymmetric).candidates(header),
  }
  const held = async (): Promise<CachedKeys> => ({ kind: 'keys', keys })
  return { current: held, renewed: held, close: async () => {} }
}

/** How long a set is used before it is fetched again; a withdrawn key stays valid until then. */
const FRESH: Millis = 600_000
/** The same while fetches fail. An issuer that cannot publish keys rarely issues tokens, and its tokens rarely live longer. */
const STALE: Millis = 3_600_000
/** Minimum pause between fetches: tokens with made-up key ids must not turn this proxy against the issuer. */
const COOLDOWN: Millis = 10_000
/** The same after a failed fetch, while no token can be verified. */
const PAUSE: Millis = 1000
/** Timeout of a fetch. Requests wait for it before they claim anything. */
const FETCH_TIMEOUT: Millis = 3000
/** Maximum size. The largest known sets, with certificate chains, take about 50 KiB. */
const MAX_BYTES = 1024 ** 2

interface JwksOptions {
  /** Wall clock. */
  readonly clock: () => Millis
  readonly fetchTimeout: Millis
}

/**
 * A JWK Set behind a URL, fetched on first use by one request on behalf of all that wait. jose's `createRemoteJWKSet` does not pause after
 * a failed fetch, fall back on the keys it had, or bound what it reads (docs/adr/0035).
 */
class RemoteKeys implements KeyRing {
  readonly #url: URL
  readonly #clock: () => Millis
  readonly #timeout: Millis
  readonly #agent: Agent
  #keys: Keys | null = null
  /** Start of the fetch that returned `#keys`. */
  #fetchedAt: Millis = Number.NEGATIVE_INFINITY
  /** End of the last fetch. */
  #triedAt: Millis = Number.NEGATIVE_INFINITY
  /** Why that fetch failed. */
  #failure: string | null = null
  #pending: Promise<void> | null = null

  constructor(url: string, { clock, fetchTimeout }: JwksOptions) {
    this.#url = new URL(url)
    this.#clock = clock
    this.#timeout = fetchTimeout
    this.#agent = new Agent({
      connections: 1,
      // No keep-alive: the next fetch is minutes away.
      pipelining: 0,
      allowH2: false,
      maxResponseSize: MAX_BYTES,
      connect: { timeout: fetchTimeout },
    })
  }

  async current(): Promise<CachedKeys> {
    if (!this.#within(this.#fetchedAt, FRESH)) {
      const fetched = this.#refresh()
      // While the issuer is known to be down, no request waits for it again.
      const away = this.#failure !== null && this.#within(this.#triedAt, FRESH)
      if (!away || !this.#usable()) await fetched
    }
    return this.#held()
  }

  async renewed(unfit: Keys): Promise<CachedKeys> {
    if (this.#keys === unfit) await this.#refresh()
    // The missing key may be in the set that failed to load.
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

  /** False for times in the future, too: after the clock is set back, everything counts as old. */
  #within(since: Millis, period: Millis): boolean {
    const age = this.#clock() - since
    return age >= 0 && age < period
  }

  /** Never rejects. */
  #refresh(): Promise<void> {
    const pause = this.#failure === null ? COOLDOWN : PAUSE
    if (this.#pending === null && !this.#within(this.#triedAt, pause)) this.#pending = this.#load()
    return this.#pending ?? Promise.resolve()
  }

  async #load(): Promise<void> {
    const began = this.#clock()
    try {
      this.#keys = await this.#fetch()
      this.#fetchedAt = began
      this.#failure = null
    } catch (error) {
      this.#failure = whyFailed(error)
    }
    this.#triedAt = this.#clock()
    this.#pending = null
  }

  /** Redirects are not followed: only the configured host vouches for callers. */
  async #fetch(): Promise<Keys> {
    const signal = AbortSignal.timeout(this.#timeout)
    // undici honours the signal only once it is connected.
    const late = new Promise<never>((_, reject) => {
      signal.addEventListener('abort', () => reject(new FetchFailed('timed out')), { once: true })
    })
    const fetched = async (): Promise<string> => {
      const headers = { accept: 'application/jwk-set+json, application/json' }
      const { statusCode, body } = await request(this.#url, { dispatcher: this.#agent, signal, headers })
      const text = await body.text()
      if (statusCode !== 200) throw new FetchFailed(`answered ${statusCode}`)
      return text
    }
    const text = await Promise.race([fetched(), late])
    try {
      return publicKeys(JSON.parse(text) as JSONWebKeySet)
    } catch {
      throw new FetchFailed('the response is not a JWK Set')
    }
  }
}

class FetchFailed extends Error {}

function whyFailed(error: unknown): string {
  if (error instanceof FetchFailed) return error.message
  const code = error instanceof Error && 'code' in error ? String(error.code) : ''
  return code === 'UND_ERR_RES_EXCEEDED_MAX_SIZE' ? `more than ${MAX_BYTES} bytes` : code || 'no answer'
}
