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
            'File with the bearer token of everything but the open paths. Without it: these alone.',
          ),
          hosts: list(
            'hostLine',
            'What the `Host` of a request may name beside the address that it came to.',
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
            'File to which every change by an operator is added, in a directory that is writable. `none`: the log.',
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
            'Health and metrics alone, for the kubelet and Prometheus.',
            'none',
          ),
        },
        closed,
      ),
    ),
    readiness: Type.Optional(
      Type.Object({ store: scalar('flag', 'Not ready while the store is down.', false) }, closed),
    ),
    upstream: Type.Optional(
      Type.Object(
        {
          url: scalar(
            'upstreamUrl',
            'The service behind: `http://`, `https://` or `unix:/path`. Required, here or as `--upstream`.',
          ),
          connectTimeout: scalar('timeout', 'Until a connection is made, TLS included.', '2s'),
          timeout: scalar('timeout', 'Bounds the whole call, or up to the head of a streamed answer.', '60s'),
          idleTimeout: scalar('timeout', 'Bounds the silence between two bytes of an answer.', '60s'),
          connections: scalar('count', 'Most connections to the upstream.', 128),
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
          timeout: scalar('timeout', 'Bounds every command of the store.', '500ms'),
          secretFile: scalar(
            'filePath',
            'File of at least 16 bytes that keys the record ids (HMAC-SHA-256).',
          ),
          spool: scalar(
            'directoryPathOrOff',
            'Directory, of this process alone, where outcomes that the store does not take outlive a restart.',
            'off',
          ),
          acceptRisk: scalar('flag', 'Serves `strict` routes on a store that may evict.', false),
        },
        closed,
      ),
    ),
    limits: Type.Optional(
      Type.Object(
        {
          ...routeLimits,
          buffered: scalar('bufferSize', 'Bytes of bodies held at once.', '64MiB'),
          inFlight: scalar('count', 'Protected requests at once.', 2000),
          waiters: scalar(
            'count',
            'Retries that `inFlight: wait` holds at once; the others are answered.',
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
            'What the `type` of an error begins with.',
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
          delay: scalar('delay', 'How long it still serves after readiness failed.', '0s'),
          timeout: scalar(
            'delay',
            'How long running calls may take to finish. Default: `upstream.timeout` + 5s.',
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
            'Least severity logged.',
            'info',
          ),
          format: choice(['json', 'pretty', 'auto'], '`auto`: pretty on a terminal.', 'auto'),
        },
        closed,
      ),
    ),
    trustProxy: list('cidr', 'CIDRs whose `X-Forwarded-*` are believed and extended.', []),
    unmatched: choice(
      ['protect', 'pass', 'reject'],
      'What no route matches: POST and PATCH with a key under `defaults`, pass, or 404.',
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
