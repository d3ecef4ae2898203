import { PHASES } from '../core/copies.ts'
import { TOKEN } from '../core/headers.ts'
import type { RoutePolicy } from '../core/policy.ts'
import {
  byProfile,
  type FilledIn,
  group,
  groupOrList,
  list,
  listOfGroups,
  map,
  oneOrList,
  orListOf,
  orOff,
  orWord,
  type Reload,
  required,
  row,
  unset,
  type WrittenIn,
} from './rows.ts'
import { STATUS } from './scalars.ts'

/*
 * Every configuration property, one row each: allowed values, default, effect of a change on reload, and purpose. To add a property, add its
 * row and use it; `node scripts/docs.ts` and `idempotency-proxy schema` then write the derived texts.
 */

const live = 'live'
const restart = 'restart'
const identifies = 'identifies'

/** Changes record ids if the value of `what` has changed. */
function identifiesBy(what: (policy: RoutePolicy) => unknown): Reload {
  return { effect: identifies, when: (before, after) => what(before) !== what(after) }
}

/** Stricter key rules refuse keys already in use: clients then retry with new keys, which execute again. */
function narrower(isNarrower: (after: RoutePolicy['key'], before: RoutePolicy['key']) => boolean): Reload {
  return { effect: identifies, when: (before, after) => isNarrower(after.key, before.key) }
}

function restartOrIdentifies(identifiesFor: (policy: RoutePolicy) => boolean): Reload {
  return { effect: restart, identifiesFor }
}

/** The methods that are neither safe nor idempotent (RFC 9110 §9.2). */
const METHODS = ['POST', 'PATCH']

const POINTER = '^(/([^~/]|~[01])*)+$'
const POINTERS = 'JSON pointers, such as /data/0/id'
const HEADER = `^${TOKEN}$`
const HOST_PORT = '^([^:\\[\\]]+|\\[[0-9A-Fa-f:.]+\\]):[0-9]{1,5}$'
const STATUSES = 'statuses (200 to 599), classes (2xx to 5xx) and gRPC codes (such as UNAVAILABLE)'

const when = row(
  map(POINTER, POINTERS, 'jsonText'),
  unset,
  live,
  'What the response must also contain: JSON pointers and their values.',
)

// biome-ignore format: a table
const ANSWER = {
  status: row('answerStatus', unset, live, 'Status of such a response; required.'),
  when,
}

const OF_URL = 'which belongs to `store.url`'
const ABOUT_REPLICAS = 'since replicas may lack records and are never asked'
const RUNS_LATE =
  'which stays off: a command that is kept for later, or sent again, would run after its caller has given up'
/** Options of ioredis with which a command could run twice, late or elsewhere, or that other properties set. */
const REFUSED_REDIS = {
  enableOfflineQueue: RUNS_LATE,
  autoResendUnfulfilledCommands: RUNS_LATE,
  maxRetriesPerRequest: RUNS_LATE,
  reconnectOnError: RUNS_LATE,
  retryStrategy: 'which is fixed: a proxy that reconnects later than `store.grace` has lost its claims',
  commandTimeout: 'which is `store.timeout`',
  enableAutoPipelining: 'since all commands of a turn leave together',
  keyPrefix: 'since the layout of keys is fixed; use `service`',
  protocol: 'since replies are read as RESP2',
  scaleReads: ABOUT_REPLICAS,
  role: ABOUT_REPLICAS,
  readOnly: ABOUT_REPLICAS,
  host: OF_URL,
  port: OF_URL,
  username: OF_URL,
  password: OF_URL,
  db: OF_URL,
  tls: OF_URL,
  sentinels: OF_URL,
  name: OF_URL,
  sentinelUsername: OF_URL,
  sentinelPassword: OF_URL,
}

const ACTIONS = ['store', 'release', 'unknown'] as const

// biome-ignore format: a table
const OUTCOME = {
  status: row('outcomeStatus', required, live, 'Status or class of such responses.'),
  when,
  outcome: row(ACTIONS, required, live, 'What they mean.'),
}

