import { decodeProtectedHeader, errors, type JWTPayload, type JWTVerifyOptions, jwtVerify } from 'jose'
import { linesOf, type RawHeaders } from '../core/headers.ts'
import type { VerifiedToken } from '../core/jwt.ts'
import type { JwtPolicy, RoutePolicy } from '../core/policy.ts'
import { FETCH_TIMEOUT, type JwksOptions, RemoteKeys } from './jwks.ts'
import { readKeyText } from './key-text.ts'
import { fixedKeys, type KeyRing, type Keys } from './keys.ts'

export interface Verifier {
  /** Who the bearer token is proven to speak of. `policy` is one of those that the verifier was made with. */
  verify(policy: JwtPolicy, headers: RawHeaders): Promise<VerifiedToken>
  close(): Promise<void>
}

/** Clocks of servers that keep time by NTP differ by less; a token outlives its `exp` by so much. Seconds. */
const CLOCK_TOLERANCE = 30

/**
 * Verifies the bearer tokens of these policies; routes that name the same keys share them. Results are not kept: a
 * verification costs 0.1 to 0.2 ms, and what is not kept cannot outlive its key.
 * @throws where a key file's text holds no key that can be used.
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
      if (ring === undefined) throw new Error('a policy that this verifier was not made with')
      return verifyWith(ring, bearer.token, {
        ...(policy.issuer === null ? {} : { issuer: policy.issuer }),
        ...(policy.audience.length === 0 ? {} : { audience: [...policy.audience] }),
        // A token without an end would speak for its caller forever.
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

/** What the tokens of these routes are verified by. */
export function jwtPoliciesOf(routes: readonly RoutePolicy[]): JwtPolicy[] {
  return routes.map(({ scope }) => scope.jwt).filter((policy) => policy !== null)
}

function ringName({ jwks, keyFile }: JwtPolicy): string {
  return jwks === null ? `file ${keyFile ?? ''}` : `url ${jwks}`
}

function openRing({ jwks, keyFile }: JwtPolicy, options: JwksOptions): KeyRing {
  if (jwks !== null) return new RemoteKeys(jwks, options)
  const reading = readKeyText(keyFile ?? '')
  if (!reading.ok) throw new Error(`scope.jwt.keyFile: ${reading.message}`)
  return fixedKeys(reading.keys.shared, reading.keys.secret)
}

type Bearer = { readonly kind: 'token'; readonly token: string } | Exclude<VerifiedToken, { kind: 'claims' }>

/** The token of `Authorization: Bearer …` (RFC 6750 §2.1). Of two lines nobody knows which one the upstream reads. */
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
  // It may be signed with a key that was published since, under a new id or the old one.
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
    // The header of the token cannot be read.
    return NO_JWT
  }
  return verdict
}

/** The claims, or in words why there are none: messages and causes of jose's errors quote the token. */
async function judge(verification: Promise<{ readonly payload: JWTPayload }>): Promise<VerifiedToken> {
  try {
    const { payload } = await verification
    // Without a prototype: a claim called `constructor` is there only where the token has it.
    return { kind: 'claims', claims: { __proto__: null, ...payload } }
  } catch (error) {
    if (error instanceof errors.JWSSignatureVerificationFailed) return FORGED
    if (error instanceof errors.JWTExpired) return refused('the bearer token has expired')
    if (error instanceof errors.JWTClaimValidationFailed) return refused(whyClaim(error))
    if (error instanceof errors.JOSENotSupported) return ALGORITHM
    if (error instanceof errors.JOSEError) return NO_JWT
    // The key is not one for this algorithm, such as RSA of less than 2048 bits.
    return NO_KEY
  }
}

function whyClaim({ claim, reason }: errors.JWTClaimValidationFailed): string {
  if (reason === 'missing') return `the bearer token has no "${claim}"`
  if (reason === 'invalid') return `"${claim}" of the bearer token is no time`
  if (claim === 'nbf') return 'the bearer token is not valid yet'
  return claim === 'iss'
    ? 'the bearer token is of another issuer'
    : 'the bearer token is for another audience'
}
