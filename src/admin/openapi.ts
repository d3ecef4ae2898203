import { PROBLEMS, type ProblemCode } from './answers.ts'
import { ENDPOINTS, type Endpoint } from './endpoints.ts'
import { SCHEMAS, type SchemaName } from './schemas.ts'

const COMMON: readonly ProblemCode[] = ['unauthorized', 'origin_not_allowed', 'host_not_allowed']
const OF_BODIES: readonly ProblemCode[] = ['invalid_request', 'unsupported_media_type', 'body_too_large']

/** The endpoint that answers with {@link description}. */
export const DESCRIPTION: Pick<Endpoint, 'method' | 'path' | 'summary' | 'gives' | 'refuses'> = {
  method: 'GET',
  path: '/v1/openapi.json',
  summary: 'This description.',
  gives: 'Description',
  refuses: [],
}

export function refusalsOf({ refuses, body }: Pick<Endpoint, 'refuses' | 'body'>): ProblemCode[] {
  return [...new Set([...COMMON, ...refuses, ...(body === undefined ? [] : OF_BODIES)])]
}

/** The admin API in OpenAPI 3.1, made of what the code itself runs by. */
export function description(version: string): object {
  const paths: Record<string, Record<string, object>> = {}
  for (const endpoint of [...ENDPOINTS, DESCRIPTION]) {
    paths[endpoint.path] ??= {}
    Object.assign(paths[endpoint.path] as object, { [endpoint.method.toLowerCase()]: operation(endpoint) })
  }
  return {
    openapi: '3.1.0',
    info: { title: 'idempotency-proxy: admin API', version },
    security: [{ token: [] }],
    paths,
    components: {
      securitySchemes: { token: { type: 'http', scheme: 'bearer' } },
      schemas: SCHEMAS,
    },
  }
}

type Described = Pick<Endpoint, 'path' | 'summary' | 'gives' | 'refuses'> & Partial<Endpoint>

function operation(endpoint: Described): object {
  const { path, summary, query = [], body, ifMatch, gives, tagged } = endpoint
  const parameters = [
    ...(path.includes('{id}')
      ? [{ name: 'id', in: 'path', required: true, schema: { type: 'string' } }]
      : []),
    ...query.map((one) => ({ ...one, in: 'query' })),
    ...(ifMatch === undefined
      ? []
      : [{ name: 'If-Match', in: 'header', required: true, schema: { type: 'string' } }]),
  ]
  const responses: Record<string, object> =
    gives === null
      ? { 204: { description: 'Done.' } }
      : {
          200: {
            description: 'Done.',
            ...(tagged === undefined ? {} : { headers: { ETag: { schema: { type: 'string' } } } }),
            content: { 'application/json': { schema: reference(gives) } },
          },
        }
  for (const [status, codes] of byStatus(refusalsOf(endpoint)))
    responses[status] = {
      description: codes.map((code) => `${code}: ${PROBLEMS[code].title}.`).join(' '),
      content: { 'application/problem+json': { schema: reference('Problem') } },
    }
  return {
    summary,
    ...(parameters.length === 0 ? {} : { parameters }),
    ...(body === undefined
      ? {}
      : {
          requestBody: {
            required: !body.optional,
            content: { 'application/json': { schema: reference(body.schema) } },
          },
        }),
    responses,
  }
}

function byStatus(codes: readonly ProblemCode[]): Map<string, ProblemCode[]> {
  const found = new Map<string, ProblemCode[]>()
  for (const code of codes) {
    const status = String(PROBLEMS[code].status)
    found.set(status, [...(found.get(status) ?? []), code])
  }
  return found
}

function reference(name: SchemaName): object {
  return { $ref: `#/components/schemas/${name}` }
}