// biome-ignore format: a table
export const RECONCILE = {
  request: group({
    method: row(['GET', 'POST'], 'GET', live, 'Method of the status query; it has no body and must be free of side effects.'),
    path: row('queryTarget', unset, live,
      'Path of the status query; required. `{key}` and `{record}` (the record id) are replaced, percent-encoded.'),
    headers: row(map(HEADER, 'names of headers', 'headerText'), unset, live,
      "Headers of the status query, such as its credentials; `{key}` and `{record}` are replaced in their values. None of the client's are sent."),
  }),
  identity: row(orWord('none', map(POINTER, POINTERS, 'jsonText')), unset, live,
    'Proof that a response is about this record: JSON pointers and their values, in which `{key}` and `{record}` are replaced. `none`: any response is believed. Required.'),
  completed: groupOrList({
    ...ANSWER,
    json: row('jsonPart', unset, live, 'JSON pointer to the part that becomes the stored response. Default: the whole body.'),
    response: group({
      status: row('answerStatus', unset, live, 'Status of the replay. Default: that of the response to the query.'),
      headers: row(map(HEADER, 'names of headers', 'headerText'), unset, live,
        'Headers of the replay. Default: `Content-Type: application/json`.'),
    }),
  }, 'Response that shows the outcome of the request; one, or a list of which the first match counts. Required.'),
  notFound: orOff('none', ANSWER,
    'Response that shows that nothing was done. It counts when received twice in a row, and not before `after`.'),
  pending: orOff('none', ANSWER,
    'Response that leaves the outcome open; checked before the others. So does every response that matches none of them.'),
  after: row('retention', unset, live, 'Time from the claim before "not found" counts. Default: `upstream.timeout`.'),
  every: row('retention', '5s', live, 'Time until the first status query; the pauses double, up to an hour.'),
  attempts: row('queries', 20, live, 'Number of status queries before the record is dead-lettered.'),
}

// biome-ignore format: a table
const DERIVE = {
  json: row(list('jsonPointer'), [], identifies, 'JSON pointers into the body whose values are part of the derived key.'),
  form: row(list('fieldName'), [], identifies, 'Form fields that are part of it, instead of `json`.'),
  headers: row(list('headerName'), [], identifies, 'Headers that are part of it.'),
  path: row('flag', false, identifies, 'Makes method and path part of it: for an upstream that takes a key only once, whatever the path.'),
  bucket: row('bucket', 'none', identifies,
    "Time window that is part of it, by the store's clock; a retry in the next one executes again."),
}

/** Bounds that a route may override. */
// biome-ignore format: a table
const ROUTE_LIMITS = {
  request: row('bodySize', '1MiB', live, 'Maximum request body; a larger one gets 413.'),
  response: row('bodySize', '5MiB', live,
    'Maximum response body that is stored; a larger one is streamed and recorded without its body.'),
  newKeys: row('rateOrOff', 'off', live,
    'Maximum rate of new keys per caller, such as `100/m` (s, m, h, d); more get 429.'),
}

