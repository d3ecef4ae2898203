import { createPublicKey, type KeyObject, X509Certificate } from 'node:crypto'
import type { JWK } from 'jose'

export interface FileKeys {
  /** Public keys, for asymmetric algorithms. */
  readonly shared: readonly JWK[]
  /** `oct` keys, for HS256, HS384 and HS512. */
  readonly secret: readonly JWK[]
}

export type KeyText =
  | { readonly ok: true; readonly keys: FileKeys }
  /** `found …; allowed: …`, quoting nothing from the file. */
  | { readonly ok: false; readonly message: string }

/** RFC 7518 §3.3. */
const MIN_RSA_BITS = 2048
/** RFC 7518 §3.2: at least as long as the hash, of which SHA-256 is the shortest. */
const MIN_SECRET_BYTES = 32
const CURVES: readonly unknown[] = ['prime256v1', 'secp384r1', 'secp521r1']

const ALLOWED =
  'one public key or X.509 certificate in PEM, a JWK or a JWK Set; of RSA (2048 bits or more), EC (P-256, P-384, P-521), Ed25519 or, as a JWK, oct (32 bytes or more)'

/** What is wrong with a key file, or null. */
export function checkKeyText(text: string): string | null {
  const reading = parseKeyText(text)
  return reading.ok ? null : reading.message
}

/** Reads a key file: PEM (SPKI, or a certificate, ignoring its dates and issuer), a JWK or a JWK Set. */
export function parseKeyText(text: string): KeyText {
  return text.trim().startsWith('{') ? readJson(text) : readPem(text)
}

function wrong(found: string): KeyText {
  return { ok: false, message: `found ${found}; allowed: ${ALLOWED}` }
}

function readPem(text: string): KeyText {
  const labels = [...text.matchAll(/-----BEGIN ([^-]+)-----/g)].map(([, label]) => label as string)
  const [label] = labels
  if (label === undefined) return wrong('neither PEM nor a JSON object')
  // Node would read only the first.
  if (labels.length > 1) return wrong(`${labels.length} PEM blocks`)
  // Node would derive the public key, but a verifier must not hold a private one.
  if (label.endsWith('PRIVATE KEY')) return wrong('a private key')
  let key: KeyObject
  try {
    key = label.endsWith('CERTIFICATE') ? new X509Certificate(text).publicKey : createPublicKey(text)
  } catch {
    return wrong('PEM that holds no readable public key')
  }
  const unfit = unfitPublic(key)
  return unfit === null
    ? { ok: true, keys: { shared: [key.export({ format: 'jwk' })], secret: [] } }
    : wrong(unfit)
}

function unfitPublic(key: KeyObject): string | null {
  const type = key.asymmetricKeyType ?? 'unknown'
  const { modulusLength = 0, namedCurve } = key.asymmetricKeyDetails ?? {}
  if (type === 'rsa') return modulusLength < MIN_RSA_BITS ? `an RSA key of ${modulusLength} bits` : null
  if (type === 'ec') return CURVES.includes(namedCurve) ? null : `an EC key on ${namedCurve}`
  return type === 'ed25519' ? null : `a key of type ${type}`
}

function readJson(text: string): KeyText {
  let parsed: Record<string, unknown>
  try {
    parsed = JSON.parse(text.trim()) as Record<string, unknown>
  } catch {
    return wrong('malformed JSON')
  }
  const members: readonly unknown[] = Array.isArray(parsed.keys) ? parsed.keys : [parsed]
  const shared: JWK[] = []
  const secret: JWK[] = []
  let passedOver: string | null = null
  for (const [i, member] of members.entries()) {
    const use = judge(member)
    if (use.kind === 'shared') shared.push(use.jwk)
    if (use.kind === 'secret') secret.push(use.jwk)
    if (use.kind === 'wrong') return wrong(members === parsed.keys ? `${use.found} at keys[${i}]` : use.found)
    if (use.kind === 'other') passedOver ??= use.found
  }
  if (shared.length + secret.length > 0) return { ok: true, keys: { shared, secret } }
  return wrong(passedOver ?? 'a JWK Set without keys')
}

type Use =
  | { readonly kind: 'shared' | 'secret'; readonly jwk: JWK }
  /** Unusable here, but allowed in a set (RFC 7517 §5). */
  | { readonly kind: 'other'; readonly found: string }
  /** Unusable, and a mistake in any set. */
  | { readonly kind: 'wrong'; readonly found: string }

function judge(value: unknown): Use {
  if (!isObject(value) || typeof value.kty !== 'string')
    return { kind: 'wrong', found: 'a JWK without "kty"' }
  const jwk = value as JWK
  const { kty, k, use, key_ops: ops } = jwk
  if (use !== undefined && use !== 'sig') return { kind: 'other', found: 'a JWK for another "use" than sig' }
  if (ops !== undefined && !(Array.isArray(ops) && ops.includes('verify')))
    return { kind: 'other', found: 'a JWK whose "key_ops" lack verify' }
  if (kty === 'oct') {
    const bytes = typeof k === 'string' && /^[\w-]+$/.test(k) ? Buffer.from(k, 'base64url').length : 0
    return bytes < MIN_SECRET_BYTES
      ? { kind: 'wrong', found: `an oct JWK of ${bytes} bytes` }
      : { kind: 'secret', jwk }
  }
  if (value.d !== undefined || value.priv !== undefined) return { kind: 'wrong', found: 'a private key' }
  let key: KeyObject
  try {
    key = createPublicKey({ key: { ...jwk }, format: 'jwk' })
  } catch {
    return { kind: 'other', found: 'a JWK that holds no readable public key' }
  }
  const unfit = unfitPublic(key)
  return unfit === null ? { kind: 'shared', jwk } : { kind: 'other', found: unfit }
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}
