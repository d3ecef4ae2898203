import { type Static, Type } from 'typebox'
import { SCALARS } from './scalars.ts'
import { choice, closed, ENVIRONMENT, list, scalar } from './schema-parts.ts'
import { policySchema, routeLimits, routeSchema } from './schema-policy.ts'

const tls = Type.Object(
  {
    ca: scalar('filePath', 'PEM file of the authorities to trust. Default: those of the system.'),
    cert: scalar('filePath', 'PEM file of the client certificate.'),
    key: scalar('filePath', 'PEM file of its private key.'),
    servername: scalar('hostName', 'Name that the certificate must have. Default: the host of `url`.'),
  },
  closed,
)

export const fileSchema = Type.Object(
  {
    listen: scalar('address', 'Where clients connect; port 0 for any free one.', '127.0.0.1:8080'),
    admin: Type.Optional(
      Type.Object(
        {
          listen: scalar(
            'addressOrNone',
            'Admin and metrics; `none` turns it off. Not on loopback: needs `tokenFile`.',
            '127.0.0.1:9464',
          ),
          tokenFile: scalar(
            'filePath',
            'File with the bearer token for the admin API. Without it, only health and metrics are served.',
          ),
          hosts: list(
            'hostLine',
            'Host names accepted in the `Host` header, besides the address that the request was sent to.',
            ['localhost', '127.0.0.1', '[::1]'],
          ),
        },
        closed,
      ),
    ),
    audit: Type.Optional(
      Type.Object(
        {
          file: scalar(
            'filePathOrNone',
            'File that records every change made by an operator; its directory must be writable. `none`: the log.',
            'none',
          ),
        },
        closed,
      ),
    ),
    ops: Type.Optional(
      Type.Object(
        {
          listen: scalar(
            'addressOrNone',
            'A listener for health and metrics only, for the kubelet and Prometheus.',
            'none',
          ),
        },
        closed,
      ),
    ),
    readiness: Type.Optional(
      Type.Object({ store: scalar('flag', 'Fails `/readyz` while the store is down.', false) }, closed),
    ),
    service: scalar(
      'serviceName',
      'What the proxy protects, such as `payments`. Services that share a store share no records. Required where the store can be shared (all but `memory:` and `sqlite:`, which default to `default`), here or as `--service`.',
    ),
    upstream: Type.Optional(
      Type.Object(
        {
          url: scalar(
            'upstreamUrl',
            'The service behind: `http://`, `https://` or `unix:/path`. Required, here or as `--upstream`.',
          ),
          connectTimeout: scalar('timeout', 'Time to connect, including TLS.', '2s'),
          timeout: scalar(
            'timeout',
            'Time for the whole call, or until the headers of a response that is streamed.',
            '60s',
          ),
          idleTimeout: scalar('timeout', 'Longest pause between two bytes of a response.', '60s'),
          connections: scalar(
            'count',
            'Most connections to the upstream for protected requests; as many for all others, and as many for WebSockets.',
            128,
          ),
          tls: Type.Optional(tls),
        },
        closed,
      ),
    ),
    store: Type.Optional(
      Type.Object(
        {
          url: scalar(
            'storeUrl',
            '`memory:`, `sqlite:<path>`, `redis://` or `rediss://`.',
            'sqlite:./idempotency.db',
          ),
          timeout: scalar('timeout', 'Time for each store command.', '500ms'),
          secretFile: scalar('filePath', 'File of at least 16 bytes, the HMAC-SHA-256 key for record ids.'),
          spool: scalar(
            'directoryPathOrOff',
            'Directory used by this process only, where outcomes survive a restart until the store accepts them.',
            'off',
          ),
          acceptRisk: scalar(
            'flag',
            'Serves `strict` routes on a store that evicts, or does not say whether it does.',
            false,
          ),
        },
        closed,
      ),
    ),
    limits: Type.Optional(
      Type.Object(
        {
          ...routeLimits,
          buffered: scalar(
            'bufferSize',
            'Bytes of bodies held at once; one client address gets at most 15/16 of it for its uploads.',
            '64MiB',
          ),
          inFlight: scalar(
            'count',
            'Protected requests at once, counted when the body is there; one client address, or one caller, gets at most 15/16 of them.',
            2000,
          ),
          waiters: scalar(
            'count',
            'Maximum number of retries that `inFlight: wait` holds; further ones are answered at once.',
            1000,
          ),
          upload: scalar('timeout', 'How long the body of a request may take to arrive.', '30s'),
        },
        { ...closed, description: 'Bounds of protected requests.' },
      ),
    ),
    problems: Type.Optional(
      Type.Object(
        {
          baseUrl: scalar(
            'problemBase',
            'Prefix of the `type` of problem responses.',
            'urn:idempotency-proxy:',
          ),
        },
        closed,
      ),
    ),
    issuer: Type.Optional(
      Type.Object(
        {
          path: scalar('ownPath', 'Where POST makes a key. It goes before every route.'),
          secretFile: scalar('filePath', 'File of at least 32 bytes that signs the keys (HMAC-SHA-256).'),
          ttl: scalar('retention', 'How long an issued key may claim.', '24h'),
        },
        {
          ...closed,
          required: ['path', 'secretFile'],
          description: 'Makes signed keys that expire. Without it: none.',
        },
      ),
    ),
    status: Type.Optional(
      Type.Object(
        {
          path: scalar(
            'ownPathOrOff',
            'Where GET asks for the state of a record. It goes before every route.',
            'off',
          ),
        },
        closed,
      ),
    ),
    wellKnown: scalar(
      'flag',
      'Serves what clients have to know, by route, as GET `/.well-known/idempotency` (docs/adoption.md). It goes before every route.',
      false,
    ),
    drain: Type.Optional(
      Type.Object(
        {
          delay: scalar('delay', 'How long requests are still served after readiness fails.', '0s'),
          timeout: scalar(
            'delay',
            'How long requests in progress may take to finish. Default: `upstream.timeout` + 5s.',
          ),
        },
        closed,
      ),
    ),
    metrics: Type.Optional(
      Type.Object(
        {
          defaults: scalar(
            'flag',
            'Serves the metrics of Node.js and of the process at `/metrics` as well.',
            true,
          ),
        },
        closed,
      ),
    ),
    log: Type.Optional(
      Type.Object(
        {
          level: choice(
            ['fatal', 'error', 'warn', 'info', 'debug', 'trace', 'silent'],
            'Minimum level that is logged; a reload changes it.',
            'info',
          ),
          format: choice(
            ['json', 'pretty', 'auto'],
            '`pretty`: one readable line per event; `auto`: that on a terminal, else JSON.',
            'auto',
          ),
        },
        closed,
      ),
    ),
    trustProxy: list('cidr', 'CIDRs of proxies whose `X-Forwarded-*` headers are trusted and extended.', []),
    unmatched: choice(
      ['protect', 'pass', 'reject'],
      'Requests that match no route: `protect` POST and PATCH with a key under `defaults`, `pass` them on, or `reject` them with 404.',
      'protect',
    ),
    defaults: Type.Optional(policySchema),
    routes: Type.Optional(Type.Array(routeSchema, { description: 'The first match wins.' })),
  },
  closed,
)

export type FileConfig = Static<typeof fileSchema>

/** The text of `schema/idempotency-proxy.schema.json` and of `idempotency-proxy schema`. */
export function publishedSchema(): string {
  const definitions = Object.entries(SCALARS).map(([name, { schema, allowed }]) => [
    name,
    { anyOf: [schema, ENVIRONMENT], description: allowed },
  ])
  const document = {
    $schema: 'http://json-schema.org/draft-07/schema#',
    title: 'Configuration of idempotency-proxy',
    ...fileSchema,
    definitions: {
      ...Object.fromEntries(definitions),
      environment: {
        type: 'string',
        pattern: '\\$\\{',
        description: '`${NAME}` or `${NAME:-default}` from the environment',
      },
    },
  }
  return `${JSON.stringify(document, null, 2)}\n`
}