/** Properties of both routes and `defaults`. */
// biome-ignore format: a table
export const POLICY = {
  // Records made under `shadow` count under `enforce`; `off` neither makes nor finds any.
  mode: row(['enforce', 'shadow', 'off'], 'enforce', identifiesBy(({ mode }) => mode === 'off'),
    '`shadow` forwards everything and counts what `enforce` would have done; `off` passes everything through unprotected.'),
  // Only a set of defaults: each changed value is compared on its own.
  profile: row(['standard', 'strict', 'lenient', 'stripe'], 'standard', live,
    'Set of defaults for what neither the route nor `defaults` sets.'),
  key: group({
    presence: row(['required', 'optional', 'ignored'], 'optional', identifiesBy(({ key }) => key.presence === 'ignored'),
      'Whether a request must carry a key.'),
    from: row(list('keySource', 1), ['header:idempotency-key'], identifies,
      'Where the key may come from (with `match.grpc` also `header:x-idempotency-key` by default): `header:<name>`, `query:<name>`, `form:<field>` or `json:<pointer>` into the body (docs/keys.md).'),
    syntax: row(['lenient', 'strict'], 'lenient', narrower((after) => after.syntax === 'strict'),
      '`lenient`: `"abc"` and `abc` are the same key; `strict`: only a quoted String is accepted.'),
    minLength: row('keyLength', byProfile(1, { strict: 16 }), narrower((after, before) => after.minLength > before.minLength),
      'Minimum key length, unquoted.'),
    maxLength: row('keyLength', 255, narrower((after, before) => after.maxLength < before.maxLength),
      'Maximum key length, unquoted.'),
    pattern: row('pattern', '', narrower((after) => after.pattern !== null),
      'RE2 regular expression that the whole key must match. Empty: any.'),
    forward: row('forward', 'same', live, 'Key header sent to the upstream: `same`, `none`, or the name of another header.'),
    forwardFence: row('flag', false, live, 'Sends `Idempotency-Fence` and `Idempotency-Record` to the upstream.'),
    derive: orOff('off', DERIVE, 'Derives a key from the caller and the parts named here if the client sent none.'),
    issuedOnly: row('flag', false, narrower((after) => after.issuedOnly),
      'Accepts only keys made by the `issuer`, of about 190 characters.'),
  }, { short: true, help: 'The key. `required` is short for `{ presence: required }`.' }),
  scope: group({
    caller: row(oneOrList('callers', 'caller'), 'header:authorization', identifies,
      'What identifies the caller: `header:<name>`, `cookie:<name>`, `jwt:<claim>` of the verified bearer token, `tls:san-uri`, `tls:san-dns`, `tls:subject` or `tls:fingerprint` of the client certificate, a list of these combined, or `none`. Required, with `anonymous`, unless `listen` is on loopback.'),
    // A claim identifies a caller only together with its issuer.
    jwt: group({
      jwks: row('jwksUrl', 'none', identifies, '`https://` URL of the JWK Set (`http://` only on loopback). Either this or `keyFile`.'),
      keyFile: row('filePathOrNone', 'none', identifies,
        'Key file: a public key or certificate as PEM, a JWK or a JWK Set. Either this or `jwks`.'),
      issuer: row('claimOrNone', 'none', identifies, 'Required `iss`; `none`: any.'),
      audience: row(oneOrList('audiences', 'audience'), 'none', identifies,
        'Required `aud`, or a list of which one must match; `none`: any.'),
    }, { whole: true, help: 'Verification of bearer tokens, where `caller` names a claim.' }),
    path: row(['exact', 'route', 'none'], 'exact', identifies, 'Which part of the path is in the scope of a key.'),
    host: row('flag', false, identifies,
      'Makes the requested host part of the scope, for an upstream that serves several.'),
    // A client refused without a caller retries with one, under another record id.
    anonymous: row(['share', 'reject'], byProfile('share', { strict: 'reject' }),
      identifiesBy(({ scope }) => (scope.caller.length === 0 ? null : scope.anonymous)),
      'Requests without the caller attribute share one key space, or are refused with 401.'),
  }),
  // Records made by other rules are compared by the raw request (contract §5): a retry with the same content in other bytes, like every
  // multipart retry, would be refused as a different request, and its client would use a new key.
  fingerprint: group({
    body: row(['auto', 'json', 'form', 'multipart', 'raw', 'none'], 'auto', identifies,
      'How request bodies are compared; `auto`: by media type.'),
    ignore: row(list('jsonPointer'), [], identifies, 'JSON pointers to exclude from the comparison.'),
    only: row(list('jsonPointer'), [], identifies, 'JSON pointers to compare, and nothing else of the body.'),
    headers: row(orWord('none', list('headerName')), [], identifies,
      'Headers to compare in addition to those that select an account or a tenant (docs/keys.md). `none`: neither.'),
    query: row(['include', 'ignore', 'sorted'], 'include', identifies,
      'Whether the query is compared; `sorted`: regardless of the order of its parameters.'),
  }),
  inFlight: group({
    mode: row(['reject', 'wait'], 'reject', live,
      'Answer to a retry while the first request runs: an error at once, or the first response when it arrives.'),
    wait: row('wait', '10s', live, 'Maximum time that `mode: wait` holds a retry.'),
    status: row([409, 423, 425, 429, 202, 503], 409, live, 'Status for a retry that is not held, or whose wait is over.'),
  }, { short: true, help: 'Retries while the first request is still running.' }),
  misuse: group({
    status: row([400, 409, 422], byProfile(422, { stripe: 400 }), live, 'Status for a key that was used for a different request.'),
  }),
  // These apply to claims and outcomes written from now on.
  lease: row('timeout', '30s', live, 'How long a claim lasts without renewal, at least 1s; renewed after every third of it.'),
  ttl: group({
    record: row('retention', '24h', live, 'How long a completed record answers retries, at least `upstream.timeout`. `ttl: 24h` is short for it.'),
    body: row('retention', unset, live,
      'How long its response is kept; afterwards a retry gets the status and `Location` only. Default: as long as the record.'),
  }, { short: true, help: 'How long a completed record answers, and how long its response is kept. `24h` is short for `{ record: 24h }`.' }),
  ttlFailed: row('retention', unset, live, 'The `ttl` of stored responses that are not 2xx. Default: `ttl`.'),
  tombstone: row('tombstone', byProfile('off', { strict: '7d' }), live,
    'How long after `ttl` the key is still refused as expired.'),
  unresolvedTtl: row('retention', '30d', live, 'How long an unresolved record is kept, at least `ttl` and `lease`.'),
  respondWithin: row('respondWithin', 'none', live,
    'Responds with 504 after this time while the call continues.'),
  outcomes: row(orListOf(OUTCOME, map(STATUS, STATUSES, ACTIONS)), unset, live,
    'Outcome of each upstream status, exact ("503") before class ("5xx"), and of each gRPC code; or a list of `{ status, when, outcome }`, where `when` looks into JSON and the first that applies counts. Entries of the route come before those of `defaults` and the profile.'),
  onLeaseExpired: row(['unknown', 'retry'], byProfile('unknown', { lenient: 'retry' }), live,
    '`retry`: one retry executes again once the lease has expired.'),
  onResponseLost: row(['unknown', 'retry'], 'unknown', live,
    '`retry`: one retry executes again after the connection to the upstream broke or `upstream.timeout` passed; for work that may be repeated, such as a workflow of steps with keys of their own (docs/guides/workflows.md).'),
  onStoreUnavailable: row(['reject', 'bypass'], byProfile('reject', { lenient: 'bypass' }), live,
    '`bypass`: forwards requests unprotected while the store is down.'),
  keep: row(['response', 'outcome', 'stream'], 'response', live,
    '`response`: stored; `outcome`: without it, a retry gets the status only; `stream`: a finished stream of at most `limits.response` too.'),
  stream: row(['auto', 'always', 'never'], 'auto', live,
    'Whether responses are passed on as they arrive; `auto`: by media type, such as `text/event-stream`, or `X-Accel-Buffering: no`.'),
  replay: group({
    excludeHeaders: row(list('headerName'), [], live, 'Response headers that are not replayed, such as `[set-cookie]` (docs/guides/browsers.md#session-cookies).'),
  }),
  statusHeader: row('flag', false, live, 'Adds `Idempotency-Status` and `Idempotency-Expires` to responses.'),
  authorizeReplay: orOff('none', {
    path: row('probeTarget', unset, live, "Path of this GET request, which carries the caller's headers; required."),
    cache: row('delay', '0s', live, 'How long a 2xx is cached per caller.'),
  }, 'Asks the upstream before a replay whether the caller may still see it.'),
  // Takes effect with the next status query.
  reconcile: orOff('none', RECONCILE,
    'Asks the upstream about unknown outcomes (docs/reconciliation.md).'),
  limits: group(ROUTE_LIMITS, { help: 'Default: the top-level `limits`.' }),
  record: group({
    label: row('labelSourceOrOff', 'off', live,
      'Names a request for people, such as an order number, in the log, commands and page: a JSON pointer into the body, `header:<name>`, or `path::name` for a `:name` of the path. At most 200 characters.'),
  }),
}

