import t from 'tap'
import { lookUp } from '../../src/core/body/json-lookup.ts'
import { classify, pointersInto } from '../../src/core/classify.ts'
import type { OutcomeRule, Retention, RoutePolicy } from '../../src/core/policy.ts'
import type { CompletedResponse, Outcome, RecordId, StoredResponse } from '../../src/core/record.ts'
import {
  ACCEPTING,
  ACCEPTING_UNKNOWN,
  bodiless,
  claimDraft,
  claimSpans,
  completionTerms,
  heldRecord,
  isFromBefore,
  isRecorded,
  keptResult,
  NOBODY,
  outcomeDraft,
  outcomeDraftOf,
  outcomeOf,
  outcomeSpans,
  pendingOutcome,
  replayable,
  resolvedDraft,
  stillUnknown,
  withBody,
  withoutResponse,
} from '../../src/core/settle.ts'
import { atOnce } from '../../src/core/steps.ts'
import {
  bytes,
  COMMON,
  completed,
  expired,
  FIRST,
  failedRetryable,
  inProgress,
  RESULT,
  ROUTE,
  routeOf,
  unknown,
} from './fixtures.ts'

const RETENTION: Retention = {
  lease: 30,
  ttl: 1000,
  ttlFailed: 200,
  ttlBody: null,
  tombstone: 0,
  unresolvedTtl: 9000,
  reconcile: null,
}
const OPERATION = {
  route: 'r',
  method: 'POST',
  path: '/p',
  fingerprint: FIRST,
  rawDigest: bytes(3),
  recipe: 'recipe',
  key: null,
}
const ATTEMPT = { fence: 7, token: bytes(4, 16), attempts: 2 }

const answered = (status: number): CompletedResponse => ({
  kept: true,
  response: { status, reason: '', headers: [], body: Buffer.alloc(0), trailers: [] },
})
const unkept = (status: number): CompletedResponse => ({
  kept: false,
  why: 'streamed',
  status,
  location: null,
})

const DONE: Outcome = { kind: 'completed', result: RESULT }
const NOT_EXECUTED: Outcome = { kind: 'not_executed', reason: 'refused' }
const UNKNOWN: Outcome = { kind: 'unknown', reason: 'reset', status: 200 }

t.test('a claim and each outcome become records that keep operation, attempt and age', async (t) => {
  const made = { ...OPERATION, ...ATTEMPT }
  const claimed = { ...made, state: 'in_progress', lastError: null, createdAt: 0 }
  t.same(claimDraft(OPERATION, ATTEMPT), claimed)
  for (const [outcome, own] of [
    [DONE, { state: 'completed', result: RESULT, lastError: null }],
    [NOT_EXECUTED, { state: 'failed_retryable', lastError: 'refused' }],
    [
      UNKNOWN,
      { state: 'unknown', leaseExpired: false, status: 200, reconciliation: null, lastError: 'reset' },
    ],
  ] as const) {
    const draft = outcomeDraft(OPERATION, ATTEMPT, outcome, 1234)
    t.same(draft, { ...made, ...own, createdAt: 1234 })
    t.strictSame(outcomeDraftOf(heldRecord(draft)), draft, 'a record gives back its outcome')
  }
  for (const record of [inProgress(), expired()]) t.equal(outcomeDraftOf(record), null, record.state)
})

