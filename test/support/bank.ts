import type { IncomingMessage, ServerResponse } from 'node:http'
import type { Test } from 'tap'
import { type Seen, type UpstreamStub, upstreamStub, valueOf } from './upstream.ts'

/** What the bank knows about a key; status queries are answered from it. */
export type Fate = 'paid' | 'declined' | 'processing' | 'unheard'

export interface Bank extends UpstreamStub {
  readonly executed: string[]
  /** Keys of the status queries, in order. */
  readonly asked: string[]
  readonly queries: Seen[]
  fate: (key: string) => Fate
  /** What it does with the POST of a key. */
  fault: (key: string, response: ServerResponse, request: IncomingMessage) => void | Promise<void>
  /** Handles a status query instead of the bank; returns true if it did. */
  trouble: (key: string, response: ServerResponse) => boolean
  /** Until then the canary of the status query is not answered. */
  canaryWaits: Promise<unknown>
  /** Then it gets this status, and what a paid key gets. */
  canaryStatus: number
}

/** An upstream that breaks the connection on `POST /pay` and says at `GET /payments?key=…` what it did. */
export async function bank(t: Test): Promise<Bank> {
  const executed: string[] = []
  const asked: string[] = []
  const queries: Seen[] = []
  const self: Pick<Bank, 'fate' | 'fault' | 'trouble' | 'canaryWaits' | 'canaryStatus'> = {
    fate: () => 'paid',
    fault: (_key, response) => void response.socket?.destroy(),
    trouble: () => false,
    canaryWaits: Promise.resolve(),
    canaryStatus: 404,
  }
  const stub = await upstreamStub(async (seen, response, request) => {
    if (seen.method === 'POST') {
      const key = valueOf(seen, 'idempotency-key')
      executed.push(key)
      await self.fault(key, response, request)
      return
    }
    const query = new URL(seen.target, 'http://bank').searchParams
    const key = (query.get('key') ?? query.get('record')) as string
    if (key.startsWith('canary-')) {
      await self.canaryWaits
      response.writeHead(self.canaryStatus, { 'Content-Type': 'application/json' })
      response.end(JSON.stringify({ key, state: 'paid', payment: {} }))
      return
    }
    asked.push(key)
    queries.push(seen)
    if (self.trouble(key, response)) return
    const fate = self.fate(key)
    const status = fate === 'unheard' ? 404 : 200
    response.writeHead(status, { 'Content-Type': 'application/json', 'X-Inner': 'secret' })
    response.end(JSON.stringify({ key, state: fate, payment: { id: `p-${key}`, state: fate } }))
  })
  t.teardown(() => stub[Symbol.asyncDispose]())
  return Object.assign(self, stub, { executed, asked, queries })
}

/** The route to the bank; `more` adds lines to `reconcile`. */
export function bankRoute(
  upstream: string,
  store: string,
  more: Readonly<Record<string, string>> = {},
): string {
  const lines: Record<string, string> = {
    request:
      '{ path: "/payments?key={key}", headers: { Authorization: "Bearer of-the-proxy", X-Asked: "{key}" } }',
    identity: '{ /key: "{key}" }',
    completed:
      '[{ status: 200, when: { /state: paid }, json: /payment, response: { status: 201 } }, { status: 200, when: { /state: declined }, json: /payment, response: { status: 402, headers: { Content-Type: application/vnd.bank+json, X-Told: later } } }]',
    notFound: '{ status: 404 }',
    every: '100ms',
    after: '1ms',
    ...more,
  }
  return `upstream: { url: "${upstream}", timeout: 5s }
store: { url: "${store}", timeout: 10s }
routes:
  - name: pay
    match: { path: /pay }
    lease: 30s
    reconcile:
${Object.entries(lines)
  .map(([name, value]) => `      ${name}: ${value}`)
  .join('\n')}
`
}
