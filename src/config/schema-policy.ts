import { type Static, Type } from 'typebox'
import type { ScalarValue } from './scalars.ts'
import { choice, closed, ENVIRONMENT, list, orShort, scalar } from './schema-parts.ts'

/** What changes things and is not idempotent by itself (RFC 9110 §9.2.2). */
export const METHODS = ['POST', 'PATCH']
const ACTIONS = ['store', 'release', 'unknown'] as const
const BY_PROFILE = 'Default: by profile.'

const key = Type.Object(
  {
    presence: choice(['required', 'optional', 'ignored'], 'Whether a request must carry a key.', 'optional'),
    from: list(
      'keySource',
      'Headers that may carry the key, as `header:<name>`. Several that disagree: 400.',
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
      'ECMAScript regular expression that the whole key must match; empty: any.',
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
  },
  closed,
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
          'What tells callers apart: `header:<name>`, `cookie:<name>`, a list of these joined, or `none`.',
        default: 'header:authorization',
      }),
    ),
    path: choice(
      ['exact', 'route', 'none'],
      'Which part of the path belongs to the scope of a key.',
      'exact',
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
    body: choice(['auto', 'json', 'raw', 'none'], 'How bodies are compared; `auto` by media type.', 'auto'),
    ignore: list('jsonPointer', 'JSON pointers left out. Not together with `only`.', []),
    only: list('jsonPointer', 'JSON pointers that alone count. Not together with `ignore`.', []),
    headers: list('headerName', 'Headers that count as well.', []),
    query: choice(
      ['include', 'ignore', 'sorted'],
      'Whether the query counts; `sorted`: its order by name does not.',
      'include',
    ),
  },
  closed,
)

const inFlight = Type.Object(
  {
    mode: choice(['reject'], 'What a retry gets while the first is still running.', 'reject'),
    status: choice([409, 423, 425, 429, 202, 503], 'Status of that answer.', 409),
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
  description:
    'What the statuses of the upstream become, exact ("503") before class ("5xx"). Entries of a route go before those of `defaults`, these before the profile.',
})

export const sizes = {
  request: scalar('bodySize', 'Longest body of a protected request; beyond it 413.', '1MiB'),
  response: scalar(
    'bodySize',
    'Longest answer kept; a longer one is streamed and recorded as done without its body.',
    '5MiB',
  ),
}

/** What a route and `defaults` may both set. */
const policyProperties = {
  mode: choice(['enforce', 'off'], '`off`: everything streams through unprotected.', 'enforce'),
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
    'How long an owner may stay silent; renewed every third of it. At least 1s.',
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
    'Answers 504 after this time while the call goes on; `none`: waits.',
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
    Type.Object({ excludeHeaders: list('headerName', 'Headers left out of a replay.', []) }, closed),
  ),
  statusHeader: scalar('flag', 'Adds `Idempotency-Status` and `Idempotency-Expires` to answers.', false),
  limits: Type.Optional(Type.Object(sizes, { ...closed, description: 'Default: the `limits` at the top.' })),
}

const match = Type.Object(
  {
    methods: list('method', 'Methods of the route.', METHODS, 1),
    path: scalar('routePath', 'Exact, `:name` for one segment, a trailing `/*` for everything below.'),
    exact: scalar('flag', 'Compares the path as it was sent, not its normal form.', false),
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