t.test('T01 T02 how long a record is kept follows from its outcome', async (t) => {
  const tombstone = { ...RETENTION, tombstone: 50 }
  const reconciled = { ...RETENTION, reconcile: { every: 5 } }
  const done = (status: number, result = answered): Outcome => ({ kind: 'completed', result: result(status) })
  const rows: [outcome: Outcome, retention: Retention, spans: object][] = [
    [DONE, tombstone, { dueIn: 1000, dropIn: 1050 }],
    [done(400), tombstone, { dueIn: 200, dropIn: 250 }],
    // Nothing was done, so no tombstone follows.
    [NOT_EXECUTED, tombstone, { dropIn: 1000 }],
    [NOT_EXECUTED, RETENTION, { dropIn: 1000 }],
    // It outlives ttl, and without reconcile it is looked at a lease later.
    [UNKNOWN, RETENTION, { dueIn: 30, dropIn: 9000 }],
    [UNKNOWN, reconciled, { dueIn: 5 }],
  ]
  for (const result of [answered, unkept]) {
    for (const status of [200, 201, 204, 299])
      rows.push([done(status, result), RETENTION, { dueIn: 1000, dropIn: 1000 }])
    for (const status of [199, 300, 304, 400, 402, 422, 500, 599])
      rows.push([done(status, result), RETENTION, { dueIn: 200, dropIn: 200 }])
  }
  for (const [outcome, retention, spans] of rows)
    t.match(outcomeSpans(outcome, retention), spans, JSON.stringify(outcome))
  t.same(claimSpans(RETENTION), { dueIn: 30, dropIn: 9000 }, 'a claim is due when its lease ends')
})

t.test('T02 a response is kept for ttl.body if that is shorter than its record', async (t) => {
  const { result } = completed()
  const { response } = result as Extract<CompletedResponse, { kept: true }>
  const keep = (status: number, ttlBody: number | null) =>
    withBody({ ...response, status }, { ...RETENTION, ttlBody })
  t.strictSame(keep(201, null), { kept: true, response: { ...response, status: 201 } })
  t.strictSame(keep(201, 400), { kept: true, response: { ...response, status: 201 }, afterBody: 600 })
  t.notOk('afterBody' in keep(201, 1000), 'as long as the record')
  t.match(keep(422, 150), { afterBody: 50 })
  for (const ttlBody of [200, 400]) t.notOk('afterBody' in keep(422, ttlBody), 'ttlFailed is shorter')
})

t.test('removing a response leaves the rest of the record and its due times', async (t) => {
  const { result } = completed()
  const record = completed({ result: { ...result, afterBody: 1000 } as CompletedResponse })
  for (const now of [3999, 5000, 9000]) t.equal(bodiless(record, now), null, `nothing to do at ${now}`)
  const { draft, spans } = bodiless(record, 4500) as NonNullable<ReturnType<typeof bodiless>>
  t.same(spans, { dueIn: 500, dropIn: 4500 })
  t.strictSame(draft, {
    ...record,
    result: { kept: false, why: 'past_ttl', status: 201, location: null },
  })
  for (const other of [completed(), inProgress(), unknown(), failedRetryable(), expired()])
    t.equal(bodiless(other, 4500), null, other.state)
  t.equal(
    bodiless(completed({ result: { kept: false, why: 'too_large', status: 200, location: null } }), 4500),
    null,
  )
})

t.test('an upstream that completes its attempt is told how long and how much to keep', async (t) => {
  const route = { ...RETENTION, tombstone: 50, limits: { response: 4096 } }
  t.equal(completionTerms({ ...route, keep: 'response' }), '1000 200 50 4096')
  t.equal(completionTerms({ ...route, keep: 'outcome' }), '1000 200 50 0')
  t.equal(completionTerms({ ...route, keep: 'response', ttlBody: 300 }), '1000 200 50 4096 300')
})

t.test('an outcome that waits for the store is useful for as long as its claim is kept', async (t) => {
  const route = { ...RETENTION, onLeaseExpired: 'unknown' } as const
  const attempted = {
    id: 'A'.repeat(43) as RecordId,
    operation: OPERATION,
    attempt: ATTEMPT,
    createdAt: 1234,
  }
  t.match(pendingOutcome({ ...attempted, route }, DONE, {}), {
    draft: outcomeDraft(OPERATION, ATTEMPT, DONE, 1234),
    spans: outcomeSpans(DONE, RETENTION),
    usefulFor: 9000,
  })
})

t.test('over which records an outcome is accepted', async (t) => {
  t.same(new Set(ACCEPTING), new Set(['in_progress', 'unknown', 'failed_retryable']))
  t.same(new Set(ACCEPTING_UNKNOWN), new Set(['in_progress', 'failed_retryable']), 'an uncertain one')
})

