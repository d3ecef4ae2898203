import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import type { Test } from 'tap'
import { parse } from 'yaml'
import { command, type Said } from '../support/commands.ts'
import { tempDir } from '../support/e2e.ts'

/** Writes a description into a temporary folder of its own. */
export function descriptionFile(t: Test, text: string | Uint8Array, name = 'api.yaml'): string {
  const file = join(tempDir(t), name)
  writeFileSync(file, text)
  return file
}

/** Runs `routes from` on a description. */
export async function drafted(t: Test, text: string, name?: string): Promise<Said> {
  return command(['routes', 'from', descriptionFile(t, text, name)])
}

/** A description with these paths, as YAML below `paths:`. */
export function withPaths(paths: string, more = ''): string {
  return `openapi: 3.1.0\ninfo: { title: T, version: "1" }\n${more}\npaths:\n${paths
    .trimEnd()
    .split('\n')
    .map((line) => `  ${line}\n`)
    .join('')}`
}

// What a description is made of.
export type Any = any

export interface Overlay {
  readonly overlay: string
  readonly info: { readonly title: string; readonly version: string }
  readonly actions: readonly { readonly target: string; readonly update: Any }[]
}

export const CONFIG = `upstream: { url: http://127.0.0.1:3000 }
problems: { baseUrl: "https://docs.example.com/problems/" }
unmatched: pass
`

/** Runs `routes overlay` on a description, with these routes. */
export async function overlaid(t: Test, api: string, routes: string): Promise<Said> {
  const config = descriptionFile(t, CONFIG + routes, 'proxy.yaml')
  return command(['routes', 'overlay', descriptionFile(t, api), '--config', config])
}

/** The description with the overlay applied; each action must find its target. */
export async function applied(
  t: Test,
  api: string,
  routes: string,
): Promise<{ api: Any; overlay: Overlay; err: string }> {
  const { code, out, err } = await overlaid(t, api, routes)
  if (code !== 0) throw new Error(err)
  const overlay = parse(out) as Overlay
  const made = parse(api)
  for (const { target, update } of overlay.actions) {
    let place: Any = made
    for (const [, name, index] of target.matchAll(/\['((?:[^'\\]|\\.)*)'\]|\[(\d+)\]/g))
      place = place[index ?? (name as string).replaceAll(/\\(.)/g, '$1')]
    merge(place, update)
  }
  return { api: made, overlay, err }
}

/** As an update of the OpenAPI Overlay Specification merges: lists are appended to. */
function merge(place: Any, update: Any): void {
  for (const [name, value] of Object.entries<Any>(update))
    if (Array.isArray(place[name])) place[name].push(...value)
    else if (typeof place[name] === 'object') merge(place[name], value)
    else place[name] = value
}

export const EXAMPLE = new URL('../../examples/adoption/openapi.yaml', import.meta.url).pathname

/** Routes for the example. */
export const ROUTES = `routes:
  - name: payments
    match: { methods: [POST], path: /v1/payments }
    key: required
    profile: strict
    scope: { caller: "header:authorization" }
    statusHeader: true
    ttl: 7d
  - { name: search, match: { path: /v1/payments/search }, key: ignored }
  - { name: change, match: { methods: [PATCH], path: "/v1/payments/:id" }, key: required }
  - { name: evidence, match: { path: "/v1/payments/:id/evidence" }, key: { from: ["header:x-idempotency-key"] } }
  - { name: orders, match: { path: "/v1/webhooks/*" }, mode: shadow }
`

/** A description of what cannot be merged, and of paths that are hard to name. */
export const AWKWARD = withPaths(
  `/a:
  parameters: [ { $ref: "#/components/parameters/Key" } ]
  post:
    responses:
      "200": { $ref: "#/components/responses/Done" }
      "201": { description: d, headers: { idempotent-replayed: { schema: { type: string } } } }
      "400": { $ref: "#/components/responses/Done" }
      "409": { description: own, content: { application/problem+json: { schema: { type: object } } } }
      "2XX": { description: some }
      default: { description: else }
      "500": { description: down }
      "503": { description: busy }
      "429": { description: slow }
/shared: { $ref: "#/components/pathItems/One" }
/again: { $ref: "#/components/pathItems/One" }
"/it's/{a b}": { parameters: [ { name: a b, in: path, required: true, schema: { type: string } } ], post: { responses: { "200": { description: d } } } }`,
  `components:
  schemas: { IdempotencyProblem: { type: string } }
  headers: { IdempotentReplayed: { schema: { type: string } }, IdempotentReplayed2: { schema: { type: string } } }
  parameters: { Key: { name: Idempotency-Key, in: header, schema: { type: string } } }
  responses: { Done: { description: d } }
  pathItems: { One: { post: { responses: { "200": { description: d } } } } }`,
)

export const AWKWARD_ROUTES =
  'routes: [ { name: a, match: { path: "/*" }, key: required, outcomes: [{ status: 503, when: { /done: true }, outcome: store }] } ]'
