import { hash } from 'node:crypto'
import { linesOf, type RawHeaders } from './headers.ts'
import { frame } from './identity.ts'
import { canonical, parseLossless } from './json.ts'
import { jsonTextOf, pointedAt } from './pointed.ts'
import type { DerivePolicy } from './policy.ts'
import type { Millis } from './record.ts'

/**
 * A key for a request that came without one: SHA-256, base64url, over the caller and what the policy names (contract §4).
 * `caller` is what `readCaller` gave; `now`, the store's time, counts where the policy has a bucket.
 *
 * null: the key is missing, since the request lacks a part that tells it apart. A header or a pointed-at value is absent,
 * null or blank, a member on the way there is named twice, or the body is no JSON. One key for all such requests would
 * answer the one with what the other did.
 */
export function deriveKey(
  headers: RawHeaders,
  body: Buffer,
  caller: readonly (string | null)[],
  policy: DerivePolicy,
  now: Millis,
): string | null {
  const json = policy.json.length > 0 ? jsonTextOf(headers, body) : null
  const values = policy.json.map((pointer) => (json === null ? null : valueAt(json, pointer)))
  const lines = policy.headers.map((name) => linesFramed(headers, name))
  const telling = [...values, ...lines]
  if (telling.includes(null)) return null
  const bucket = policy.bucket === null ? null : String(Math.floor(now / policy.bucket))
  return hash('sha256', frame(['derived/1', frame(caller), ...telling, bucket]), 'base64url')
}

/**
 * RFC 8785 text; as it is written where that would lose information, which is never the RFC 8785 text of another value.
 */
function valueAt(json: string, pointer: string): string | null {
  const found = pointedAt(json, pointer)
  if (found.kind !== 'literal') return null
  const node = parseLossless(found.literal)
  const value = node === null ? found.literal : canonical(node)
  return value === 'null' || /^"\s*"$/.test(value) ? null : value
}

function linesFramed(headers: RawHeaders, name: string): string | null {
  const lines = linesOf(headers, name)
  return lines.some((line) => line.trim() !== '') ? frame(lines) : null
}
