import type { IncomingMessage, RequestListener, Server, ServerResponse } from 'node:http'
import Fastify, {
  type FastifyBaseLogger,
  type FastifyInstance,
  type FastifyPluginAsync,
  type FastifySchemaCompiler,
  type FastifyTypeProvider,
  type RawServerDefault,
} from 'fastify'
import type { Static, TObject, TSchema } from 'typebox'
import { Value } from 'typebox/value'
import { CorruptRecord, StoreUnavailable } from '../store/register.ts'
import { AdminProblem, invalid, type ProblemCode, schemaMismatch } from './problems.ts'

/** Infers the types of requests and replies from the route's schemas. */
interface TypeBoxProvider extends FastifyTypeProvider {
  readonly validator: this['schema'] extends TSchema ? Static<this['schema']> : unknown
  readonly serializer: this['schema'] extends TSchema ? Static<this['schema']> : unknown
}

export type AdminApp = FastifyInstance<
  RawServerDefault,
  IncomingMessage,
  ServerResponse,
  FastifyBaseLogger,
  TypeBoxProvider
>

export type AdminRoutes<Ports> = FastifyPluginAsync<
  { readonly ports: Ports },
  RawServerDefault,
  TypeBoxProvider
>

declare module 'fastify' {
  interface FastifyContextConfig {
    /** Served without a token; everything else is behind it. */
    readonly isOpen?: true
    /** Problems besides those that every endpoint has; for the OpenAPI document. */
    readonly refuses?: readonly ProblemCode[]
    /** A success carries an `ETag`. */
    readonly hasETag?: true
  }
}

export interface AppOptions {
  readonly onBug: (error: unknown) => void
  readonly notFound?: string
  /** Throws an {@link AdminProblem} if the request may only use the open paths. */
  readonly authorize?: (request: IncomingMessage) => void
  /** Absent: requests are injected. */
  readonly server?: (listener: RequestListener) => Server
}

/** Enough for a decision that carries a response. */
const MAX_BODY = 8 * 1024 ** 2

/** The Fastify application of the listeners and the command line: everything that all routes share. */
export function adminApp({ onBug, notFound, authorize, server }: AppOptions): AdminApp {
  const app: AdminApp = Fastify({
    // On the command line the route's own limit applies.
    bodyLimit: server === undefined ? Number.MAX_SAFE_INTEGER : MAX_BODY,
    rewriteUrl: literalUrl,
    // Otherwise the router answers long ids itself, before the token is checked.
    routerOptions: { maxParamLength: Number.MAX_SAFE_INTEGER },
    // Otherwise Fastify loads ajv: 50 ms and 10 MB.
    schemaController: { compilersFactory: { buildValidator: unused, buildSerializer: unused } },
    ...(server === undefined ? {} : { serverFactory: server }),
  }).withTypeProvider<TypeBoxProvider>()
  const paths = new Map<string, { pattern: RegExp; methods: string[]; isOpen: boolean }>()
  app.addHook('onRoute', ({ url, method, config }) => {
    const pattern = new RegExp(`^${url.replaceAll('.', '\\.').replace(/:\w+/g, '')}$`)
    const path = paths.get(url) ?? { pattern, methods: [], isOpen: config?.isOpen === true }
    path.methods.push(...[method].flat())
    paths.set(url, path)
  })
  app.addHook('onRequest', async ({ is404, routeOptions, raw, url }, reply) => {
    reply.headers({ 'cache-control': 'no-store', 'x-content-type-options': 'nosniff' })
    const [path = ''] = url.split('?', 1)
    const other = is404 ? [...paths.values()].find(({ pattern }) => pattern.test(path)) : undefined
    const isOpen = other?.isOpen ?? routeOptions.config.isOpen === true
    if (!isOpen) authorize?.(raw)
    if (other !== undefined) {
      const allow = other.methods.join(', ')
      throw new AdminProblem('method_not_allowed', `allowed: ${allow}`, { headers: { allow } })
    }
    if (is404) throw new AdminProblem('not_found', notFound ?? 'see /v1/openapi.json for the endpoints')
    // curl -d '' sends a type without a body.
    if (!hasBody(raw)) delete raw.headers['content-type']
    else if (!isOpen && routeOptions.schema?.body === undefined) throw invalid('this endpoint takes no body')
  })
  app.setNotFoundHandler(() => {})
  app.setErrorHandler((error, _request, reply) => {
    const problem = problemOf(error) ?? new AdminProblem('internal_error', 'see the log')
    if (problem.code === 'internal_error') onBug(error)
    const { body, headers } = problem
    return reply
      .code(body.status)
      .header('content-type', 'application/problem+json')
      .headers(headers)
      .send(body)
  })
  app.removeAllContentTypeParsers()
  app.addContentTypeParser(
    'application/json',
    { parseAs: 'buffer' },
    async (_request: unknown, body: Buffer) => {
      if (body.length === 0) return undefined
      try {
        return JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(body)) as unknown
      } catch {
        throw invalid('the body is not JSON in UTF-8')
      }
    },
  )
  app.setReplySerializer((body) => `${JSON.stringify(body)}\n`)
  app.setValidatorCompiler(validator)
  // The schema does not filter replies; their types enforce it.
  app.setSerializerCompiler(() => JSON.stringify)
  app.addHook('onSend', async (_request, reply) => {
    // JSON has no charset parameter (RFC 8259 §11), which Fastify adds.
    const type = String(reply.getHeader('content-type') ?? '')
    if (/^application\/(?:problem\+)?json;/.test(type)) reply.header('content-type', type.split(';', 1)[0])
  })
  return app
}

