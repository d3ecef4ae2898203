import { type Static, Type } from 'typebox'
import { STATES } from '../core/record.ts'
import { report } from './report-schema.ts'

/*
 * The JSON of the admin API: what bodies are checked against, and what /v1/openapi.json tells.
 */

const closed = { additionalProperties: false }
const nullable = <T extends Parameters<typeof Type.Union>[0][number]>(type: T) =>
  Type.Union([type, Type.Null()])
const id = Type.String({ pattern: '^[A-Za-z0-9_-]{43}$', description: 'Record id.' })
const time = (description: string) => Type.String({ format: 'date-time', description })
/** Most that a person writes. */
const said = { minLength: 1, maxLength: 1000 }

const state = Type.Unsafe<(typeof STATES)[number]>({
  type: 'string',
  enum: STATES,
  description: 'As it reads now: a record whose lease has lapsed is unknown.',
})

const headers = Type.Array(Type.Array(Type.String(), { minItems: 2, maxItems: 2 }), {
  description: 'Header lines in their order: pairs of name and value.',
})

const recordMembers = {
  id,
  route: Type.String(),
  state,
  fence: Type.Integer({ description: 'Number of the latest attempt.' }),
  version: Type.Integer({ description: 'Grows with every write; what `ETag` and `If-Match` carry.' }),
  createdAt: time('Of the first claim.'),
  updatedAt: time('Of the last write.'),
  leaseUntil: nullable(time('How long the owner may stay silent; past where the lease has lapsed.')),
  expiresAt: time('When it stops answering retries; of an unresolved one: when the store drops it.'),
  attempts: Type.Integer({ description: 'How often it was claimed.' }),
  method: Type.String(),
  path: Type.String(),
  fingerprint: Type.String({ description: 'Of the request, base64url.' }),
  response: nullable(
    Type.Object(
      {
        status: Type.Integer(),
        headers,
        size: nullable(Type.Integer({ description: 'Bytes of the body.' })),
      },
      {
        ...closed,
        description:
          'What retries are answered; `size` null: done, but the body was not kept. Values that carry credentials read `***`.',
      },
    ),
  ),
  lastError: nullable(Type.String()),
}
const record = Type.Object(recordMembers, closed)

const historyEntry = Type.Object(
  {
    event: Type.String({
      description:
        'claimed, settled, resolved, reconciled, shadowed, or how a request was answered: an outcome of idempotency_requests_total.',
    }),
    text: Type.String({ description: 'The event as a sentence, for people: its wording may change.' }),
    mood: Type.Unsafe<'good' | 'bad' | 'neutral'>({ type: 'string', enum: ['good', 'bad', 'neutral'] }),
    first: time('Of the first of them.'),
    last: time('Of the last of them.'),
    count: Type.Integer({ description: 'How many equal ones in a row.' }),
    detail: Type.Record(Type.String(), Type.Unknown(), {
      description:
        'Such as replica, fence, status, upstreamMs, before, after, result, verdict, cause, by, reason.',
    }),
  },
  closed,
)

const reconciliation = Type.Object(
  {
    since: time('Since when it is unknown.'),
    nextLookAt: time('When it is looked at again.'),
    asked: Type.Integer({ description: 'Questions asked at the upstream.' }),
    deadLettered: Type.Boolean({
      description: 'Asked as often as the route allows: a person has to decide.',
    }),
    answer: nullable(Type.String({ description: 'What the last answer said.' })),
  },
  closed,
)

const full = Type.Object(
  {
    ...recordMembers,
    reconciliation: nullable(reconciliation),
    shadowed: nullable(
      Type.Object(
        {
          duplicates: Type.Integer({
            description: 'Forwarded besides the attempts: each may have been executed.',
          }),
          misuse: Type.Integer({ description: 'Forwarded with this key and another content.' }),
        },
        {
          ...closed,
          description:
            'What shadow mode forwarded, as far as the history has it: there may be more. null: it has nothing of shadow mode.',
        },
      ),
    ),
    explanation: Type.Object(
      {
        verdict: Type.Array(Type.String(), {
          description: 'Whether it was executed, how often, and what retries were answered.',
        }),
        next: Type.Array(Type.String(), { description: 'What to do now.' }),
      },
      { ...closed, description: 'The record in sentences, for people: their wording may change.' },
    ),
    history: Type.Array(historyEntry, { description: 'Oldest first; the first ten and the newest forty.' }),
  },
  closed,
)

