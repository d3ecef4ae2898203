import type { FastifyContextConfig } from 'fastify'
import { type TSchema, Type } from 'typebox'
import type { Config } from '../config/config.ts'
import { effective } from '../config/written.ts'
import { Once } from '../runtime/scheduling.ts'
import { type AdminRoutes, adminApp, isOptionalBody } from './app.ts'
import { type ChangePorts, changeRoutes } from './changes.ts'
import { RecordLookup } from './lookup.ts'
import { PROBLEMS, type ProblemCode } from './problems.ts'
import { type RecordPorts, recordRoutes } from './records.ts'
import { type ReportPorts, reportRoutes } from './report.ts'
import { named, record } from './schemas.ts'

/** What the API needs from the process. `config` is read on each request: a reload replaces it. */
export interface AdminPorts extends RecordPorts, ChangePorts, ReportPorts {
  readonly config: Config
  readonly records: RecordPorts['records'] & ChangePorts['records']
  readonly store: RecordPorts['store'] & ChangePorts['store']
  readonly version: string
}

/** Who may use the API, and its ports. The first request creates the application itself. */
export interface AdminAccess {
  /** The tokens in force: several during a rotation. */
  readonly tokens: () => readonly string[]
  /** Names allowed in `Host`, without a port, in lower case. */
  readonly hosts: readonly string[]
  readonly ports: Omit<AdminPorts, 'subjects'>
}

/** Everything below `/v1` (contract §12). */
export const adminApi: AdminRoutes<AdminPorts> = async (app, options) => {
  await app.register(recordRoutes, options)
  await app.register(changeRoutes, options)
  await app.register(reportRoutes, options)
  const configuration = Type.Record(Type.String(), Type.Unknown(), {
    $id: 'Configuration',
    description: 'As a configuration file, defaults included; secrets read `***`.',
  })
  app.get(
    '/v1/config',
    { schema: { summary: 'The configuration in force.', response: { 200: configuration } } },
    async () => effective(options.ports.config),
  )
  const description = Type.Record(Type.String(), Type.Unknown(), { $id: 'Description' })
  const described = new Once(() => describe(options.ports))
  app.get(
    '/v1/openapi.json',
    { schema: { summary: 'This description.', response: { 200: description } } },
    () => described.get(),
  )
}

/** The OpenAPI 3.1 document, from a second registration of the routes; the package is loaded on first use. */
async function describe(ports: AdminPorts): Promise<Record<string, unknown>> {
  const { default: swagger } = await import('@fastify/swagger')
  const app = adminApp({ onBug: () => {} })
  const schemas: Record<string, TSchema> = { Problem: problem }
  app.addHook('onRoute', ({ schema }) => {
    const named = [schema?.body, ...Object.values(schema?.response ?? {})]
    for (const one of named as ((TSchema & { readonly $id?: string }) | undefined)[])
      if (one?.$id !== undefined) schemas[one.$id] = one
  })
  await app.register(swagger, {
    openapi: {
      openapi: '3.1.0',
      info: { title: 'idempotency-proxy: admin API', version: ports.version },
      security: [{ token: [] }],
      components: { securitySchemes: { token: { type: 'http', scheme: 'bearer' } }, schemas },
    },
    transform: ({ schema: { body, response, ...schema }, url, route: { config } }) => ({
      url,
      schema: {
        ...schema,
        ...(body === undefined
          ? {}
          : { body: { content: { 'application/json': { schema: reference(body) } } } }),
        response: responsesOf(response as Record<string, TSchema>, body as TSchema | undefined, config ?? {}),
      },
    }),
  })
  await app.register(adminApi, { ports })
  await app.ready()
  const document = app.swagger() as unknown as Described
  // The package marks every body as required.
  for (const { requestBody } of Object.values(document.paths).flatMap((path) => Object.values(path))) {
    const schema = schemas[requestBody?.content['application/json'].schema.$ref.split('/').at(-1) ?? '']
    if (requestBody && schema) requestBody.required = !isOptionalBody(schema)
  }
  return document
}

interface Described extends Record<string, unknown> {
  readonly paths: Readonly<Record<string, Readonly<Record<string, { readonly requestBody?: RequestBody }>>>>
}
interface RequestBody {
  required: boolean
  readonly content: { readonly 'application/json': { readonly schema: ReturnType<typeof reference> } }
}

const ALWAYS: readonly ProblemCode[] = ['unauthorized', 'origin_not_allowed', 'host_not_allowed']
const OF_BODIES: readonly ProblemCode[] = ['invalid_request', 'unsupported_media_type', 'body_too_large']

const problem = named('Problem', {
  type: Type.String(),
  title: Type.String(),
  status: Type.Integer(),
  detail: Type.String(),
  code: Type.String(),
  instance: Type.Optional(record.properties.id),
  record: Type.Optional(Type.Unsafe(reference(record))),
  version: Type.Optional(
    Type.Integer({
      description: 'Of a record that cannot be read; the value of `If-Match` that deletes it.',
    }),
  ),
})

function reference(schema: unknown): { readonly $ref: string } {
  return { $ref: `#/components/schemas/${(schema as { readonly $id: string }).$id}` }
}

/** OpenAPI responses: the success, and the problems grouped by status. */
function responsesOf(
  success: Readonly<Record<string, TSchema>>,
  body: TSchema | undefined,
  { refuses = [], hasETag }: FastifyContextConfig,
): object {
  const responses: Record<string, object> = {}
  for (const [status, schema] of Object.entries(success))
    responses[status] =
      Number(status) === 204
        ? { type: 'null', description: 'Done.' }
        : {
            description: 'Done.',
            ...(hasETag ? { headers: { ETag: { type: 'string' } } } : {}),
            content: { 'application/json': { schema: reference(schema) } },
          }
  const codes = new Set([...ALWAYS, ...refuses, ...(body === undefined ? [] : OF_BODIES)])
  const byStatus = Object.groupBy(codes, (code) => PROBLEMS[code].status)
  for (const [status, codes] of Object.entries(byStatus))
    responses[status] = {
      description: codes.map((code) => `${code}: ${PROBLEMS[code].title}.`).join(' '),
      content: { 'application/problem+json': { schema: reference(problem) } },
    }
  return responses
}

/** The ports of a running proxy, with a lookup that follows reloads. */
export function withLookup(ports: Omit<AdminPorts, 'subjects'>): AdminPorts {
  let subjects = new RecordLookup(ports.config)
  return {
    ...ports,
    get config() {
      return ports.config
    },
    get subjects() {
      if (!subjects.isOf(ports.config)) subjects = new RecordLookup(ports.config)
      return subjects
    },
  }
}