function unused(): never {
  throw new Error('TypeBox checks requests')
}

/** Paths match as sent. Encoded ones and absolute URLs could be read in two ways and match nothing. */
function literalUrl({ url = '' }: IncomingMessage): string {
  return /^\/[^%#;?]*(?:\?|$)/.test(url) ? url : '//'
}

function hasBody({ headers }: IncomingMessage): boolean {
  return headers['transfer-encoding'] !== undefined || Number(headers['content-length'] ?? 0) > 0
}

/** Null: a bug. */
function problemOf(error: unknown): AdminProblem | null {
  if (error instanceof AdminProblem) return error
  if (error instanceof StoreUnavailable)
    return new AdminProblem('store_unavailable', error.message, { headers: { 'retry-after': '1' } })
  if (error instanceof CorruptRecord) return new AdminProblem('record_unreadable', error.message)
  const { statusCode = 500, message } = error as { readonly statusCode?: number; readonly message?: string }
  if (statusCode === 413)
    return new AdminProblem('body_too_large', `at most ${MAX_BODY} bytes`, {
      headers: { connection: 'close' },
    })
  if (statusCode === 415)
    return new AdminProblem('unsupported_media_type', 'send Content-Type: application/json')
  return statusCode < 500 ? invalid(message ?? 'the request cannot be read') : null
}

/** TypeBox checks requests. The endpoint reports a missing header, as a separate problem. */
const validator: FastifySchemaCompiler<TSchema> = ({ schema, httpPart }) => {
  if (httpPart === 'querystring') return (query) => ({ value: readQuery(schema as TObject, query) })
  if (httpPart !== 'body') return (value) => ({ value })
  return (sent) => {
    const value = sent === null && isOptionalBody(schema) ? {} : sent
    const detail = schemaMismatch(schema, value)
    return detail === null ? { value } : { error: invalid(detail) }
  }
}

/** A body without required members may be omitted. */
export function isOptionalBody(schema: TSchema): boolean {
  return (('required' in schema ? schema.required : []) as readonly string[]).length === 0
}

interface Parameter {
  readonly type: string
  readonly description: string
  readonly minimum?: number
  readonly maximum?: number
}

/** @throws {AdminProblem} */
function readQuery({ properties }: TObject, query: Readonly<Record<string, unknown>>): object {
  const members = Object.entries(query).map(([name, text]) => {
    if (!Object.hasOwn(properties, name))
      throw invalid(`?${name}: unknown; known are ${Object.keys(properties).join(', ')}`)
    if (typeof text !== 'string') throw invalid(`?${name}: given more than once`)
    const schema = properties[name] as TSchema & Parameter
    const value = parsed(schema.type, text)
    if (!Value.Check(schema, value)) throw invalid(`?${name}: ${wanted(schema)}`)
    return [name, value]
  })
  return Object.fromEntries(members) as object
}

function parsed(type: string, text: string): unknown {
  if (type === 'integer' && /^\d+$/.test(text)) return Number(text)
  if (type === 'boolean' && /^(?:true|false)$/.test(text)) return text === 'true'
  return text
}

function wanted({ type, minimum, maximum, description }: Parameter): string {
  if (type === 'integer') return `a whole number, ${minimum} to ${maximum}`
  return type === 'boolean' ? 'true or false' : description
}
