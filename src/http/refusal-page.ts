import { hash } from 'node:crypto'
import type { Refusal, RefusalCode } from '../core/refusal.ts'

/** Refusals in words for people using a browser. The problem and the log have the details for developers and operators. */
interface PageText {
  readonly title: string
  readonly text: string
}

const UNSURE =
  'Your request may already have been carried out: a payment may have been made, an order placed. Do not fill in the form again.'

const UNSENDABLE =
  'Nothing was done. The page with the form may need JavaScript: where your browser blocks it, allow it for this site first. Then open that page again, fill in the form and send it. If this message comes back, please tell us.'

const PAGES: Readonly<Record<RefusalCode, PageText>> = {
  idempotency_key_missing: {
    title: 'This form cannot be sent',
    text: UNSENDABLE,
  },
  idempotency_key_invalid: {
    title: 'This form cannot be sent',
    text: UNSENDABLE,
  },
  idempotency_caller_missing: {
    title: 'We do not know who you are',
    text: 'Nothing was done. Sign in, open the form again and send it.',
  },
  idempotency_key_reused: {
    title: 'You have sent this form before',
    text: 'It was sent with other details, and only the first ones count. What you sent now was not carried out. Check what became of your first request; to send another one, open the form again.',
  },
  idempotency_key_in_progress: {
    title: 'Your request is being carried out',
    text: 'You have sent this form already. Do not fill in the form again.',
  },
  idempotency_outcome_unknown: { title: 'We do not know yet what became of your request', text: UNSURE },
  idempotency_response_unavailable: {
    title: 'Your request has been dealt with',
    text: 'We cannot show you its result again. Do not send the form again: look in your account, or ask us.',
  },
  idempotency_key_expired: {
    title: 'This form is too old',
    text: 'It may have been carried out when it was first sent. Check that before you fill in a new one.',
  },
  idempotency_store_unavailable: {
    title: 'We cannot take your request at the moment',
    text: 'It was not carried out this time.',
  },
  replay_forbidden: {
    title: 'You may not see this result',
    text: 'Sign in with the account with which the form was first sent. Do not fill in the form again.',
  },
  replay_unauthorized_yet: {
    title: 'We cannot show you the result at the moment',
    text: 'Do not fill in the form again.',
  },
  rate_limited: { title: 'Too many requests', text: 'Nothing was done.' },
  request_too_large: {
    title: 'What you sent is too large',
    text: 'Nothing was done. Go back and choose smaller files.',
  },
  upstream_unreachable: { title: 'The service cannot be reached', text: 'Nothing was done.' },
  upstream_failed: { title: 'We do not know what became of your request', text: UNSURE },
  upstream_timeout: { title: 'We do not know what became of your request', text: UNSURE },
  upstream_slow: {
    title: 'Your request takes longer than usual',
    text: 'It is still being carried out. Do not fill in the form again.',
  },
  request_timeout: { title: 'Your request did not arrive', text: 'Nothing was done.' },
  overloaded: { title: 'We are very busy', text: 'Your request was not taken this time.' },
  route_not_found: { title: 'Page not found', text: 'There is nothing at this address.' },
  loop_detected: { title: 'The service cannot be reached', text: 'Nothing was done. Tell us, please.' },
  request_malformed: {
    title: 'Your browser sent something that we do not understand',
    text: 'Nothing was done.',
  },
}

/** For requests that may have executed: without a record, reloading may execute them again. */
const UNCERTAIN: ReadonlySet<RefusalCode> = new Set([
  'idempotency_key_in_progress',
  'idempotency_outcome_unknown',
  'upstream_failed',
  'upstream_timeout',
  'upstream_slow',
])

/** For a caller that the operator has not said how to identify, or that cannot be verified now: signing in would not help. */
const UNIDENTIFIABLE: Readonly<Record<number, PageText>> = {
  400: {
    title: 'We cannot accept this form',
    text: 'Nothing was done. This is our mistake, not yours: our site is not ready for this form yet. Please tell us.',
  },
  503: PAGES.idempotency_store_unavailable,
}

/** For outcomes that only an operator can find out. */
const UNDECIDED: PageText = {
  title: 'We do not know what became of your request',
  text: `${UNSURE} Please contact us and give the reference below: we will find out.`,
}

function advice({ code, retry, retryAfter, instance, checking, remembered }: Refusal): string {
  if (retry !== 'same-key') return ''
  if (!checking) return ''
  const isKept = instance !== null && remembered
  if (UNCERTAIN.has(code) && !isKept) return 'Check what became of it before you try again.'
  const wait =
    retryAfter === null ? '' : `Wait ${retryAfter === 1 ? 'a second' : `${retryAfter} seconds`}, then `
  const promise = isKept ? ': it is not carried out twice' : ''
  return `${wait === '' ? 'Reload' : `${wait}reload`} this page. If your browser asks whether to send the form again, say yes${promise}.`
}

const STYLE =
  'body{font:1.1rem/1.6 system-ui,sans-serif;max-width:36rem;margin:4rem auto;padding:0 1rem;color:#1b1b1b;background:#fff}h1{font-size:1.5rem;line-height:1.3}small{color:#595959}@media(prefers-color-scheme:dark){body{color:#eee;background:#161616}small{color:#aaa}}'

/** Loads, runs and sends nothing; the only style is named by its hash. */
export const PAGE_HEADERS: readonly string[] = [
  'Vary',
  'Accept',
  'Content-Security-Policy',
  `default-src 'none'; style-src 'sha256-${hash('sha256', STYLE, 'base64')}'; base-uri 'none'; form-action 'none'`,
  'X-Content-Type-Options',
  'nosniff',
]

/** The refusal as a page. */
export function refusalPage(refused: Refusal): string {
  const { code, status, checking } = refused
  const other = code === 'idempotency_caller_missing' ? UNIDENTIFIABLE[status] : undefined
  const { title, text } = checking ? (other ?? PAGES[code]) : UNDECIDED
  const reference = refused.instance === null ? '' : `, reference ${refused.instance.slice(0, 12)}`
  return `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>${escaped(title)}</title>
<style>${STYLE}</style>
<h1>${escaped(title)}</h1>
<p>${escaped(text)}
<p>${escaped(advice(refused))}
<p><small>Status ${status}${escaped(reference)}</small>
`
}

function escaped(text: string): string {
  return text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`)
}
