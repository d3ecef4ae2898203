import { type Static, Type } from 'typebox'
import type { ScalarValue } from './scalars.ts'
import { choice, closed, ENVIRONMENT, list, orOff, orShort, scalar } from './schema-parts.ts'
import { reconcile } from './schema-reconcile.ts'

/** What changes things and is not idempotent by itself (RFC 9110 §9.2.2). */
export const METHODS = ['POST', 'PATCH']
const ACTIONS = ['store', 'release', 'unknown'] as const
const BY_PROFILE = 'Default: by profile.'

export const derive = Type.Object(
  {
    json: list('jsonPointer', 'JSON pointers into the body, whose values belong to the derived key.', []),
    form: list(
      'fieldName',
      'Form fields that belong to it, urlencoded or multipart. Not together with `json`.',
      [],
    ),
    headers: list('headerName', 'Headers that belong to it.', []),
    bucket: scalar(
      'bucket',
      "The store's time divided by it, rounded down, belongs to the key; `none`: no time does. A retry in the next bucket executes again.",
      'none',
    ),
  },
  closed,
)

const key = Type.Object(
  {
    presence: choice(['required', 'optional', 'ignored'], 'Whether a request must carry a key.', 'optional'),
    from: list(
      'keySource',
      'What may carry the key: `header:<name>`, `query:<name>`, `form:<field>` (urlencoded or multipart) or `json:<pointer>` into the body. CloudEvents: `header:ce-id` takes `ce-source` in with it, `json:/id` takes `/source`. Several that disagree: 400.',
      ['header:idempotency-key'],
      1,
    ),
    syntax: choice(
      ['lenient', 'strict'],
      '`lenient`: `"abc"` and `abc` are the same key; `strict`: the quoted String alone.',
      'lenient',
    ),
    minLength: scalar('keyLength', `Shortest key, unquoted. ${BY_PROFILE}`),
    maxLength: scalar('keyLength', 'Longest key, unquoted.', 255),
    pattern: scalar(
      'pattern',
      'ECMAScript regular expression that the whole key must match, in linear time: without lookaround, backreferences, `\\b` and modifiers. Empty: any.',
      '',
    ),
    forward: scalar(
      'forward',
      'The key header towards the upstream: `same`, `none`, or the name of another header.',
      'same',
    ),
    forwardFence: scalar(
      'flag',
      'Sends `Idempotency-Fence` and `Idempotency-Record` to the upstream.',
      false,
    ),
    derive: orOff(
      'off',
      derive,
      'Makes a key where the client sent none, of the caller and what is named here. `off`: it does not.',
    ),
    issuedOnly: scalar(
      'flag',
      'Accepts only keys that the `issuer` made, of some 170 characters. Not together with `derive`.',
      false,
    ),
  },
  closed,
)

const jwt = Type.Object(
  {
    jwks: scalar(
      'jwksUrl',
      '`https://` URL of the JWK Set (`http://` for a loopback host alone). This or `keyFile`.',
      'none',
    ),
    keyFile: scalar(
      'filePathOrNone',
      'File of the key: a public one or a certificate as PEM, a JWK or a JWK Set. This or `jwks`.',
      'none',
    ),
    issuer: scalar('claimOrNone', 'What `iss` must be; `none`: anything.', 'none'),
    audience: Type.Optional(
      Type.Unsafe<ScalarValue<'audiences'>>({
        anyOf: [
          { $ref: '#/definitions/audiences' },
          { type: 'array', items: { $ref: '#/definitions/audience' }, uniqueItems: true, minItems: 1 },
        ],
        description: 'What must be among `aud`, or a list of which one must; `none`: anything.',
        default: 'none',
      }),
    ),
  },
  { ...closed, description: 'How bearer tokens are verified, where `caller` names a claim.' },
)

const scope = Type.Object(
  {
    caller: Type.Optional(
      Type.Unsafe<ScalarValue<'callers'>>({
        anyOf: [
          { $ref: '#/definitions/callers' },
          { type: 'array', items: { $ref: '#/definitions/caller' }, uniqueItems: true, minItems: 1 },
        ],
        description:
          'What tells callers apart: `header:<name>`, `cookie:<name>`, `jwt:<claim>` (of the bearer token, verified as `jwt` says), a list of these joined, or `none`.',
        default: 'header:authorization',
      }),
    ),
    jwt: Type.Optional(jwt),
    path: choice(
      ['exact', 'route', 'none'],
      'Which part of the path belongs to the scope of a key.',
      'exact',
    ),
    host: scalar(
      'flag',
      'The host that the client asked belongs to the scope of a key, for an upstream that serves several: `Host`, or `X-Forwarded-Host` of a peer in `trustProxy`.',
      false,
    ),
    anonymous: choice(
      ['share', 'reject'],
      `Callers without the attribute: one scope for all of them, or 401. ${BY_PROFILE}`,
    ),
  },
  closed,
)

const fingerprint = Type.Object(
  {
    body: choice(
      ['auto', 'json', 'form', 'multipart', 'raw', 'none'],
      'How bodies are compared; `auto` by media type.',
      'auto',
    ),
    ignore: list('jsonPointer', 'JSON pointers left out. Not together with `only`.', []),
    only: list('jsonPointer', 'JSON pointers that alone count. Not together with `ignore`.', []),
    headers: list('headerName', 'Headers that count as well.', []),
    query: choice(
      ['include', 'ignore', 'sorted'],
      'Whether the query counts; `sorted`: the order of its parameters does not.',
      'include',
    ),
  },
  closed,
)

