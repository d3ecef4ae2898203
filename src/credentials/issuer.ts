import { createSecretKey, hkdfSync, randomBytes, type webcrypto } from 'node:crypto'
import { errors, jwtVerify, SignJWT } from 'jose'
import type { Millis } from '../core/record.ts'

/** What the token is for (RFC 8725 §3.11). */
const TYPE = 'idempotency-key+jwt'
/** Derives a key of its own, so that tokens are worthless elsewhere if the secret serves another purpose, and vice versa. */
const PURPOSE = 'idempotency-proxy/issuer/1'
const KEY_BYTES = 32
/** Keys never repeat. */
const ID_BYTES = 16

/** Signed keys that expire (contract §4): JWTs under HMAC-SHA-256, some 170 characters. Replicas share the secret. */
export class Issuer {
  readonly #key: webcrypto.CryptoKey
  readonly #ttl: Millis

  constructor(secret: Buffer, ttl: Millis) {
    const derived = Buffer.from(hkdfSync('sha256', secret, '', PURPOSE, KEY_BYTES))
    const algorithm = { name: 'HMAC', hash: 'SHA-256' }
    this.#key = createSecretKey(derived).toCryptoKey(algorithm, false, ['sign', 'verify'])
    this.#ttl = ttl
  }

  /** By the store's clock. JWTs count in seconds: a key lives up to one longer than `ttl`. */
  async issue(now: Millis): Promise<{ readonly key: string; readonly expiresAt: Millis }> {
    const expiry = Math.ceil((now + this.#ttl) / 1000)
    const key = await new SignJWT()
      .setProtectedHeader({ alg: 'HS256', typ: TYPE })
      .setJti(randomBytes(ID_BYTES).toString('base64url'))
      .setExpirationTime(expiry)
      .sign(this.#key)
    return { key, expiresAt: expiry * 1000 }
  }

  /** The signature is verified first: `expired` keys were issued. */
  async check(key: string, now: Millis): Promise<'valid' | 'expired' | 'forged'> {
    if (!isCanonical(key)) return 'forged'
    try {
      await jwtVerify(key, this.#key, {
        algorithms: ['HS256'],
        typ: TYPE,
        requiredClaims: ['jti', 'exp'],
        currentDate: new Date(now),
      })
      return 'valid'
    } catch (error) {
      return error instanceof errors.JWTExpired ? 'expired' : 'forged'
    }
  }
}

/** One key has one spelling: the last character of a signature has bits that decoding ignores. */
function isCanonical(key: string): boolean {
  const [, signature] = /^[\w-]+\.[\w-]+\.([\w-]+)$/.exec(key) ?? []
  return signature !== undefined && Buffer.from(signature, 'base64url').toString('base64url') === signature
}