t.test('an answer replaces any open record from before, another outcome only a free one', async (t) => {
  const over = {
    completed: ['in_progress', 'unknown', 'failed_retryable'],
    failed_retryable: ['failed_retryable'],
    unknown: ['failed_retryable'],
  }
  for (const [state, states] of Object.entries(over) as [
    'completed' | 'failed_retryable' | 'unknown',
    string[],
  ][])
    for (const found of [inProgress(), unknown(), failedRetryable(), completed(), expired()]) {
      const { fence, createdAt } = found
      const later = { state, fence: fence + 1, createdAt }
      t.equal(isFromBefore(found, later), states.includes(found.state), `${state} over ${found.state}`)
      t.notOk(isFromBefore(found, { ...later, fence }), 'not an earlier attempt')
      t.equal(
        isFromBefore(found, { ...later, createdAt: createdAt - 1 }),
        found.state === 'failed_retryable' && state !== 'failed_retryable',
        'a later record is replaced only if it came to nothing',
      )
      t.notOk(isFromBefore(found, { ...later, fence, createdAt: 0 }), 'an attempt without a claim')
    }
})

t.test('a refused outcome counts as recorded only if its own attempt completed the record', async (t) => {
  const token = Buffer.from(COMMON.token)
  t.ok(isRecorded(completed(), { token }))
  t.notOk(isRecorded(completed(), { token: bytes(5, 16) }), 'a newer attempt, or an operator, completed it')
  for (const record of [inProgress(), unknown(), failedRetryable(), expired()])
    t.notOk(isRecorded(record, { token }), record.state)
})

void t.test('a resolution can do without its response, if it has one', async (t) => {
  const response = { status: 201, reason: '', headers: ['location', '/p/1'], body: bytes(5), trailers: [] }
  const less = { kept: false, why: 'no_room', status: 201, location: '/p/1' } as const
  t.same(withoutResponse({ kind: 'completed', result: { kept: true, response } }), {
    kind: 'completed',
    result: less,
  })
  t.equal(withoutResponse({ kind: 'completed', result: less }), null)
  t.equal(withoutResponse({ kind: 'not_executed', reason: 'said so' }), null)
})

t.test('an uncertain outcome of an unknown record keeps its queries and due times', async (t) => {
  const reconciliation = {
    since: 10,
    asked: 3,
    notFound: 1,
    deadLettered: false,
    reported: false,
    answer: '404',
  }
  const found = unknown({ nextLookAt: 5000, dropAt: 9000, reconciliation })
  const late = outcomeDraft(OPERATION, ATTEMPT, UNKNOWN, 1234)
  if (late.state !== 'unknown') throw new Error(late.state)
  t.same(stillUnknown(found, late, 2000), {
    draft: { ...late, reconciliation },
    spans: { dueIn: 3000, dropIn: 7000 },
  })
})

t.test('a resolution keeps request and age; completed clears the token, not executed keeps it', async (t) => {
  const named = { parts: '{}', label: 'ord_1' }
  const told = {
    ...named,
    keySent: '"k"',
    received: ['key'],
    receivedBy: 'upstream',
    completion: '1 2 3 4',
  } as const
  const found = unknown({ ...told, createdAt: 77, attempts: 3, span: 'a trace', lastError: 'reset' })
  const { version: _v, updatedAt: _u, dropAt: _d, nextLookAt: _n, leaseExpired: _l, ...rest } = found
  const { status: _s, reconciliation: _r, span: _span, token, ...kept } = rest
  t.strictSame(resolvedDraft(found, { kind: 'completed', result: RESULT }), {
    ...kept,
    token: Buffer.alloc(16),
    state: 'completed',
    result: RESULT,
    lastError: null,
  })
  t.strictSame(resolvedDraft(found, { kind: 'not_executed', reason: 'said so' }), {
    ...kept,
    token,
    state: 'failed_retryable',
    lastError: 'said so',
  })
  const plain = resolvedDraft(unknown(), { kind: 'not_executed', reason: 'said so' })
  for (const name of Object.keys(told)) t.notOk(Object.hasOwn(plain, name), name)
  t.equal(NOBODY.length, ATTEMPT.token.length, 'as long as a token')
})

