import type { Descriptors, RpcMethod } from '../core/rpc/descriptors.ts'
import { comment } from './openapi/draft.ts'

/** Longest name of a route (docs/configuration.md). */
const NAME_MOST = 64

/** Fields that hold a key (https://google.aip.dev/155, and by their names). */
const KEY_FIELDS = ['requestId', 'idempotencyKey']

/** The lines of a configuration drafted from a descriptor set, or null if no method of it is to be protected. `file`: the set's, as written. */
export function draftOfCalls({ methods }: Descriptors, file: string, upstream: string): string[] | null {
  const all = [...methods.values()]
  const unary = all.filter(({ streams }) => streams === 'none')
  const found = unary.filter(({ safety }) => safety === 'unknown')
  if (found.length === 0) return null
  const names = new Set<string>()
  return [
    ...comment(
      '',
      `Routes for idempotency-proxy, drafted from ${file.slice(file.lastIndexOf('/') + 1)} by: idempotency-proxy routes from`,
      'A draft: DECIDE marks what a person must decide. Then run: idempotency-proxy check FILE',
      `${found.length} of ${all.length} methods; of the others ${unary.length - found.length} declared idempotent (idempotency_level) and ${all.length - unary.length} streaming: they pass through, unprotected.`,
    ),
    '',
    'listen: { address: "127.0.0.1:8080", http2: true }',
    '',
    'upstream:',
    '  # DECIDE: where the service listens.',
    `  url: ${JSON.stringify(upstream)}`,
    '  http2: true',
    '',
    `grpc: { descriptors: ${JSON.stringify(file)} }`,
    '',
    'defaults:',
    '  # DECIDE: enforce protects at once; shadow forwards everything and reports what enforce would do (docs/shadow.md).',
    '  mode: enforce',
    '  # DECIDE: how long an answer is replayed; longer than any client keeps retrying.',
    '  ttl: 24h',
    '  # DECIDE: what identifies a caller (docs/keys.md).',
    '  scope: { caller: "header:authorization" }',
    '',
    'routes:',
    ...found.flatMap((method) => [...routeOf(method, names), '']),
  ]
}

function routeOf({ name, fields }: RpcMethod, names: Set<string>): string[] {
  const label = uniqueName(name, names)
  const field = KEY_FIELDS.find((one) => fields.includes(one))
  const from = ['header:idempotency-key', 'header:x-idempotency-key', `json:/${field}`]
  return [
    ...comment(
      '  ',
      'Calls without a key pass through unprotected. DECIDE: required, once clients send one.',
      ...(field === undefined ? [] : [`Its request has the field ${field}.`]),
    ),
    `  - name: ${JSON.stringify(label)}`,
    `    match: { grpc: ${JSON.stringify(name)} }`,
    field === undefined
      ? '    key: optional'
      : `    key: { presence: optional, from: ${JSON.stringify(from)} }`,
  ]
}

/** The last parts of a method's name. */
function uniqueName(name: string, taken: Set<string>): string {
  const base = name
    .replace('/', '.')
    .slice(-NAME_MOST)
    .replace(/^[^A-Za-z0-9]+/, '')
  let unique = base
  for (let n = 2; taken.has(unique) || unique === 'default'; n++)
    unique = `${base.slice(0, NAME_MOST - 4)}-${n}`
  taken.add(unique)
  return unique
}
