import { effective } from '../config/written.ts'
import { ID_BEGINNING } from '../core/record.ts'
import { type AdminAnswer, ok, type ProblemCode } from './answers.ts'
import { drain, remove, reportOutcome, resolve } from './changes.ts'
import type { AdminPorts, AdminRequest } from './ports.ts'
import { list, lookUp, show } from './records.ts'
import { report } from './report.ts'
import { MAX_SAMPLE } from './sample.ts'
import type { SchemaName } from './schemas.ts'

export interface Parameter {
  readonly name: string
  readonly schema: object
  readonly description: string
}

export interface Endpoint {
  readonly method: 'GET' | 'POST' | 'DELETE'
  /** `{id}` stands for a record id. */
  readonly path: string
  readonly summary: string
  readonly query?: readonly Parameter[]
  /** `optional`: it may be left out. */
  readonly body?: { readonly schema: SchemaName; readonly optional: boolean }
  /** The current version goes in `If-Match`. */
  readonly ifMatch?: true
  /** What it answers where nothing is wrong; null: 204. */
  readonly gives: SchemaName | null
  /** With `ETag`. */
  readonly tagged?: true
  /** Refusals beside those that every endpoint has. */
  readonly refuses: readonly ProblemCode[]
  readonly run: (ports: AdminPorts, request: AdminRequest) => AdminAnswer | Promise<AdminAnswer>
}

const STORE = ['store_unavailable'] as const
const ONE = [...STORE, 'record_unreadable', 'record_not_found'] as const
const text = { type: 'string' }

/** Everything behind the token; /v1/openapi.json is made of it. */
export const ENDPOINTS: readonly Endpoint[] = [
  {
    method: 'GET',
    path: '/v1/records',
    summary:
      'Records a page at a time. Of in_progress and unknown alone: the longest due first; else in no order. A page may hold fewer than `limit` and have a next one, or a few more.',
    query: [
      {
        name: 'id',
        schema: { type: 'string', pattern: ID_BEGINNING.source },
        description:
          'How the record id begins: at least 8 characters, such as the 12 that logs show. A page may be empty and have a next one.',
      },
      { name: 'state', schema: text, description: 'Comma-separated states.' },
      { name: 'route', schema: text, description: 'Name of a route.' },
      { name: 'age', schema: text, description: 'Created at least so long ago, such as 1h.' },
      {
        name: 'deadLettered',
        schema: { type: 'boolean' },
        description: 'Unknown, and asked about as often as the route allows.',
      },
      { name: 'limit', schema: { type: 'integer', minimum: 1, maximum: 1000 }, description: 'Default: 100.' },
      { name: 'cursor', schema: text, description: '`next` of the page before.' },
    ],
    gives: 'RecordPage',
    refuses: ['invalid_request', ...STORE],
    run: list,
  },
  {
    method: 'GET',
    path: '/v1/records/{id}',
    summary: 'A record and its history.',
    gives: 'FullRecord',
    tagged: true,
    refuses: ONE,
    run: show,
  },
  {
    method: 'POST',
    path: '/v1/records/lookup',
    summary: 'The record that a request with this key, of this caller, would find.',
    body: { schema: 'Lookup', optional: false },
    gives: 'FullRecord',
    tagged: true,
    refuses: ['invalid_request', ...ONE],
    run: lookUp,
  },
  {
    method: 'POST',
    path: '/v1/records/{id}/resolve',
    summary: 'Decides about an unknown outcome.',
    body: { schema: 'Resolution', optional: false },
    ifMatch: true,
    gives: 'Record',
    tagged: true,
    refuses: [
      'invalid_request',
      'not_unknown',
      'still_running',
      'outcome_held',
      'version_mismatch',
      'version_required',
      'audit_unavailable',
      ...ONE,
    ],
    run: resolve,
  },
  {
    method: 'DELETE',
    path: '/v1/records/{id}',
    summary: 'Forgets a record: the next request with its key is executed.',
    body: { schema: 'Decision', optional: true },
    ifMatch: true,
    gives: null,
    refuses: [
      'invalid_request',
      'still_running',
      'outcome_held',
      'version_mismatch',
      'version_required',
      'audit_unavailable',
      ...ONE,
    ],
    run: remove,
  },
  {
    method: 'POST',
    path: '/v1/outcomes',
    summary: 'Reports an outcome from outside, by key and caller, while the record reads unknown.',
    body: { schema: 'OutcomeReport', optional: false },
    gives: 'Record',
    tagged: true,
    refuses: ['invalid_request', 'not_unknown', 'still_running', 'outcome_held', 'audit_unavailable', ...ONE],
    run: reportOutcome,
  },
  {
    method: 'GET',
    path: '/v1/report',
    summary:
      'What was executed, replayed and prevented, and what is unknown. Looks at the records one by one.',
    query: [
      {
        name: 'since',
        schema: text,
        description: 'How long ago the period begins, such as 7d. Default: 24h.',
      },
      {
        name: 'sample',
        schema: { type: 'integer', minimum: 1, maximum: MAX_SAMPLE },
        description:
          'Ask the upstream anew about so many completed records of the period, chosen at random, where `reconcile` says how.',
      },
    ],
    gives: 'Report',
    refuses: ['invalid_request', ...STORE],
    run: report,
  },
  {
    method: 'GET',
    path: '/v1/config',
    summary: 'The configuration in force.',
    gives: 'Configuration',
    refuses: [],
    run: ({ config }) => ok(effective(config)),
  },
  {
    method: 'POST',
    path: '/v1/drain',
    summary: 'Announces the end: readiness fails, and everything is still served.',
    body: { schema: 'Decision', optional: true },
    gives: 'Draining',
    refuses: ['invalid_request', 'audit_unavailable'],
    run: drain,
  },
]