const inFlight = Type.Object(
  {
    mode: choice(
      ['reject', 'wait'],
      'What a retry gets while the first is still running: an answer at once, or that of the first as soon as it is there.',
      'reject',
    ),
    wait: scalar('wait', 'How long `mode: wait` holds it.', '10s'),
    status: choice(
      [409, 423, 425, 429, 202, 503],
      'Status of the answer where it is not held (any longer).',
      409,
    ),
  },
  closed,
)

const misuse = Type.Object(
  { status: choice([400, 409, 422], `Answer to a key that was used for another request. ${BY_PROFILE}`) },
  closed,
)

const outcomes = Type.Unsafe<Readonly<Record<string, (typeof ACTIONS)[number]>>>({
  type: 'object',
  patternProperties: { '^([2-5][0-9]{2}|[2-5]xx)$': { anyOf: [{ enum: ACTIONS }, ENVIRONMENT] } },
  additionalProperties: false,
  $comment: 'statuses (200 to 599) and classes (2xx to 5xx)',
  description:
    'What the statuses of the upstream become, exact ("503") before class ("5xx"). Entries of a route go before those of `defaults`, these before the profile.',
})

/** Bounds that a route may set, too. */
export const routeLimits = {
  request: scalar('bodySize', 'Maximum request body; a longer one gets 413.', '1MiB'),
  response: scalar(
    'bodySize',
    'Longest answer kept; a longer one is streamed and recorded as done without its body.',
    '5MiB',
  ),
  newKeys: scalar(
    'rateOrOff',
    'How many new keys a caller may claim, such as `100/m` (s, m, h, d); beyond it 429. `off`: any number.',
    'off',
  ),
}

export const authorizeReplay = Type.Object(
  {
    path: scalar(
      'probeTarget',
      'Where the upstream is asked, by GET with the headers of the caller; needed.',
    ),
    cache: scalar('delay', 'How long a 2xx is cached per caller; 0s: not cached.', '0s'),
  },
  closed,
)

/** What a route and `defaults` may both set. */
const policyProperties = {
  mode: choice(
    ['enforce', 'shadow', 'off'],
    '`shadow`: everything is forwarded, and what `enforce` would have done is counted; `off`: everything streams through unprotected.',
    'enforce',
  ),
  profile: choice(
    ['standard', 'strict', 'lenient', 'stripe'],
    'Values for what neither the route nor `defaults` sets.',
    'standard',
  ),
  key: orShort(key, 'The key. `required` is short for `{ presence: required }`.'),
  scope: Type.Optional(scope),
  fingerprint: Type.Optional(fingerprint),
  inFlight: orShort(inFlight, 'Retries while the first request is still running.'),
  misuse: Type.Optional(misuse),
  lease: scalar(
    'timeout',
    'How long a claim lasts without renewal; it is renewed every third of that. At least 1s.',
    '30s',
  ),
  ttl: scalar(
    'retention',
    'How long a finished record answers retries, from completion. At least `upstream.timeout`.',
    '24h',
  ),
  ttlFailed: scalar('retention', 'The `ttl` of stored answers that are not 2xx. Default: `ttl`.'),
  tombstone: scalar(
    'tombstone',
    `How long after \`ttl\` the key is still refused as expired; \`off\`: not. ${BY_PROFILE}`,
  ),
  unresolvedTtl: scalar(
    'retention',
    'How long an unresolved record is kept. At least `ttl` and `lease`.',
    '30d',
  ),
  respondWithin: scalar(
    'respondWithin',
    'Answers 504 after this time while the call continues; `none`: waits for the response.',
    'none',
  ),
  outcomes: Type.Optional(outcomes),
  onLeaseExpired: choice(
    ['unknown', 'retry'],
    `\`retry\`: one retry executes again after the owner fell silent. ${BY_PROFILE}`,
  ),
  onStoreUnavailable: choice(
    ['reject', 'bypass'],
    `\`bypass\`: forwards unprotected while the store is down. ${BY_PROFILE}`,
  ),
  keep: choice(
    ['response', 'outcome'],
    '`outcome`: nothing of the body is stored; a retry learns the status alone.',
    'response',
  ),
  replay: Type.Optional(
    Type.Object(
      { excludeHeaders: list('headerName', 'Response headers that are not replayed.', []) },
      closed,
    ),
  ),
  statusHeader: scalar('flag', 'Adds `Idempotency-Status` and `Idempotency-Expires` to answers.', false),
  authorizeReplay: orOff(
    'none',
    authorizeReplay,
    'Asks the upstream before a replay whether the caller may still see it. `none`: does not.',
  ),
  reconcile: orOff(
    'none',
    reconcile,
    'Asks the upstream what became of a request whose outcome is unknown (docs/reconciliation.md). `none`: a person finds out.',
  ),
  limits: Type.Optional(
    Type.Object(routeLimits, { ...closed, description: 'Default: the `limits` at the top.' }),
  ),
}

const match = Type.Object(
  {
    methods: list('method', 'Methods of the route.', METHODS, 1),
    path: scalar('routePath', 'Exact, `:name` for one segment, a trailing `/*` for everything below.'),
    exact: scalar('flag', 'Matches the path as sent instead of its normalized form.', false),
  },
  { ...closed, required: ['path'] },
)

export const policySchema = Type.Object(policyProperties, {
  ...closed,
  description: 'What every route starts from, and the policy of what no route matches.',
})

export const routeSchema = Type.Object(
  {
    name: scalar('routeName', 'Unique; the label of the route in metrics and logs.'),
    match: Type.Optional(match),
    ...policyProperties,
  },
  {
    ...closed,
    required: ['name', 'match'],
    description:
      'A value comes from the route, else from `defaults`, else from the profile (that of the route, else of `defaults`), else it is the default shown.',
  },
)

export type PolicyConfig = Static<typeof policySchema>
