import t from 'tap'
import { isKnownUpstream, proofOf } from '../../src/core/reconcile/verify.ts'
import type { Completed, CompletedResponse, IdempotencyRecord } from '../../src/core/record.ts'
import { resolvedDraft } from '../../src/core/settle.ts'
import { draft, newToken } from '../store/fixtures.ts'

const ASKED = {
  request: { method: 'GET', path: '/p?k={key}', headers: [] },
  identity: [],
  completed: [],
  notFound: { status: 404, when: [] },
  pending: null,
  after: 1,
  every: 1,
  attempts: 2,
}
const done: CompletedResponse = { kept: false, why: 'outcome_only', status: 201, location: null }

void t.test(
  'one request found completed proves a status query; one not found, with none completed, refutes it',
  async (t) => {
    const completed = { kind: 'completed', result: done } as const
    const missing = { kind: 'not_found' } as const
    const away = { kind: 'not_sent', why: 'away' } as const
    const broken = { kind: 'unusable', why: 'status 500' } as const
    const pending = { kind: 'pending', why: 'status 202' } as const
    const other = { kind: 'mismatch', why: 'another' } as const
    t.same(proofOf([]), { kind: 'untested' })
    t.same(proofOf([missing, away, completed]), { kind: 'proven' })
    t.same(proofOf([pending, missing, broken]), { kind: 'refuted' })
    t.same(proofOf([pending, away]), { kind: 'unanswered', why: 'away' })
    t.same(proofOf([broken]), { kind: 'unanswered', why: 'status 500' })
    t.same(proofOf([pending, other]), { kind: 'untested' })
  },
)

void t.test(
  'the upstream must know a request that it answered with success and whose identifiers it was told',
  async (t) => {
    const record = (over: Partial<Completed> = {}): IdempotencyRecord => ({
      ...(draft('completed', newToken(), { key: 'k1', told: ['key'], toldTo: 'here' }) as Omit<
        Completed,
        'version'
      >),
      version: 1,
      createdAt: 1,
      updatedAt: 1,
      expiresAt: 10,
      dropAt: 20,
      result: done,
      ...over,
    })
    const known = (one: IdempotencyRecord | null, now = 5): boolean =>
      isKnownUpstream(one, 'create-payment', ASKED, now, 'here')
    t.ok(known(record()))
    t.notOk(known(null))
    t.notOk(known(record(), 10), 'its retention is over')
    t.notOk(known(record({ route: 'other' })))
    t.notOk(known(record({ key: null })))
    t.notOk(known(record({ told: ['record'] })))
    t.notOk(known(record({ toldTo: 'elsewhere' })), 'another upstream answered it')
    for (const status of [199, 302, 402])
      t.notOk(known(record({ result: { ...done, status } })), String(status))
    const { expiresAt: _e, result: _r, ...unknown } = record() as Completed
    const open: IdempotencyRecord = {
      ...unknown,
      state: 'unknown',
      reconciliation: null,
      nextLookAt: 1,
      leaseExpired: false,
      status: null,
    }
    t.notOk(known(open))
    const resolved = resolvedDraft(open, { kind: 'completed', result: done })
    t.notOk(known({ ...record(), token: resolved.token }), 'an operator may have resolved it')
    const byRecord = { ...ASKED, request: { ...ASKED.request, path: '/p/{record}' } }
    t.ok(isKnownUpstream(record({ key: null, told: ['record'] }), 'create-payment', byRecord, 5, 'here'))
  },
)
