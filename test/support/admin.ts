import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { Ajv2020 } from 'ajv/dist/2020.js'
import ajvFormats from 'ajv-formats'
import type { Test } from 'tap'
import { type AdminPorts, adminApi } from '../../src/admin/api.ts'
import { adminApp } from '../../src/admin/app.ts'
import type { FullView, RecordView } from '../../src/admin/schemas.ts'
import { tempDir } from './e2e.ts'

export const TOKEN = 'right-token-0123456789'

export interface AdminReply {
  readonly status: number
  readonly headers: Headers
  readonly text: string
  readonly json: Record<string, unknown>
  /** `code` of a problem response. */
  readonly code: string | null
}

export interface Asking {
  readonly method?: string
  readonly body?: unknown
  readonly headers?: Readonly<Record<string, string>>
  readonly token?: string | null
}

interface Described {
  readonly paths: Record<
    string,
    Record<
      string,
      { requestBody?: object; responses: Record<string, { content?: Record<string, { schema: object }> }> }
    >
  >
}

/** Responses seen that the description lists, such as `GET /v1/records 200`. */
export class Exercised {
  readonly #seen = new Set<string>()
  #ajv: Ajv2020 | null = null
  #described: Described | null = null

  read(described: Described): void {
    this.#described = described
    this.#ajv = new Ajv2020({ strict: false })
    const formats = ajvFormats as unknown as { default?: (ajv: Ajv2020) => void } & ((ajv: Ajv2020) => void)
    ;(formats.default ?? formats)(this.#ajv)
    this.#ajv.addSchema({ ...described, $id: 'api' })
  }

  get operations(): { method: string; path: string; hasBody: boolean }[] {
    return Object.entries(this.#described?.paths ?? {}).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, { requestBody }]) => ({
        method: method.toUpperCase(),
        path,
        hasBody: requestBody !== undefined,
      })),
    )
  }

  /** Every operation with every status. */
  get all(): string[] {
    return Object.entries(this.#described?.paths ?? {}).flatMap(([path, methods]) =>
      Object.entries(methods).flatMap(([method, { responses }]) =>
        Object.keys(responses).map((status) => `${method.toUpperCase()} ${path} ${status}`),
      ),
    )
  }

  get missing(): string[] {
    return this.all.filter((one) => !this.#seen.has(one))
  }

  /** Asserts that the response is described and that its JSON matches the schema. */
  hold(t: Test, method: string, path: string, { status, headers, text, json }: AdminReply): void {
    const template = Object.keys(this.#described?.paths ?? {}).find((one) =>
      new RegExp(`^${one.replace('{id}', '[\\w-]{43}')}$`).test(path),
    )
    const operation =
      template === undefined ? undefined : this.#described?.paths[template]?.[method.toLowerCase()]
    if (template === undefined || operation === undefined) return
    const answer = operation.responses[status]
    if (answer === undefined) return void t.fail(`${method} ${template} ${status} is not described`)
    this.#seen.add(`${method} ${template} ${status}`)
    const [[type, content] = []] = Object.entries(answer.content ?? {})
    if (type === undefined || content === undefined) return void t.equal(text, '')
    t.equal(headers.get('content-type'), type)
    const reference = (content.schema as { $ref: string }).$ref
    const validate = this.#ajv?.getSchema(`api${reference}`)
    if (validate?.(json) !== true)
      t.fail(`${method} ${template} ${status}: ${JSON.stringify(validate?.errors)}`)
  }
}

/** A token file, and the configuration that names it. */
export function adminYaml(t: Test, more = ''): string {
  const file = join(tempDir(t), 'token')
  writeFileSync(file, `${TOKEN}\n`)
  return `admin: { listen: "127.0.0.1:0", tokenFile: ${file}${more} }`
}

/** Sends a request to the admin listener of a proxy. */
export async function ask(
  { adminUrl }: { readonly adminUrl: string },
  path: string,
  { method = 'GET', body, headers = {}, token = TOKEN }: Asking = {},
): Promise<AdminReply> {
  const response = await fetch(`${adminUrl}${path}`, {
    method,
    headers: {
      ...(token === null ? {} : { authorization: `Bearer ${token}` }),
      ...(body === undefined ? {} : { 'content-type': 'application/json' }),
      ...headers,
    },
    body: body === undefined ? null : typeof body === 'string' ? body : JSON.stringify(body),
  })
  const text = await response.text()
  const json = text === '' ? {} : (JSON.parse(text) as Record<string, unknown>)
  const code = (json['code'] as string | undefined) ?? null
  return { status: response.status, headers: response.headers, text, json, code }
}

export function recordOf({ json }: AdminReply): RecordView {
  return json as unknown as RecordView
}

export function fullOf({ json }: AdminReply): FullView {
  return json as unknown as FullView
}

export function linesOf(file: string): Record<string, unknown>[] {
  return readFileSync(file, 'utf8')
    .split('\n')
    .slice(0, -1)
    .map((line) => JSON.parse(line) as Record<string, unknown>)
}

export interface AdminAnswer {
  readonly status: number
  readonly headers: Readonly<Record<string, unknown>>
  readonly body: object | null
}

export type Inject = (
  method: string,
  url: string,
  ifMatch?: string | null,
  body?: unknown,
) => Promise<AdminAnswer>

/** Sends a request to the API without a socket. */
export async function injecting(ports: AdminPorts, onBug: (error: unknown) => void): Promise<Inject> {
  const app = adminApp({ onBug })
  await app.register(adminApi, { ports })
  return async (method, url, ifMatch = null, body) => {
    const reply = await app.inject({
      method: method as 'GET',
      url,
      headers: {
        ...(ifMatch === null ? {} : { 'if-match': ifMatch }),
        ...(body === undefined ? {} : { 'content-type': 'application/json' }),
      },
      ...(body === undefined ? {} : { payload: JSON.stringify(body) }),
      remoteAddress: '::1',
    })
    const text = reply.body
    return { status: reply.statusCode, headers: reply.headers, body: text === '' ? null : JSON.parse(text) }
  }
}