/** Which spellings of a path are equal: set it if the upstream treats them so, or they escape the route. */
// biome-ignore format: a table
const FOLDING = {
  case: row(['sensitive', 'insensitive'], 'sensitive', identifies, 'Whether letter case counts in paths. No effect with `exact`.'),
  parameters: row(['keep', 'strip'], 'keep', identifies, 'Whether parameters of segments, such as `;v=1`, count in paths. No effect with `exact`.'),
}

// biome-ignore format: a table
export const ROUTE = {
  // Part of the record id only under `scope.path: route`; otherwise a label, and how an unknown record finds its route.
  name: row('routeName', required, identifiesBy(({ scope, name }) => (scope.path === 'route' ? name : null)),
    'Unique name; labels the route in metrics and logs.'),
  match: group({
    methods: row(list('method', 1), METHODS, identifiesBy(({ match }) => match.methods.toSorted().join()), 'Methods of the route.'),
    path: row('routePath', unset, identifies, 'Exact, with `:name` for one segment, a trailing `/*` for everything below. Required, or `grpc`.'),
    grpc: row('grpcMethod', unset, identifies,
      'Instead of `methods` and `path`: calls of this method, `package.Service/Method`, or of all methods, `package.Service/*` (docs/guides/grpc.md).'),
    exact: row('flag', false, identifies, 'Matches the path as sent instead of its normalized form.'),
    ...FOLDING,
  }, { byDefault: required }),
  ...POLICY,
}