const KEYED = { headers: ['Idempotency-Key', 'k'], protocol: null }
const REFUSED = ['Idempotency-Retry', 'same-key']

interface Answered {
  readonly headers?: readonly string[]
  readonly body?: Buffer
  readonly declared?: string
  readonly route?: RoutePolicy
}
const decided = (status: number, { headers = [], body, declared, route = ROUTE }: Answered = {}): Outcome =>
  outcomeOf(route, KEYED, { status, headers, ...(body && { body }) }, declared ?? null, RESULT)

const released = (reason: string): Outcome => ({ kind: 'not_executed', reason })
const unsure = (status: number, reason = `the upstream answered ${status}`): Outcome => ({
  kind: 'unknown',
  reason,
  status,
})

void t.test('U08 V04 declaration, refusal, status and Retry-After decide, in this order', async (t) => {
  const answers = (status: number) => released(`the upstream answered ${status}`)
  const refuses = (status: number) => `the proxy behind this one refused the request with ${status}`
  const stripe = routeOf('/a', { profile: 'stripe' })
  const lenient = routeOf('/a', { profile: 'lenient' })
  const body = Buffer.from('{"code":"upstream_unreachable"}')
  const problem = [...REFUSED, 'Content-Type', 'application/problem+json']
  for (const [status, answered, expected, what] of [
    [201, {}, DONE],
    [429, {}, answers(429)],
    [502, {}, unsure(502)],
    [503, {}, unsure(503)],
    [503, { headers: ['Retry-After', '1'] }, answers(503)],
    [502, { declared: 'applied' }, DONE, 'the upstream’s own declaration comes before its status'],
    [201, { declared: 'not-applied' }, answers(201)],
    [201, { declared: 'perhaps' }, DONE, 'another word says nothing'],
    [502, { declared: '' }, unsure(502)],
    [409, { declared: 'applied', headers: REFUSED }, DONE, 'before a refusal, too'],
    [409, {}, DONE, 'an answer of the upstream itself'],
    [409, { headers: REFUSED }, released(refuses(409)), 'the refusal of a proxy behind this one'],
    [502, { headers: REFUSED }, unsure(502), 'as its status says'],
    [502, { route: stripe }, DONE],
    [502, { headers: REFUSED, route: stripe }, unsure(502, refuses(502)), 'never stored'],
    [502, { headers: REFUSED, route: lenient }, answers(502), 'released where the route says so'],
    [502, { headers: problem, body }, released(refuses(502)), 'its problem is read'],
    [502, { headers: problem }, unsure(502), 'unless it was not kept'],
  ] as readonly [number, Answered, Outcome, string?][])
    t.strictSame(decided(status, answered), expected, what ?? `${status} ${JSON.stringify(answered)}`)
})

void t.test('U08 the first digit of a status is its class, and above 599 it is a 5xx', async (t) => {
  const strict = { profile: 'strict', outcomes: ROUTE.outcomes } as const
  for (const [status, action] of [
    [100, 'unknown'],
    [199, 'unknown'],
    [200, 'store'],
    [499, 'store'],
    [500, 'unknown'],
    [599, 'unknown'],
    [999, 'unknown'],
  ] as const)
    t.equal(classify(strict, status, false), action, `${status}`)
  const own = [{ status: 4, when: [], outcome: 'release' } as const]
  t.equal(classify({ profile: 'standard', outcomes: own }, 499, false), 'release', 'the route’s own class')
  t.equal(classify({ profile: 'standard', outcomes: own }, 500, false), 'store')
})

