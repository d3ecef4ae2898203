import { hash } from 'node:crypto'
import { canonicalJson } from './body/json.ts'
import { jsonText, resolvePointer } from './body/json-pointer.ts'
import { formField } from './field.ts'
import { linesOf, type RawHeaders } from './headers.ts'
import { frame } from './identity.ts'
import type { DerivePolicy } from './policy.ts'
import type { Millis } from './record.ts'

/**
 * A key for a request that came without one: SHA-256, base64url, over the caller and what the policy names (contract §4).
 * `caller` is what `readCaller` gave; `now`, the store's time, counts where the policy has a bucket.
 *
 * null: the key is missing, since the request lacks a part that tells it apart. A header, a field or a pointed-at value is
 * absent, null or blank, a field or a member on the way there is named twice, or the body is no form or no JSON. One key for
 * all such requests would answer the one with what the other did.
 */
export function deriveKey(
  headers: RawHeaders,
  body: Buffer,
  caller: readonly (string | null)[],
  policy: DerivePolicy,
  now: Millis,
): string | null {
  const json = policy.json.length > 0 ? jsonText(headers, body) : null
  const values = policy.json.map((pointer) => (json === null ? null : valueAt(json, pointer)))
  const fields = policy.form.map((name) => fieldAt(headers, body, name))
  const lines = policy.headers.map((name) => linesFramed(headers, name))
  const telling = [...values, ...fields, ...lines]
  if (telling.includes(null)) return null
  const bucket = policy.bucket === null ? null : String(Math.floor(now / policy.bucket))
  return hash('sha256', frame(['derived/1', frame(caller), ...telling, bucket]), 'base64url')
}

/**
 * RFC 8785 text; as it is written where that would lose information, which is never the RFC 8785 text of another value.
 */
function valueAt(json: string, pointer: string): string | null {
  const found = resolvePointer(json, pointer)
  if (found.kind !== 'literal') return null
  const value = canonicalJson(Buffer.from(found.literal))?.toString() ?? found.literal
  return value === 'null' || /^"\s*"$/.test(value) ? null : value
}

/** Begins as no JSON text does. */
function fieldAt(headers: RawHeaders, body: Buffer, name: string): string | null {
  const field = formField(headers, body, name)
  return field.kind === 'value' && field.value.trim() !== '' ? `form:${field.value}` : null
}

function linesFramed(headers: RawHeaders, name: string): string | null {
  const lines = linesOf(headers, name)
  return lines.some((line) => line.trim() !== '') ? frame(lines) : null
}
