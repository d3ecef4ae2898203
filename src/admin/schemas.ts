import { type Static, type TProperties, type TSchemaOptions, Type } from 'typebox'
import { NOT_KEPT, type NotKept, type RecordId, STATES, type State } from '../core/record.ts'

/* A record as the admin API shows it. */

/** Refuses other members. */
export function object<P extends TProperties>(properties: P, options: TSchemaOptions = {}) {
  return Type.Object(properties, { additionalProperties: false, ...options })
}

/** Named in the OpenAPI document; every body needs a name. */
export function named<P extends TProperties>($id: string, properties: P) {
  return object(properties, { $id })
}

export function described<P extends TProperties>(description: string, properties: P) {
  return object(properties, { description })
}
export const nullable = <T extends Parameters<typeof Type.Union>[0][number]>(type: T) =>
  Type.Union([type, Type.Null()])
const id = Type.String({ pattern: '^[A-Za-z0-9_-]{43}$', description: 'Record id.' })
export const count = (description: string) => Type.Integer({ minimum: 0, description })
export const timestamp = (description: string) => Type.String({ format: 'date-time', description })

export const headerLines = Type.Array(Type.Array(Type.String(), { minItems: 2, maxItems: 2 }), {
  description: 'Header lines in their order: pairs of name and value.',
})

const recordMembers = {
  id,
  route: Type.String(),
  state: Type.Unsafe<State>({
    type: 'string',
    enum: STATES,
    description: 'As it reads now: unknown if its lease has expired.',
  }),
  fence: Type.Integer({ description: 'Number of the latest attempt.' }),
  version: Type.Integer({ description: 'Grows with every write; the value of `ETag` and `If-Match`.' }),
  createdAt: timestamp('Time of the first claim.'),
  updatedAt: timestamp('Time of the last write.'),
  leaseUntil: nullable(
    timestamp('When the lease expires unless the owner renews it; in the past if it has expired.'),
  ),
  expiresAt: timestamp('When it stops answering retries or, if unresolved, when the store drops it.'),
  attempts: Type.Integer({ description: 'Number of claims.' }),
  method: Type.String(),
  path: Type.String(),
  label: nullable(Type.String({ description: '`record.label` of the request; null: it has none.' })),
  fingerprint: Type.String({ description: 'Fingerprint of the request, base64url.' }),
  response: nullable(
    described('What retries get. `size` null: executed, but the body was not kept. Credentials read `***`.', {
      status: Type.Integer(),
      headers: headerLines,
      size: nullable(Type.Integer({ description: 'Bytes of the body.' })),
      notKept: nullable(
        Type.Unsafe<NotKept>({
          type: 'string',
          enum: NOT_KEPT,
          description: 'Why the body is not kept; null: it is.',
        }),
      ),
      bodyUntil: nullable(
        timestamp('When the body is dropped (`ttl.body`); null: with the record, or it is not kept.'),
      ),
    }),
  ),
  lastError: nullable(Type.String()),
  reconciliation: nullable(
    object({
      since: timestamp('When it became unknown.'),
      nextLookAt: timestamp('When it is checked next.'),
      asked: Type.Integer({ description: 'Number of status queries so far.' }),
      deadLettered: Type.Boolean({
        description: 'All status queries are used up: an operator has to decide.',
      }),
      answer: nullable(Type.String({ description: 'Result of the last status query.' })),
    }),
  ),
}
export const record = named('Record', recordMembers)
export type RecordView = Static<typeof record>

const historyEntry = object({
  event: Type.String({
    description:
      'claimed, settled, resolved, reconciled, shadowed, or how a request was answered: an outcome of idempotency_requests_total.',
  }),
  text: Type.String({ description: 'The event as a sentence, for people: its wording may change.' }),
  mood: Type.Unsafe<'good' | 'bad' | 'neutral'>({ type: 'string', enum: ['good', 'bad', 'neutral'] }),
  first: timestamp('Time of the first of them.'),
  last: timestamp('Time of the last of them.'),
  count: Type.Integer({ description: 'Number of identical entries in a row.' }),
  detail: Type.Record(Type.String(), Type.Unknown(), {
    description:
      'Such as replica, fence, status, upstreamMs, before, after, result, verdict, cause, by, reason.',
  }),
})
export type HistoryView = Static<typeof historyEntry>

export const fullRecord = named('FullRecord', {
  ...recordMembers,
  shadowed: nullable(
    described(
      'What shadow mode forwarded, according to the history, which may be incomplete; null: nothing.',
      {
        duplicates: Type.Integer({
          description: 'Forwarded in addition to the attempts: each may have been executed.',
        }),
        misuse: Type.Integer({ description: 'Forwarded with this key but different content.' }),
      },
    ),
  ),
  history: Type.Array(historyEntry, { description: 'Oldest first; the first ten and the newest forty.' }),
  explanation: described('The record in sentences, for people: their wording may change.', {
    verdict: Type.Array(Type.String(), {
      description: 'Whether it was executed, how often, and what retries were answered.',
    }),
    next: Type.Array(Type.String(), { description: 'What to do now.' }),
  }),
})
export type FullView = Static<typeof fullRecord>

export const recordPage = named('RecordPage', {
  records: Type.Array(object(recordMembers)),
  unreadable: Type.Array(id, { description: 'Records that this version cannot read.' }),
  next: nullable(Type.String({ description: 'Cursor of the next page; null: this is the last.' })),
  now: timestamp('The store’s time.'),
})
export type PageView = Static<typeof recordPage>

export const oneRecord = Type.Object({ id: Type.Unsafe<RecordId>(id) })

const remark = { minLength: 1, maxLength: 1000 }

/** Optional members of a decision. */
export const deciderMembers = {
  reason: Type.Optional(Type.String({ ...remark, description: 'Written to the audit log.' })),
  by: Type.Optional(
    Type.String({ ...remark, description: 'Who decides, unverified; written to the audit log.' }),
  ),
}
