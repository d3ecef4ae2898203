import t from 'tap'
import { explainRecord, type RouteFacts, type Unexplained } from '../../src/admin/explain.ts'
import type { Report } from '../../src/admin/report.ts'
import { asCsv, asMarkdown, asText, reportText } from '../../src/commands/report.ts'
import { json, plain, span, table } from '../../src/commands/terminal.ts'
import { words } from '../core/fixtures.ts'

const RECORD: Unexplained = {
  id: 'A'.repeat(43),
  route: 'pay',
  state: 'completed',
  fence: 1,
  version: 2,
  createdAt: '2026-01-01T00:00:00.000Z',
  updatedAt: '2026-01-01T00:00:01.000Z',
  leaseUntil: null,
  expiresAt: '2026-01-02T00:00:01.000Z',
  attempts: 1,
  method: 'POST',
  path: '/pay',
  label: null,
  fingerprint: 'B'.repeat(43),
  response: { status: 201, headers: [], size: 2, notKept: null, bodyUntil: null },
  lastError: null,
  reconciliation: null,
  shadowed: null,
  history: [],
}

const UNKEPT = { status: 201, headers: [], size: null, bodyUntil: null }

type Entry = Unexplained['history'][number]
type Period = Report['period'][number]

function event(name: string, detail: Entry['detail'] = {}, count = 1): Entry {
  return { event: name, first: RECORD.createdAt, last: RECORD.updatedAt, count, detail }
}

function told(over: Partial<Unexplained>, route: RouteFacts | null = null): string {
  const { verdict, next } = explainRecord({ ...RECORD, ...over }, route)
  return [...verdict, 'Next:', ...next].join('\n')
}

const claimed = (attempts: number, before: string): Entry => event('claimed', { attempts, before })

void t.test('the verdict says whether and how often a request was executed', async (t) => {
  const leased = { response: null, leaseUntil: '2026-01-01T00:00:30.000Z' }
  const resolved = (detail: Entry['detail']) => event('resolved', { outcome: 'completed', ...detail })
  const stale = event('settled', { result: 'stale' })
  // biome-ignore format: a table
  const cases: readonly (readonly [Partial<Unexplained>, RegExp])[] = [
    [{}, /^It was executed once\.\nThe response was 201; 2 bytes are stored\.\nRetries get it until 2026-01-02/],
    [{ response: { ...UNKEPT, notKept: 'too_large' } }, /The response was 201; its body was not stored/],
    [{ response: { ...UNKEPT, notKept: 'past_ttl' } },
      /The response was 201; its body was dropped after ttl.body\.\nUntil 2026-01-02\S+, retries get 409 with the original status\./],
    [{ response: { ...UNKEPT, size: 2, notKept: null, bodyUntil: '2026-01-01T01:00:01.000Z' } },
      /2 bytes are stored\.\nRetries get it until 2026-01-01T01:00:01.000Z, then 409 with the original status until 2026-01-02/],
    [{ state: 'expired', response: null }, /^It was executed once\.\nNext:/],
    [{ attempts: 2, history: [claimed(1, 'absent'), claimed(2, 'failed_retryable')] },
      /^It was sent upstream twice; the last attempt was executed\.\nEvery earlier attempt counted as not executed/],
    [{ attempts: 3, history: [claimed(1, 'absent'), claimed(2, 'unknown'), claimed(3, 'failed_retryable')] },
      /sent upstream 3 times; .*\nAn attempt was made while the outcome of the previous one was unknown .*, so it may have been executed more than once/],
    // A request that was claimed, stored and answered between two flushes is one entry.
    [{ attempts: 2, history: [event('executed', { before: 'unknown', after: 'completed', status: 201 })] },
      /it may have been executed more than once/],
    [{ attempts: 2, history: [claimed(2, 'failed_retryable'), stale] },
      /counted as not executed[^]*\nThe outcome of an earlier attempt arrived too late.* so it may have been executed more than once/],
    [{ history: [resolved({}), stale] },
      /^It was done, as decided by someone;[^]*\nIts own outcome arrived after that and was refused/],
    [{ history: [resolved({ what: 'resolve', by: 'ada' })] },
      /^It was done, as decided by ada; it was sent upstream once\./],
    [{ history: [resolved({ what: 'outcome' })] }, /^It was done, as reported by someone; /],
    [{ history: [event('reconciled', { result: 'completed' })] },
      /^It was done, according to the upstream; it was sent upstream once/],
    [{ state: 'failed_retryable', response: null, lastError: 'the upstream answered 503' },
      /^It counts as not executed: the upstream answered 503\.\nNext:\nNothing\. The client may retry/],
    [{ state: 'in_progress', ...leased },
      /^It is being executed now \(attempt 1\)\. Its owner must renew the lease by 2026-01-01T00:00:30.000Z\.\nNext:\nWait\./],
    [{ state: 'unknown', response: null, lastError: 'cut' },
      /^It is unknown whether it was executed: cut\.\nIt was sent upstream once, so it was done once or not at all\.\nNext:\nAn operator has to decide\./],
    [{ state: 'unknown', response: null, attempts: 2 }, /so it was done at most twice\./],
    [{ state: 'unknown', ...leased }, /Its owner stopped renewing the lease, which expired at 2026-01-01T00:00:30.000Z\./],
    [{ history: [event('replayed', {}, 3), event('in_progress'), event('waited'), event('misuse', {}, 2)] },
      /5 retries were answered without executing: 3 with the stored response, 1 with .* after waiting for it, 1 as still running\.\n2 requests with this key but different content were refused\./],
    [{ history: [event('bypassed')] }, /also executed while the store was down \(onStoreUnavailable: bypass\)/],
  ]
  for (const [over, says] of cases) t.match(told(over), says)
})

