/**
 * Creates one charge, however often it has to ask: `node charge.ts AMOUNT KEY`. What it reads from the environment and what its
 * exit codes mean is in docs/clients.md. Nothing but Node.
 */
import { setTimeout as sleep } from 'node:timers/promises'

const { URL: url = 'http://127.0.0.1:8080/v1/charges', TRIES: tries = '6', PAUSE: pause = '1' } = process.env

/** What an answer says: it is the last word, or ask again (and in how many seconds; null: choose). */
type Verdict = { readonly again: false } | { readonly again: true; readonly wait: number | null }

function verdictOf(response: Response, body: string): Verdict {
  const after = response.headers.get('retry-after')
  const again = { again: true, wait: after !== null && /^\d+$/.test(after) ? Number(after) : null } as const
  // The proxy's own answers say what is safe: the same request under the same key, or not.
  if (response.headers.get('content-type') === 'application/problem+json')
    return (JSON.parse(body) as { retry?: string }).retry === 'same-key' ? again : { again: false }
  // A stored answer comes back the same however often it is asked for.
  if (response.headers.has('idempotent-replayed')) return { again: false }
  return [408, 409, 425, 429].includes(response.status) || response.status >= 500 ? again : { again: false }
}

/** The last answer, or null where there was none. Keep the key with the order: whoever calls this again needs the same one. */
async function charge(
  amount: string,
  key: string,
): Promise<{ status: number; body: string; final: boolean } | null> {
  let last: { status: number; body: string; final: boolean } | null = null
  for (let n = 1; n <= Number(tries); n++) {
    let verdict: Verdict = { again: true, wait: null }
    try {
      const response = await fetch(url, {
        method: 'POST',
        headers: {
          Authorization: 'Bearer sk_test_example',
          'Content-Type': 'application/x-www-form-urlencoded',
          'Idempotency-Key': key,
        },
        body: `amount=${amount}&currency=eur&source=tok_visa`,
        signal: AbortSignal.timeout(60_000),
      })
      // Rejects where the body breaks off: then nobody has an answer yet.
      const body = await response.text()
      verdict = verdictOf(response, body)
      last = { status: response.status, body, final: !verdict.again }
      if (last.final) return last
    } catch (error) {
      process.stderr.write(`try ${n}: ${String(error)}\n`)
    }
    // Twice as long each time, and never all clients at once.
    const own = Number(pause) * 2 ** (n - 1) * (0.5 + Math.random() / 2)
    if (n < Number(tries)) await sleep(1000 * (verdict.again && verdict.wait !== null ? verdict.wait : own))
  }
  return last
}

const [amount = '', key = ''] = process.argv.slice(2)
const answer = await charge(amount, key)
const charged = answer?.final === true && answer.status < 300
;(charged ? process.stdout : process.stderr).write(`${answer?.body ?? 'no answer'}\n`)
process.exitCode = charged ? 0 : answer?.final ? 1 : 2
