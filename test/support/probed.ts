import { once } from 'node:events'
import type { ServerResponse } from 'node:http'
import canonicalize from 'canonicalize'
import { linesOf } from '../../src/core/headers.ts'
import type { Profile } from '../../src/probe/cases.ts'
import { type Seen, type UpstreamStub, upstreamStub } from './upstream.ts'

/** Mistakes that the API can make, one at a time. */
export type Fault =
  | 'forgets'
  | 'loses-status'
  | 'writes-anew'
  | 'loses-headers'
  | 'marks-nothing'
  | 'ignores-payload'
  | 'races'
  | 'forgets-leavers'
  | 'shares-no-key'
  | 'shares-empty-key'
  | 'fails-on-empty-key'
  | 'truncates'
  | 'refuses-quotes'
  | 'keeps-quotes'
  | 'shares-callers'
  | 'shares-paths'
  | 'compares-bytes'
  | 'sticks-on-error'
  | 'frees-after-5xx'

interface Kept {
  readonly content: string
  answer: { readonly status: number; readonly headers: Record<string, string>; readonly body: string } | null
}

const CODES: Readonly<Record<string, string>> = {
  '400': 'idempotency_key_invalid',
  '409': 'idempotency_key_in_progress',
  '422': 'idempotency_key_reused',
}

/** What the API waits for, so that a case meets what it is about. */
export interface Holding {
  /** The third request answers once this many have arrived. */
  readonly until?: number
  /** The third request answers once its client has left. */
  readonly left?: true
}

/**
 * An API that keeps the promises of the profile but for one mistake: POST /orders and /refunds execute, GET /count counts, GET /orders
 * lists. It refuses negative amounts, and fails on 500.
 */
export async function orderApi(
  profile: Profile,
  fault: Fault | null = null,
  holding: Holding = {},
): Promise<UpstreamStub & { readonly orders: string[] }> {
  const orders: string[] = []
  const records = new Map<string, Kept>()
  let posts = 0
  const gate = Promise.withResolvers<void>()
  const stub = await upstreamStub(async (seen, response) => {
    if (seen.method === 'GET') {
      response.writeHead(200, { 'Content-Type': 'application/json' })
      response.end(JSON.stringify(seen.target === '/count' ? orders.length : { orders }))
      return
    }
    const isHeld = ++posts >= 3
    if (posts === holding.until) gate.resolve()
    const arrivals = holding.until !== undefined && isHeld ? gate.promise : Promise.resolve()
    const left = holding.left && posts === 3 ? once(response, 'close') : Promise.resolve()
    const refuse = (status: 400 | 409 | 422): void => {
      const shown = status === 422 && profile === 'stripe' ? 400 : status
      response.writeHead(shown, { 'Content-Type': 'application/problem+json' })
      response.end(JSON.stringify(profile === 'ours' ? { code: CODES[status] } : {}))
    }
    const execute = (): NonNullable<Kept['answer']> => {
      const { amount } = JSON.parse(payload) as { amount: number }
      // A replay has the date of the first response.
      const type = { 'Content-Type': 'application/json', Date: new Date().toUTCString() }
      if (amount >= 0) orders.push(seen.target)
      if (amount < 0) return { status: 400, headers: type, body: '{"error": "negative"}' }
      if (amount === 500) return { status: 500, headers: type, body: '{"error": "failed"}' }
      const location = `${seen.target}/${orders.length}`
      return { status: 201, headers: { ...type, Location: location }, body: `{"id": ${orders.length}}` }
    }
    const key = keyOf(seen, fault)
    if (key === 'fails') return void response.destroy()
    if (key === 'refused') return refuse(400)
    const scope = [
      fault === 'shares-callers' ? '' : linesOf(seen.headers, 'authorization').join(),
      // By Stripe's rules, a key on another path is misuse.
      profile === 'stripe' || fault === 'shares-paths' ? '' : seen.target,
      key,
    ].join('\n')
    const payload = seen.body.toString()
    const content = [
      fault === 'shares-paths' ? '' : seen.target,
      fault === 'compares-bytes' ? payload : canonicalize(JSON.parse(payload)),
    ].join('\n')
    const known = key === null || fault === 'forgets' ? undefined : records.get(scope)
    if (fault === 'races') await arrivals
    if (known !== undefined) {
      if (fault !== 'ignores-payload' && known.content !== content) return refuse(422)
      if (known.answer === null) return refuse(409)
      return replay(known.answer, fault, response)
    }
    const record: Kept = { content, answer: null }
    if (key !== null) records.set(scope, record)
    await arrivals
    const answer = execute()
    await left
    if (fault === 'forgets-leavers' && response.destroyed) records.delete(scope)
    else if (fault === 'frees-after-5xx' && answer.status === 500) records.delete(scope)
    else if (!(fault === 'sticks-on-error' && answer.status === 400)) record.answer = answer
    response.writeHead(answer.status, answer.headers).end(answer.body)
  })
  return Object.assign(stub, { orders })
}

/** Null: there is none. */
function keyOf({ headers }: Seen, fault: Fault | null): string | null {
  const [line] = linesOf(headers, 'idempotency-key')
  if (line === undefined) return fault === 'shares-no-key' ? 'undefined' : null
  if (line === '') {
    if (fault === 'fails-on-empty-key') return 'fails'
    return fault === 'shares-empty-key' ? '' : 'refused'
  }
  if (fault === 'refuses-quotes' && line.startsWith('"')) return 'refused'
  const key = fault === 'keeps-quotes' ? line : line.replaceAll('"', '')
  if (fault === 'truncates') return key.slice(0, 255)
  return key.length > 255 ? 'refused' : key
}

function replay(
  { status, headers, body }: NonNullable<Kept['answer']>,
  fault: Fault | null,
  response: ServerResponse,
): void {
  const { Location: _, ...fewer } = headers
  response.writeHead(fault === 'loses-status' ? 200 : status, {
    ...(fault === 'loses-headers' ? fewer : headers),
    ...(fault === 'marks-nothing' ? {} : { 'Idempotent-Replayed': 'true' }),
  })
  response.end(fault === 'writes-anew' ? JSON.stringify(JSON.parse(body)) : body)
}

/** Every option by which a case runs, for a small shop. */
export const PROBE_WORDS = [
  ['--body', '{"amount":1,"currency":"eur"}'],
  ['--header', 'Authorization: Bearer alice'],
  ['--other-caller', 'Authorization: Bearer bob'],
  ['--other-path', '/refunds'],
  ['--error-body', '{"amount":-1}'],
  ['--failure-body', '{"amount":500}'],
  ['--format', 'json'],
].flat()