// biome-ignore format: a table
const LISTENER_TLS = {
  cert: row('filePath', required, restart, 'PEM file of the certificate, followed by its intermediates. Like the others, it is read again when it changes.'),
  key: row('filePath', required, restart, 'PEM file of its private key.'),
  others: row(listOfGroups({
    cert: row('filePath', required, restart, 'PEM file of another certificate.'),
    key: row('filePath', required, restart, 'PEM file of its private key.'),
  }, ''), [], restart, 'Certificates for other names: the first one that is valid for the name that a client asks for (SNI), else `cert`.'),
  clientCa: row('filePathOrNone', 'none', restart,
    'PEM file of authorities. Clients must have a certificate of one of them, which `scope.caller` may name.'),
  minVersion: row(['TLSv1.2', 'TLSv1.3'], 'TLSv1.2', restart, 'Oldest version of TLS.'),
}
const TLS_HELP = 'Serves only HTTPS at this address (docs/tls.md).'

// biome-ignore format: a table
export const PROPERTIES = {
  // Open sockets.
  listen: group({
    address: row('address', '127.0.0.1:8080', restart, 'Address for clients; port 0 picks any free port. `listen: 127.0.0.1:8080` is short for it.'),
    http2: row('flag', false, restart, 'Also speaks HTTP/2 without TLS, to clients that begin with it (docs/tls.md#http2).'),
    tls: orOff('off', {
      ...LISTENER_TLS,
      alpn: row(list('protocol', 1), ['h2', 'http/1.1'], restart, 'Protocols, in the order of preference: `h2`, `http/1.1`.'),
    }, TLS_HELP),
  }, { short: true, help: 'Where clients are served.' }),
  http: row(['plain', 'node'], 'plain', restart,
    'HTTP implementation. `plain`: our own parser for ordinary requests (Node.js for others), and our own client; `node`: only Node.js and undici, with more CPU and fewer guarantees about odd responses (docs/adr/0128).'),
  workers: row('workers', 1, restart,
    'Processes that serve traffic; `auto`: one per core, or one where the store belongs to a single process. `limits` and `upstream.connections` count for each (docs/operations.md#workers).'),
  admin: group({
    listen: group({
      address: row('addressOrNone', '127.0.0.1:9464', restart,
        'Address for the admin API and metrics, or `none`. Off loopback it requires `tokenFile`.'),
      tls: orOff('off', LISTENER_TLS, TLS_HELP),
    }, { short: true, help: 'Where operators are served.' }),
    tokenFile: row('filePath', unset, { effect: restart, when: (before, after) => before === undefined || after === undefined },
      'Bearer token file for the admin API, one token per line. Without it, only health and metrics are served.'),
    hosts: row(list('hostLine'), ['localhost', '127.0.0.1', '[::1]'], restart,
      'Host names accepted besides the address that the request was sent to.'),
  }),
  // Opened or logged once, at the start.
  audit: group({
    file: row('filePathOrNone', 'none', restart,
      'File that records every change by an operator, in a writable directory. `none`: the log.'),
  }),
  ops: group({
    listen: group({
      address: row('addressOrNone', 'none', restart, 'Address for health and metrics only, for the kubelet and Prometheus.'),
      tls: orOff('off', LISTENER_TLS, TLS_HELP),
    }, { short: true, help: 'Where monitoring is served.' }),
  }),
  readiness: group({
    store: row('flag', false, restart, 'Fails `/readyz` while the store is down.'),
  }),
  // Part of every record id.
  service: row('serviceName', unset, identifies,
    'Name of the protected service, such as `payments`; services on one store share no records. Required unless the store is `memory:` or `sqlite:`, here or as `--service`.'),
  // Calls in progress keep what they began with.
  upstream: group({
    url: row('upstreamUrl', unset, restart,
      'The protected service: `http://`, `https://` or `unix:/path`. Required, here or as `--upstream`.'),
    http2: row('flag', false, restart,
      'Speaks HTTP/2 to the upstream: over TLS by ALPN, otherwise from the start (docs/tls.md#http2-to-the-upstream).'),
    connectTimeout: row('timeout', '2s', restart, 'Maximum time to connect, including TLS.'),
    timeout: row('timeout', '60s', live, 'Maximum time for the whole call, or until the headers of a streamed response.'),
    idleTimeout: row('timeout', '60s', restart, 'Maximum pause between two bytes of a response.'),
    keepAlive: row('delay', '1s', restart,
      'How long an idle connection is kept; at most half as long as the upstream announces or was seen to keep it.'),
    connections: row('count', 128, live,
      'Maximum connections to the upstream for protected requests; as many again for all others, and for WebSockets.'),
    tls: group({
      ca: row('filePath', unset, restart, 'PEM file of the trusted authorities. Default: those of the system.'),
      cert: row('filePath', unset, restart, 'PEM file of the client certificate.'),
      key: row('filePath', unset, restart, 'PEM file of its private key.'),
      servername: row('hostName', unset, restart, 'Host name that the certificate must have. Default: the host of `url`.'),
    }),
  }),
  grpc: group({
    descriptors: row('filePathOrNone', 'none', restart,
      'Descriptor set of the services (`protoc --include_imports --descriptor_set_out`): where keys and labels are in messages, and which methods stream (docs/guides/grpc.md#descriptors).'),
  }),
  store: group({
    url: row('storeUrl', 'sqlite:./idempotency.db', restart, '`memory:`, `sqlite:<path>`, `redis://`, `rediss://`, `redis+sentinel://`, `redis+cluster://`, `postgres://` or `dynamodb://`; `tiered:` for two stores, of which one is a cache (docs/tiered.md).'),
    primary: group({
      url: row('primaryUrl', unset, restart, 'With `url: "tiered:"`: the store that decides.'),
    }),
    cache: group({
      url: row('cacheUrl', unset, restart, 'With `url: "tiered:"`: a Redis, or `memory:`, which answers retries of completed requests.'),
    }),
    timeout: row('timeout', '500ms', restart, 'Maximum time for each store command.'),
    grace: row('graceOrOff', '2s', restart,
      'How long Redis or PostgreSQL grants no claims after a failover, a restart or a flush (docs/stores.md).'),
    secretFile: row('filePath', unset, identifies, 'HMAC-SHA-256 key file for record ids and fingerprints, at least 16 bytes.'),
    encryption: group({
      keys: { ...listOfGroups({
        id: row('sealingKeyId', required, restart, 'Name of the key, stored with each record that it seals; never reuse it for another key.'),
        file: row('filePath', required, restart, 'Key file: 32 random bytes, raw, in hex or in base64.'),
      }, 'The first key seals records, every key opens them (docs/encryption.md).', 1), byDefault: required, reload: restart },
    }),
    compression: row(['off', 'gzip', 'zstd'], 'off', restart,
      'Compression of stored responses (docs/encryption.md#compression).'),
    spool: row('directoryPathOrOff', 'off', restart,
      'Directory of this process alone, where outcomes survive a restart until the store accepts them.'),
    wait: orOff('off', {
      replicas: row([1, 2, 3, 4, 5, 'all', 'none'], 1, restart, 'How many replicas must have a claim; `all`: every known one, including those that are down.'),
      disk: row(['none', 'local', 'replicas'], 'none', restart, 'Whose disks must also have it: the server’s, or the replicas’ as well (Redis 7.2 or later).'),
      timeout: row('wait', '100ms', restart, 'Maximum time per round; a claim waits for at most two.'),
    }, 'Redis: a claim executes only once replicas or disks have it; otherwise 503 (docs/redis.md#wait-for-replicas).'),
    redis: group({
      connectTimeout: row('timeout', '2s', restart, 'Maximum time to connect, including TLS; at most half of `store.grace`.'),
      keepAlive: row('delay', '30s', restart, 'Idle time before TCP probes the server.'),
      noDelay: row('flag', true, restart, 'Sends small commands at once (`TCP_NODELAY`).'),
      family: row([0, 4, 6], 0, restart, 'Version of IP; `0`: either.'),
      connectionName: row('serviceName', 'idempotency-proxy', restart, 'Name in `CLIENT LIST`.'),
      disableClientInfo: row('flag', false, restart, 'Does not send the name and version of the library (`CLIENT SETINFO`).'),
      natMap: row(map(HOST_PORT, 'addresses that nodes announce, such as 10.0.0.1:6379', 'address'), unset, restart,
        'Where to reach servers that Sentinels or cluster nodes announce: `"10.0.0.1:6379": redis-a.example:7000`.'),
    }, { help: 'Redis: options of ioredis (docs/redis.md#options-of-ioredis).', refused: REFUSED_REDIS }),
    acceptRisk: row('flag', false, restart, 'Serves `strict` routes on a store that evicts records, or that does not say whether it does.'),
    migrate: orOff('off', {
      from: row('storeUrl', required, restart, 'The store to move from; `store.url` is the one to move to.'),
      phase: row(PHASES, required, restart,
        '`mirror`: the old store decides; `both`: both decide; `new`: the new one decides, and asks the old one.'),
    }, 'Moves a running fleet from one store to another, phase by phase (docs/guides/moving-stores.md).'),
  }),
  limits: group({
    ...ROUTE_LIMITS,
    buffered: row('bufferSize', '64MiB', live,
      'Maximum bytes of bodies held at once; one client address gets at most 15/16 for its uploads.'),
    inFlight: row('count', 2000, live,
      'Maximum protected requests at once, counted once the body has arrived; one client address or caller gets at most 15/16.'),
    waiters: row('count', 1000, live, 'Maximum retries that `inFlight: wait` holds; further ones are answered at once.'),
    upload: row('timeout', '30s', live, 'Maximum time for the body of a request to arrive.'),
    responseHead: row('headSize', '64KiB', live,
      'Maximum status line and headers of a response; a larger one leaves the outcome unknown.'),
  }, { help: 'Bounds of protected requests.' }),
  // Computed from the configuration in force, so a reload changes it at once.
  cors: orOff('off', {
    origins: row(oneOrList('origins', 'origin'), required, live,
      'Origins whose pages may read responses, such as `https://shop.example`, or `"*"`: any.'),
    credentials: row('flag', false, live, 'Also to requests with cookies. Not with `"*"`.'),
    headers: row(list('headerName'), [], live,
      'Request headers that a preflight allows in addition to those with keys. Empty: all that it requests.'),
  }, 'Lets pages of other origins read problems and replays (docs/guides/browsers.md#other-origins).'),
  problems: group({
    baseUrl: row('problemBase', 'urn:idempotency-proxy:', restart, 'Prefix of the `type` of problem responses.'),
  }),
  // Paths that the proxy itself serves, and its signing key.
  issuer: group({
    path: row('ownPath', required, restart, 'Path where POST issues a key.'),
    // Keys issued before are refused, so clients retry with new keys.
    secretFile: row('filePath', required, restartOrIdentifies(({ key }) => key.issuedOnly),
      'HMAC-SHA-256 key file that signs issued keys, at least 32 bytes.'),
    ttl: row('retention', '24h', restart, 'How long an issued key can make a claim.'),
  }, { help: 'Issues signed keys that expire. Off if omitted.' }),
  status: group({
    path: row('ownPathOrOff', 'off', restart, 'Path where GET returns the state of a record.'),
  }),
  // Computed from the configuration in force, so a reload changes it at once.
  wellKnown: row('flag', false, live,
    'Serves what clients need to know about each route at `/.well-known/idempotency` (docs/adoption.md).'),
  drain: group({
    delay: row('delay', '0s', live, 'How long requests are still served after readiness fails.'),
    timeout: row('delay', unset, live, 'Maximum time for requests in progress to finish. Default: `upstream.timeout` + 5s.'),
  }),
  metrics: group({
    defaults: row('flag', true, restart, 'Also serves the metrics of Node.js and of the process.'),
  }),
  log: group({
    level: row(['fatal', 'error', 'warn', 'info', 'debug', 'trace', 'silent'], 'info', live, 'Minimum level to log.'),
    format: row(['json', 'pretty', 'auto'], 'auto', restart,
      '`pretty`: one readable line per event; `auto`: `pretty` on a terminal, else `json`.'),
  }),
  // Part of the listener; also decides whose `X-Forwarded-Host` enters the record id.
  trustProxy: row(list('cidr'), [], restartOrIdentifies(({ scope }) => scope.host),
    'CIDRs of proxies whose `X-Forwarded-*` headers are trusted and extended.'),
  // Decides whether requests that match no route have records.
  unmatched: row(['protect', 'pass', 'reject'], 'protect', identifies,
    'Requests that match no route: `protect` POST and PATCH with a key under `defaults`, `pass` them on, or `reject` them with 404.'),
  defaults: group({ match: group(FOLDING), ...POLICY }, { help: 'Defaults of all routes, and the policy of requests that match no route.' }),
  routes: listOfGroups(ROUTE, 'The first match wins. A value comes from the route, else from `defaults`, else from the profile (that of the route, else of `defaults`), else it is the default shown.'),
}

export const FILE = group(PROPERTIES)

/** A file as written; omitted properties are absent. */
export type FileConfig = WrittenIn<typeof PROPERTIES>
export type PolicyConfig = WrittenIn<typeof POLICY>
export type ReconcileConfig = WrittenIn<typeof RECONCILE>
/** A file with all defaults filled in. */
export type FilledFile = FilledIn<typeof PROPERTIES>
export type FilledPolicy = FilledIn<typeof POLICY>