void t.test('an unknown record says who looks at it next, and what a retry does until then', async (t) => {
  const unknown = { state: 'unknown', response: null } as const
  const asked = {
    since: RECORD.createdAt,
    nextLookAt: '2026-01-01T01:00:00.000Z',
    asked: 2,
    deadLettered: false,
    answer: 'status 202',
  }
  t.match(
    told({ ...unknown, reconciliation: asked }),
    /asked twice; the last answer: status 202\.\nNext:\nThe proxy asks the upstream again at 2026-01-01T01:00:00.000Z, or you can decide now/,
  )
  t.match(
    told({ ...unknown, reconciliation: { ...asked, deadLettered: true } }),
    /Next:\nAn operator has to decide/,
  )
  const retry: RouteFacts = { mode: 'enforce', onLeaseExpired: 'retry', reconciles: true }
  const lapsed = { ...unknown, leaseUntil: RECORD.updatedAt }
  t.match(told(lapsed, retry), /onLeaseExpired: retry, so the next retry executes it anyway/)
  t.match(told({ ...unknown, history: [event('lease_expired')] }, retry), /the next retry executes it/)
  t.match(told(unknown, retry), /Until then retries are refused, and a new key is not safe/)
  t.match(
    told(lapsed, { ...retry, onLeaseExpired: 'unknown', reconciles: false }),
    /Until then retries are refused/,
  )
})

void t.test('a record of a route that does not protect says so', async (t) => {
  for (const mode of ['shadow', 'off'] as const)
    for (const over of [{}, { state: 'unknown' }, { state: 'in_progress' }, { state: 'expired' }] as const) {
      const says = told(over, { mode, onLeaseExpired: 'unknown', reconciles: false })
      t.match(says, `The route pay is in mode ${mode}: retries are executed again`)
      t.match(says, `in mode ${mode}, so a retry with the same key is executed`)
      t.notMatch(says, /executed once|is not executed|Retries get it|refused|not at all/)
    }
  t.notMatch(
    told({}, { mode: 'enforce', onLeaseExpired: 'unknown', reconciles: false }),
    /retries are executed again/,
  )
})

