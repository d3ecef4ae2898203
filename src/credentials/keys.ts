import {
  base64url,
  type CryptoKey,
  createLocalJWKSet,
  errors,
  type JSONWebKeySet,
  type JWK,
  type ProtectedHeaderParameters,
} from 'jose'

/** Keys by which tokens are verified, as they were at one time. */
export interface Keys {
  readonly algorithms: readonly string[]
  /** Those that may have signed a token with this header. */
  candidates(header: ProtectedHeaderParameters): Promise<readonly Key[]>
}
type Key = CryptoKey | Uint8Array

/** Keys at hand, or why there are none. */
export type CachedKeys =
  | { readonly kind: 'keys'; readonly keys: Keys }
  | { readonly kind: 'unavailable'; readonly detail: string }

/** Where a policy's keys come from. */
export interface KeyRing {
  current(): Promise<CachedKeys>
  /** Newer keys than those that did not fit; the same ones where there are none. */
  renewed(unfit: Keys): Promise<CachedKeys>
  close(): Promise<void>
}

const ASYMMETRIC = 'RS256 RS384 RS512 PS256 PS384 PS512 ES256 ES384 ES512 EdDSA Ed25519'.split(' ')
const SYMMETRIC = ['HS256', 'HS384', 'HS512']

/** A token without `kid` may be by any of a set's keys; each one tried costs a verification, also for a forged token. */
const MAX_CANDIDATES = 8

/**
 * Public keys, for asymmetric algorithms alone. A key without `kid` may have signed a token with any.
 * @throws {errors.JWKSInvalid} where `set` is no JWK Set.
 */
export function publicKeys(set: JSONWebKeySet): Keys {
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
): Promise<Key[]> {
  try {
    return [await set(header)]
  } catch (error) {
    const keys: Key[] = []
    // No key fits, or the one that does cannot be used: malformed, or private.
    if (!(error instanceof errors.JWKSMultipleMatchingKeys)) return keys
    for await (const key of error) if (keys.push(key) === MAX_CANDIDATES) break
    return keys
  }
}

/** `oct` keys, for HMAC alone: a public key is never taken for a secret. */
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

/** The keys of a file: they stay what they are. */
export function fixedKeys(shared: readonly JWK[], secret: readonly JWK[]): KeyRing {
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
