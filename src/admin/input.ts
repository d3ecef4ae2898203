import { Value } from 'typebox/value'
import {
  filterLines,
  firstOf,
  hopByHop,
  isFieldName,
  isFieldValue,
  isOwnOnResponses,
} from '../core/headers.ts'
import type { StoredResponse } from '../core/record.ts'
import { type Resolving, SCHEMAS, type SchemaName } from './schemas.ts'

const { STATUS_CODES } = process.getBuiltinModule('node:http')

export type Input<T> =
  | { readonly ok: true; readonly value: T }
  | { readonly ok: false; readonly detail: string }

/** `body` as the schema of that name has it, or what is wrong with it: names of members, never their values. */
export function read<T>(name: SchemaName, body: unknown): Input<T> {
  const schema = SCHEMAS[name]
  if (Value.Check(schema, body)) return { ok: true, value: body as T }
  const [error] = Value.Errors(schema, body)
  const example =
    error?.instancePath === '/response/headers' ? ', such as [["Content-Type","application/json"]]' : ''
  return {
    ok: false,
    detail: `${error?.instancePath || 'the body'}: ${error?.message ?? 'not as described'}${example}`,
  }
}

/** Framing and the proxy's own lines are no part of what is stored (contract §8). */
function isStored(name: string): boolean {
  return name !== 'content-length' && name !== 'trailer' && !isOwnOnResponses(name)
}

/** What retries will be answered, as somebody wrote it down. */
export function responseOf({ outcome, response }: Resolving): Input<StoredResponse | null> {
  if (outcome === 'retryable')
    return response === undefined
      ? { ok: true, value: null }
      : { ok: false, detail: '/response: nothing was done, so there is none; leave it out' }
  if (response === undefined)
    return {
      ok: false,
      detail: '/response: what retries will be answered is needed: {"status", "headers", "body"}',
    }
  const { status, headers = [], body = '', bodyBase64 } = response
  if (bodyBase64 !== undefined && response.body !== undefined)
    return { ok: false, detail: '/response: body and bodyBase64; one of them is allowed' }
  const bytes = bodyBase64 === undefined ? Buffer.from(body) : Buffer.from(bodyBase64, 'base64')
  // What lost its end on the way here is decoded all the same, to less.
  if (bodyBase64 !== undefined && bytes.toString('base64') !== bodyBase64)
    return { ok: false, detail: '/response/bodyBase64: not base64 as RFC 4648 has it, with its padding' }
  if (bytes.length > 0 && [204, 205, 304].includes(status))
    return { ok: false, detail: `/response/body: an answer with status ${status} has none` }
  const wrong = headers.findIndex(
    ([name = '', value = '']) => !isFieldName(name) || !isFieldValue(value) || value !== value.trim(),
  )
  if (wrong >= 0) return { ok: false, detail: `/response/headers/${wrong}: not a header line` }
  const lines = headers.flat()
  const hop = hopByHop(lines)
  const kept = filterLines(lines, (name) => !hop.has(name) && isStored(name))
  if (firstOf(kept, 'date') === null) kept.push('Date', new Date().toUTCString())
  const reason = STATUS_CODES[status] ?? ''
  return { ok: true, value: { status, reason, headers: kept, body: bytes, trailers: [] } }
}