void t.test('duplicates forwarded in shadow mode are counted, whatever the mode is now', async (t) => {
  const shadowed = { duplicates: 2, misuse: 0 }
  const executed = /^It was executed at least once, and sent upstream at least 3 times\./
  const besides = /2 duplicates were forwarded in shadow mode and may also have been executed;/
  const enforce: RouteFacts = { mode: 'enforce', onLeaseExpired: 'unknown', reconciles: false }
  for (const route of [null, enforce, { ...enforce, mode: 'shadow' as const }])
    for (const state of ['completed', 'expired'] as const) {
      t.match(told({ state, shadowed }, route), executed)
      t.match(told({ state, shadowed }, route), besides)
    }
  t.match(told({ shadowed }, enforce), /Retries get it until .*[^]*Nothing\. A retry .* is not executed\.$/)
  t.match(told({ shadowed }), /Nothing, if the route is in mode enforce: .* In any other mode it is\.$/)
  t.match(
    told({ shadowed: { duplicates: 0, misuse: 2 } }, enforce),
    /executed at least once, and sent upstream at least once\.[^]*the history shows none\.\n2 requests with this key but different content were forwarded/,
  )
  t.match(
    told({ state: 'unknown', shadowed: { duplicates: 1, misuse: 0 } }),
    /sent upstream at least twice and may have been done each time\.[^]*\n1 duplicate was forwarded/,
  )
  t.match(
    told({ shadowed, history: [event('resolved', { outcome: 'completed' })] }),
    /as decided by someone; it was sent upstream at least 3 times\./,
  )
})

void t.test('control characters from outside are escaped before they reach a terminal', async (t) => {
  const evil = 'a\x1b]0;x\x07\n\x9b2J\u202eb'
  t.equal(plain(evil), 'a\\u001b]0;x\\u0007\\u000a\\u009b2J\\u202eb')
  t.notMatch(table([[evil, 'b']]).trimEnd(), /[\p{Cc}\u202e]/u)
  t.strictSame(JSON.parse(json({ evil })), { evil })
  t.notMatch(json({ evil }).trimEnd(), /[\p{Cc}\u202e]/u)
})

void t.test('durations are shown in their largest unit', async (t) => {
  t.strictSame([500, 59_000, 61_000, 7_200_000, 172_800_000].map(span), ['1s', '59s', '1m', '2h', '2d'])
})

void t.test('a report as text, Markdown or CSV is quoted as each format needs', async (t) => {
  const names = words`records executed expired notExecuted running unknown attempts replayed prevented misuse lapsed
    recovered stale reconciled resolved`
  const figures = { records: 2, executed: 1, unknown: 1, attempts: 2, replayed: 3, prevented: 4 }
  const row = { ...Object.fromEntries(names.map((name) => [name, 0])), ...figures } as Omit<Period, 'route'>
  const report = {
    since: '2026-01-01T00:00:00.000Z',
    now: '2026-01-02T00:00:00.000Z',
    looked: 9,
    complete: false,
    unreadable: 1,
    period: [
      { route: '=a|"b",c', ...row },
      { route: 'd', ...row },
    ],
    unknown: [],
    counted: null,
    asked: null,
  }
  const text = asText(reportText(report))
  t.match(
    text,
    /^Records created from 2026-01-01T00:00:00.000Z to 2026-01-02T00:00:00.000Z, as far as they are still kept\nROUTE +RECORDS +EXECUTED/,
  )
  t.match(text, /\n\(all\) +4 +2 +0 +0 +0 +2 +4 +6 +8 +0/)
  t.match(text, /\nUnknown now, whenever created, by age\nnone\n/)
  t.match(
    text,
    /Only 9 records were read, and there are more: the figures are too low\.\n1 records cannot be read/,
  )
  t.match(text, /No running proxy was asked/)
  t.match(
    asMarkdown(reportText(report)),
    /^## Records created .*\n\n\| route \| records \|.*\n\| --- \| --: \|.*\n\| =a\\\|"b",c \| 2 \| 1 \|/,
  )
  const csv = asCsv(reportText(report)).split('\r\n')
  t.equal(csv[0], 'table,route,figure,value')
  t.equal(csv[1], `period,"'=a|""b"",c",records,2`)
  t.equal(csv.length, 1 + 2 * names.length + 1)
})