const page = Type.Object(
  {
    records: Type.Array(record),
    unreadable: Type.Array(id, { description: 'Records that this version cannot read.' }),
    next: nullable(Type.String({ description: 'Cursor of the next page; null: this was the last.' })),
    now: time('The store’s time.'),
  },
  closed,
)

const decider = {
  reason: Type.Optional(Type.String({ ...said, description: 'Written to the audit log.' })),
  by: Type.Optional(
    Type.String({ ...said, description: 'Who decides, as they say; written to the audit log.' }),
  ),
}

const response = Type.Object(
  {
    status: Type.Integer({ minimum: 200, maximum: 599 }),
    headers: Type.Optional(headers),
    body: Type.Optional(Type.String()),
    bodyBase64: Type.Optional(Type.String({ pattern: '^[A-Za-z0-9+/]*={0,2}$' })),
  },
  { ...closed, description: 'What retries will be answered.' },
)

const resolutionMembers = {
  outcome: Type.Unsafe<'completed' | 'retryable'>({
    type: 'string',
    enum: ['completed', 'retryable'],
    description:
      'completed: it was done, and `response` answers it. retryable: nothing was done; a retry may execute.',
  }),
  response: Type.Optional(response),
  ...decider,
}

const subjectMembers = {
  key: Type.String({ minLength: 1, maxLength: 8192, description: 'As the client sends it, quoted or not.' }),
  caller: Type.Optional(
    Type.Record(
      Type.String(),
      Type.Union([Type.String(), Type.Number(), Type.Boolean(), Type.Array(Type.String())]),
      { description: 'The header lines that tell callers apart, and ce-source; for jwt:<claim> the claim.' },
    ),
  ),
  method: Type.Optional(Type.String({ description: 'Where `route` has one alone, it may be left out.' })),
  path: Type.Optional(
    Type.String({ description: 'Where the path of `route` is fixed, it may be left out.' }),
  ),
  host: Type.Optional(Type.String({ description: 'Host of the request, where `scope.host` counts it.' })),
  route: Type.Optional(Type.String()),
}

/** By the names that they have in the description. */
export const SCHEMAS = {
  Record: record,
  FullRecord: full,
  RecordPage: page,
  Lookup: Type.Object(subjectMembers, closed),
  Resolution: Type.Object(resolutionMembers, closed),
  OutcomeReport: Type.Object({ ...subjectMembers, ...resolutionMembers }, closed),
  Decision: Type.Object(decider, closed),
  Report: report,
  Configuration: Type.Record(Type.String(), Type.Unknown(), {
    description: 'As a file would say it, defaults included; secrets read `***`.',
  }),
  Draining: Type.Object({ draining: Type.Boolean() }, closed),
  Description: Type.Record(Type.String(), Type.Unknown()),
  Problem: Type.Object(
    {
      type: Type.String(),
      title: Type.String(),
      status: Type.Integer(),
      detail: Type.String(),
      code: Type.String(),
      instance: Type.Optional(id),
      record: Type.Optional(record),
    },
    closed,
  ),
}
export type SchemaName = keyof typeof SCHEMAS

export type RecordView = Static<typeof record>
export type FullView = Static<typeof full>
export type PageView = Static<typeof page>
export type HistoryView = Static<typeof historyEntry>
export type Lookup = Static<(typeof SCHEMAS)['Lookup']>
export type Resolving = Static<(typeof SCHEMAS)['Resolution']>
export type OutcomeReport = Static<(typeof SCHEMAS)['OutcomeReport']>
export type OperatorDecision = Static<(typeof SCHEMAS)['Decision']>
