import fastifyCors from '@fastify/cors'
import type { FastifyInstance } from 'fastify'
import type { Config } from '../config/config.ts'
import { RESPONSE_HEADER } from '../core/headers.ts'
import { policiesOf } from '../core/route.ts'
import { requestOf, responseOf } from './incoming.ts'
import { OTHER } from './routing.ts'

/** The proxy's own header lines that scripts may read (docs/guides/browsers.md). */
const EXPOSED = [
  RESPONSE_HEADER.replayed,
  RESPONSE_HEADER.status,
  RESPONSE_HEADER.expires,
  RESPONSE_HEADER.retry,
  'Retry-After',
  'Location',
]

/** The same for calls (gRPC-Web, Connect). */
const EXPOSED_OF_CALLS = ['Grpc-Status', 'Grpc-Message', 'Grpc-Status-Details-Bin', 'Retry-After-Ms']

const MARKS = [
  'Vary',
  'Access-Control-Allow-Origin',
  'Access-Control-Allow-Credentials',
  'Access-Control-Expose-Headers',
]

/** @fastify/cors for the proxy's own answers and replays, and for preflights that the upstream would not get (docs/adr/0127). */
export function cors(
  app: FastifyInstance,
  { origins, credentials, headers }: NonNullable<Config['cors']>,
  config: Config,
): void {
  const readable = new Set(origins)
  const keys = policiesOf(config).flatMap(({ key }) =>
    key.from.flatMap((source) => (source.kind === 'header' ? [source.name] : [])),
  )
  const hasCalls = policiesOf(config).some(({ match }) => match.grpc != null)
  app.register(fastifyCors, {
    origin: readable.has('*')
      ? '*'
      : (origin, done) => done(null, origin !== undefined && readable.has(origin) && origin),
    credentials,
    exposedHeaders: hasCalls ? [...EXPOSED, ...EXPOSED_OF_CALLS] : EXPOSED,
    ...(headers.length === 0 ? {} : { allowedHeaders: [...new Set([...headers, ...keys])] }),
    preflight: false,
  })
  // The writer does not send through Fastify's reply, so it gets these lines separately.
  app.addHook('onRequest', (_request, reply, done) => {
    responseOf(reply).marks = MARKS.flatMap((name) => {
      const value = reply.getHeader(name)
      return value === undefined ? [] : [name, String(value)]
    })
    done()
  })
  app.options(
    '*',
    {
      constraints: { policy: OTHER.preflight },
      config: { cors: { preflight: true, preflightContinue: true } },
    },
    (request, reply) => {
      const way = requestOf(request).arrival?.way
      if (way?.kind === 'preflight' && reply.hasHeader('Access-Control-Allow-Origin'))
        reply.header('Access-Control-Allow-Methods', way.method)
      reply.code(204).send()
    },
  )
}
