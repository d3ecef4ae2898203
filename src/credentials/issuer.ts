import { createSecretKey, hkdfSync, randomBytes, type webcrypto } from 'node:crypto'
import { errors, jwtVerify, SignJWT } from 'jose'
import type { Millis } from '../core/record.ts'

/** Explicit type of the token (RFC 8725 §3.11). */
const TYPE = 'idempotency-key+jwt'
/** Derives a separate key, so that tokens are worthless wherever else the secret is used, and vice versa. */
const PURPOSE = 'idempotency-proxy/issuer/1'
const KEY_BYTES = 32
/** Enough that keys never repeat. */
const ID_BYTES = 16

/** Issues signed keys that expire (contract §4): HMAC-SHA-256 JWTs of about 190 characters. Replicas share the secret. */
export class Issuer {
  readonly #key: webcrypto.CryptoKey
  readonly #ttl: Millis

  constructor(secret: Buffer, ttl: Millis) {
    const derived = Buffer.from(hkdfSync('sha256', secret, '', PURPOSE, KEY_BYTES))
    const algorithm = { name: 'HMAC', hash: 'SHA-256' }
    this.#key = createSecretKey(derived).toCryptoKey(algorithm, false, ['sign', 'verify'])
    this.#ttl = ttl
  }

  /** `now` is the store's clock. JWTs count in seconds, so a key may outlive `ttl` by up to one second. */
  async issue(now: Millis): Promise<{ readonly key: string; readonly expiresAt: Millis }> {
    const expiry = Math.ceil((now + this.#ttl) / 1000)
    const key = await new SignJWT()
      .setProtectedHeader({ alg: 'HS256', typ: TYPE })
      .setJti(randomBytes(ID_BYTES).toString('base64url'))
      .setIssuedAt(Math.floor(now / 1000))
      .setExpirationTime(expiry)
      .sign(this.#key)
    return { key, expiresAt: expiry * 1000 }
  }

  /** Verifies the signature first, so an `expired` key was really issued here. */
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

/** Only one spelling of a key is valid: decoding ignores some bits of a signature's last character. */
function isCanonical(key: string): boolean {
  const [, signature] = /^[\w-]+\.[\w-]+\.([\w-]+)$/.exec(key) ?? []
  return signature !== undefined && Buffer.from(signature, 'base64url').toString('base64url') === signature
}