void t.test(
  '§15.13 the first rule that applies decides, and its conditions may look into the body',
  async (t) => {
    const throttled = { pointer: '/errors/0/code', value: 'THROTTLED' }
    const outcomes: OutcomeRule[] = [
      { status: 200, when: [throttled, { pointer: '/retry', value: 'true' }], outcome: 'release' },
      { status: 2, when: [throttled], outcome: 'unknown' },
      { status: 500, when: [{ pointer: '/done', value: '1' }], outcome: 'store' },
      { status: 5, when: [], outcome: 'unknown' },
    ]
    const route = routeOf('/a', { outcomes })
    const both = ['/errors/0/code', '/retry']
    t.strictSame(pointersInto(route, 200), [...both, '/errors/0/code'])
    t.strictSame(pointersInto(route, 500), ['/done'])
    t.strictSame(pointersInto(route, 404), [])
    t.strictSame(
      pointersInto(routeOf('/a', { outcomes: outcomes.slice(3) }), 500),
      [],
      'no rule looks inside',
    )
    const rows: [status: number, body: string, expected: string][] = [
      [200, '{"errors":[{"code":"THROTTLED"}],"retry":true}', 'release'],
      [200, '{"errors":[{"code":"THROTTLED"}],"retry":false}', 'unknown'],
      [200, '{"errors":[{"code":"THROTTLED"}]}', 'unknown'],
      [200, '{"errors":[{"code":"OTHER"},{"code":"THROTTLED"}],"retry":true}', 'store'],
      [200, '{"errors":[]}', 'store'],
      [201, '{"errors":[{"code":"THROTTLED"}],"retry":true}', 'unknown'],
      [404, '{"errors":[{"code":"THROTTLED"}],"retry":true}', 'store'],
      [500, '{"done":1}', 'store'],
      [500, '{"done":1.0}', 'unknown'],
      [500, '{"done":1,"done":1}', 'unknown'],
      [500, '{"done":1', 'unknown'],
      [500, '', 'unknown'],
    ]
    for (const [status, body, expected] of rows) {
      const json = atOnce(lookUp([], Buffer.from(body), pointersInto(route, status)))
      t.equal(classify(route, status, false, json), expected, `${status} ${body}`)
    }
    t.equal(classify(route, 200, false), 'store', 'a body that was not kept')
    const json = atOnce(lookUp([], Buffer.from(rows[0]?.[1] ?? ''), both))
    const released = (declared: string | null): Outcome =>
      outcomeOf(route, KEYED, { status: 200, headers: [] }, declared, RESULT, json)
    t.match(released(null), {
      kind: 'not_executed',
      reason: 'the upstream answered 200 with a body in which /errors/0/code is THROTTLED and /retry is true',
    })
    t.strictSame(released('applied'), DONE, 'its own declaration comes first')
  },
)

const RESPONSE: StoredResponse = {
  status: 201,
  reason: 'Created',
  headers: ['Location', '/p/1', 'Set-Cookie', 'a=1', 'ETag', '"1"', 'set-cookie', 'b=2'],
  body: Buffer.from('ok'),
  trailers: [],
}

void t.test('keep: decided keeps status and Location only', async (t) => {
  const route = routeOf('/a', { keep: 'outcome' })
  t.strictSame(keptResult(route, RESPONSE), {
    kept: false,
    why: 'outcome_only',
    status: 201,
    location: '/p/1',
  })
  t.strictSame(keptResult(ROUTE, RESPONSE), { kept: true, response: RESPONSE })
})

void t.test('excluded headers are left out of what is stored and of what is replayed', async (t) => {
  const route = routeOf('/a', { excludeHeaders: new Set(['set-cookie']) })
  const without = { ...RESPONSE, headers: ['Location', '/p/1', 'ETag', '"1"'] }
  t.strictSame(replayable(route, RESPONSE), without)
  t.strictSame(keptResult(route, RESPONSE), { kept: true, response: without })
  t.equal(replayable(ROUTE, RESPONSE), RESPONSE, 'without such headers, nothing is copied')
})
