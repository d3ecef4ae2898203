import { createHash } from 'node:crypto'
import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { REFUSALS, type RefusalCode, refusal } from '../../src/core/refusal.ts'
import { PAGE_HEADERS, refusalPage } from '../../src/http/refusal-page.ts'

const ID = 'Ab1-_'.padEnd(43, 'x') as RecordId
const CODES = Object.keys(REFUSALS) as RefusalCode[]

t.test('every refusal has a page without technical terms', async (t) => {
  for (const code of CODES) {
    const page = refusalPage(refusal(code, 'scope.caller: <b>detail for developers</b>', { instance: ID }))
    t.match(page, /^<!doctype html>\n<html lang="en">/)
    t.match(page, `reference ${ID.slice(0, 12)}<`, code)
    t.notMatch(page, ID, 'the whole id is only in the problem')
    t.notMatch(page, /scope|caller|upstream|idempoten|key|proxy|record|store\b|<b>|undefined|null/i, code)
    t.match(page, `Status ${REFUSALS[code].status}`)
  }
})

t.test('the page of a request that may have been done never asks to start over', async (t) => {
  for (const code of [
    'idempotency_outcome_unknown',
    'idempotency_key_in_progress',
    'upstream_failed',
    'upstream_timeout',
    'upstream_slow',
  ] as const) {
    const kept = refusalPage(refusal(code, '', { instance: ID, retryAfter: 7 }))
    t.match(kept, 'Do not fill in the form again')
    t.match(kept, 'Wait 7 seconds, then reload this page.')
    t.match(kept, 'it is not carried out twice')
  }
  t.match(refusalPage(refusal('idempotency_outcome_unknown', '', { instance: ID })), 'may have been made')
})

t.test('where nobody checks the outcome, the page says whom to ask instead', async (t) => {
  const more = { instance: ID, retryAfter: 29, checking: false }
  const page = refusalPage(refusal('idempotency_outcome_unknown', '', more))
  t.match(page, 'We do not know what became of your request')
  t.match(page, 'may already have been carried out')
  t.match(page, 'contact us and give the reference below')
  t.match(page, `reference ${ID.slice(0, 12)}<`)
  t.notMatch(page, /checking|wait|reload|yet/i)
})

t.test('the page of a form without its key says what to change before it is opened again', async (t) => {
  for (const code of ['idempotency_key_missing', 'idempotency_key_invalid'] as const)
    t.match(refusalPage(refusal(code, '')), /may need JavaScript: .* allow it .* comes back, please tell us/)
})

t.test('the page blames no visitor for a caller not configured, or not to be checked', async (t) => {
  const page = (status: number): string => refusalPage(refusal('idempotency_caller_missing', '', { status }))
  t.match(page(401), 'Sign in')
  for (const status of [400, 503]) t.notMatch(page(status), /sign in|who you are/i)
  t.match(page(400), /Nothing was done\. This is our mistake, not yours.*tell us/)
  t.match(page(503), 'We cannot take your request at the moment')
  for (const status of [400, 503]) t.notMatch(page(status), /scope|caller|idempoten|key|proxy|record/i)
})

t.test('no page promises that a reload is safe where it may find no record', async (t) => {
  for (const code of CODES)
    for (const more of [{}, { instance: ID, remembered: false }])
      t.notMatch(refusalPage(refusal(code, '', more)), /carried out twice/, code)
  for (const code of ['idempotency_key_in_progress', 'idempotency_outcome_unknown', 'upstream_slow'] as const)
    t.notMatch(refusalPage(refusal(code, '', { instance: ID, remembered: false })), /reload/i, code)
})

t.test('the page of a failed upstream does not suggest a reload without a record', async (t) => {
  for (const code of ['upstream_failed', 'upstream_timeout', 'upstream_slow'] as const) {
    const page = refusalPage(refusal(code, ''))
    t.notMatch(page, /reload/i)
    t.match(page, 'before you try again')
  }
})

t.test('a page suggests a reload exactly where the same key is safe', async (t) => {
  for (const code of CODES) {
    const { retry } = REFUSALS[code]
    const page = refusalPage(refusal(code, '', { instance: ID, retryAfter: 1 }))
    if (retry === 'same-key') t.match(page, 'Wait a second, then reload this page.', code)
    else t.notMatch(page, /reload/i, code)
  }
  t.match(refusalPage(refusal('overloaded', '')), '<p>Reload this page.')
  t.match(refusalPage(refusal('idempotency_caller_missing', '', { retry: 'same-key' })), 'Reload this page.')
})

t.test('the content security policy allows the style of the page and nothing else', async (t) => {
  const [, style = ''] = /<style>(.*)<\/style>/.exec(refusalPage(refusal('overloaded', ''))) ?? []
  const hash = createHash('sha256').update(style).digest('base64')
  t.match(PAGE_HEADERS.join(), `default-src 'none'; style-src 'sha256-${hash}'`)
})
