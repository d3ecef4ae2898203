import { createSecretKey, hkdfSync, randomBytes, type webcrypto } from 'node:crypto'
import { errors, jwtVerify, SignJWT } from 'jose'
import type { Millis } from '../core/record.ts'

/** What the token is for (RFC 8725 §3.11). */
const TYPE = 'idempotency-key+jwt'
/** Under a key of its own, tokens are worth nothing where the same secret serves another purpose, nor the other way. */
const PURPOSE = 'idempotency-proxy/issuer/1'
const KEY_BYTES = 32
/** Two keys are never the same. */
const ID_BYTES = 16

/**
 * Signed keys that expire (contract §4): JWTs under HMAC-SHA-256, some 170 characters of `[A-Za-z0-9_.-]`. All replicas
 * with the same secret know each other's.
 */
export class Issuer {
  readonly #key: webcrypto.CryptoKey
  readonly #ttl: Millis

  constructor(secret: Buffer, ttl: Millis) {
    const derived = Buffer.from(hkdfSync('sha256', secret, '', PURPOSE, KEY_BYTES))
    const algorithm = { name: 'HMAC', hash: 'SHA-256' }
    this.#key = createSecretKey(derived).toCryptoKey(algorithm, false, ['sign', 'verify'])
    this.#ttl = ttl
  }

  /** `now` and `expiresAt` are of the store's clock. A JWT counts in seconds: a key lives up to one longer than `ttl`. */
  async issue(now: Millis): Promise<{ readonly key: string; readonly expiresAt: Millis }> {
    const expiry = Math.ceil((now + this.#ttl) / 1000)
    const key = await new SignJWT()
      .setProtectedHeader({ alg: 'HS256', typ: TYPE })
      .setJti(randomBytes(ID_BYTES).toString('base64url'))
      .setExpirationTime(expiry)
      .sign(this.#key)
    return { key, expiresAt: expiry * 1000 }
  }

  /** `expired` only where it was issued: the signature is looked at first. */
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

/** One issued key has one spelling: the last character of a signature has bits that decoding passes over. */
function isCanonical(key: string): boolean {
  const [, signature] = /^[\w-]+\.[\w-]+\.([\w-]+)$/.exec(key) ?? []
  return signature !== undefined && Buffer.from(signature, 'base64url').toString('base64url') === signature
}
