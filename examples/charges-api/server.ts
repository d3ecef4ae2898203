/**
 * A charges API that looks like Stripe's: `POST /v1/charges` with a form body, errors in Stripe's envelope. It knows
 * nothing of idempotency: every POST that reaches it is one more charge, and it counts them per `Idempotency-Key`. It can
 * be told to be slow, or to break off at the worst moment. See README.md beside it.
 */
import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { text } from 'node:stream/consumers'
import { setTimeout as sleep } from 'node:timers/promises'
import { parseArgs } from 'node:util'

export interface Charge {
  readonly id: string
  readonly object: 'charge'
  readonly amount: number
  readonly currency: string
  /** Seconds since 1970. */
  readonly created: number
  readonly description: string | null
  readonly paid: true
  readonly status: 'succeeded'
}

/** What happens to one request that would be charged. */
export interface Trouble {
  /** Milliseconds between the charge and its answer. */
  readonly delay?: number
  /** The answer waits for it, too (in process only). */
  readonly until?: Promise<void>
  /** Where the connection is cut: nothing is charged before `charge`; after it the money has moved. */
  readonly die?: 'before the charge' | 'after the charge' | 'in the answer'
}

export interface ChargesApi extends AsyncDisposable {
  readonly url: string
  readonly port: number
  /** Every charge that was made, with the key it came under. */
  readonly made: readonly { readonly key: string | null; readonly charge: Charge }[]
  /** What was charged under this key. More than one is the accident that the proxy prevents. */
  under(key: string): Charge[]
  /** Troubles of the requests to come, first come, first served. */
  trouble(...troubles: Trouble[]): void
  /** Resolves when the n-th charge (from 1) has been made. */
  charged(n: number): Promise<void>
}

export async function startChargesApi(port = 0, host = '127.0.0.1'): Promise<ChargesApi> {
  const made: { key: string | null; charge: Charge }[] = []
  const troubles: Trouble[] = []
  const waiting: { n: number; resolve: () => void }[] = []

  async function createCharge(req: IncomingMessage, res: ServerResponse): Promise<void> {
    const form = new URLSearchParams(await text(req))
    if (!req.headers.authorization?.startsWith('Bearer sk_'))
      return error(res, 401, 'invalid_request_error', 'No API key provided')
    const amount = Number(form.get('amount'))
    if (!Number.isSafeInteger(amount) || amount <= 0)
      return error(res, 400, 'invalid_request_error', 'Invalid positive integer: amount')
    if (form.get('source') === 'tok_chargeDeclined')
      return error(res, 402, 'card_error', 'Your card was declined.')

    const { delay = 0, until, die } = troubles.shift() ?? {}
    if (die === 'before the charge') return void req.socket.destroy()
    const key = req.headers['idempotency-key']
    const charge: Charge = {
      id: `ch_${randomBytes(12).toString('hex')}`,
      object: 'charge',
      amount,
      currency: form.get('currency') ?? 'eur',
      created: Math.floor(Date.now() / 1000),
      description: form.get('description'),
      paid: true,
      status: 'succeeded',
    }
    made.push({ key: typeof key === 'string' ? key : null, charge })
    for (const { n, resolve } of waiting) if (made.length >= n) resolve()

    // The money has moved; from here on only the answer can get lost.
    await sleep(delay)
    await until
    if (die === 'after the charge') return void req.socket.destroy()
    if (die === 'in the answer') {
      const bytes = Buffer.from(JSON.stringify(charge))
      res.writeHead(200, { 'Content-Type': 'application/json', 'Content-Length': bytes.length })
      res.write(bytes.subarray(0, bytes.length / 2), () => req.socket.destroy())
      return
    }
    json(res, 200, charge)
  }

  async function handle(req: IncomingMessage, res: ServerResponse): Promise<void> {
    const { pathname, searchParams } = new URL(req.url ?? '/', 'http://charges')
    const route = `${req.method} ${pathname}`
    if (route === 'POST /v1/charges') return createCharge(req, res)
    if (route === 'GET /admin/charges') {
      const key = searchParams.get('key')
      const found = made.filter((one) => key === null || one.key === key).map(({ charge }) => charge)
      return json(res, 200, { count: found.length, charges: found })
    }
    if (route === 'POST /admin/trouble') {
      troubles.push(JSON.parse(await text(req)) as Trouble)
      return json(res, 200, { troubles: troubles.length })
    }
    const id = /^GET \/v1\/charges\/([^/]+)$/.exec(route)?.[1]
    const found = made.find(({ charge }) => charge.id === id)
    if (found !== undefined) return json(res, 200, found.charge)
    return error(res, 404, 'invalid_request_error', `No such resource: ${route}`)
  }

  const server = createServer((req, res) => {
    // The client may leave while its request is read; nothing is charged then.
    handle(req, res).catch(() => res.destroy())
  })
  server.listen(port, host)
  await once(server, 'listening')
  const { port: chosen } = server.address() as AddressInfo
  return {
    url: `http://${host}:${chosen}`,
    port: chosen,
    made,
    under: (key) => made.filter((one) => one.key === key).map(({ charge }) => charge),
    trouble: (...more) => void troubles.push(...more),
    charged: (n) =>
      made.length >= n ? Promise.resolve() : new Promise((resolve) => waiting.push({ n, resolve })),
    async [Symbol.asyncDispose]() {
      server.closeAllConnections()
      await new Promise((resolve) => server.close(resolve))
    },
  }
}

function json(res: ServerResponse, status: number, body: object): void {
  const bytes = Buffer.from(JSON.stringify(body))
  res.writeHead(status, { 'Content-Type': 'application/json', 'Content-Length': bytes.length })
  res.end(bytes)
}

function error(res: ServerResponse, status: number, type: string, message: string): void {
  json(res, status, { error: { type, message } })
}

if (import.meta.main) {
  const { values: flags } = parseArgs({
    options: {
      port: { type: 'string', default: process.env.PORT ?? '3000' },
      host: { type: 'string', default: process.env.HOST ?? '127.0.0.1' },
    },
  })
  const api = await startChargesApi(Number(flags.port), flags.host)
  process.stdout.write(`${JSON.stringify({ msg: 'listening', url: api.url })}\n`)
  for (const signal of ['SIGTERM', 'SIGINT'] as const)
    process.once(signal, () => void api[Symbol.asyncDispose]())
}
