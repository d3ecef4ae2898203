/**
 * A small payments API. It knows nothing of idempotency: every POST that reaches it is one more charge in a
 * database of its own, so its counter tells how often the work was really done. See README.md beside it.
 */
import { randomBytes } from 'node:crypto'
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import { DatabaseSync } from 'node:sqlite'
import { setTimeout as sleep } from 'node:timers/promises'
import { parseArgs } from 'node:util'

const { values: flags } = parseArgs({
  options: {
    port: { type: 'string', default: process.env.PORT ?? '3000' },
    host: { type: 'string', default: process.env.HOST ?? '127.0.0.1' },
    db: { type: 'string', default: process.env.DATABASE ?? 'payments.db' },
  },
})

/** More than any example needs; a payment is a line of JSON. */
const MAX_BODY = 64 * 1024
/** The longest that `X-Demo-Delay` may hold an answer back. */
const MAX_DELAY = 60_000

const db = new DatabaseSync(flags.db)
// `key` is written down so that the demo can count charges per key. Nothing here ever looks a key up before
// charging: the column has no constraint on purpose.
db.exec(`
  PRAGMA journal_mode = WAL;
  CREATE TABLE IF NOT EXISTS payments (
    n        INTEGER PRIMARY KEY,
    id       TEXT NOT NULL UNIQUE,
    amount   INTEGER NOT NULL,
    currency TEXT NOT NULL,
    created  TEXT NOT NULL,
    key      TEXT
  );
`)
const insert = db.prepare('INSERT INTO payments (id, amount, currency, created, key) VALUES (?, ?, ?, ?, ?)')
const byId = db.prepare('SELECT id, amount, currency, created FROM payments WHERE id = ?')
const list = db.prepare(`
  SELECT id, amount, currency, created FROM payments WHERE ?1 IS NULL OR key = ?1 ORDER BY n DESC LIMIT 100`)
const count = db.prepare(`
  SELECT count(*) AS charges, coalesce(sum(amount), 0) AS total FROM payments WHERE ?1 IS NULL OR key = ?1`)

const server = createServer((req, res) => {
  handle(req, res).catch((error: unknown) => {
    process.stderr.write(`${error instanceof Error ? error.stack : String(error)}\n`)
    if (!res.headersSent) problem(res, 500, 'Internal error')
    else res.destroy()
  })
})

async function handle(req: IncomingMessage, res: ServerResponse): Promise<void> {
  const url = new URL(req.url ?? '/', 'http://payments')
  if (url.pathname === '/healthz') return json(res, 200, { ok: true })
  if (url.pathname === '/v1/payments') {
    if (req.method === 'POST') return charge(req, res)
    if (req.method === 'GET' || req.method === 'HEAD') {
      const key = url.searchParams.get('key')
      return json(res, 200, { ...count.get(key), payments: list.all(key) })
    }
    return problem(res, 405, 'Use GET or POST', { Allow: 'GET, HEAD, POST' })
  }
  const id = /^\/v1\/payments\/([^/]+)$/.exec(url.pathname)?.[1]
  const payment = id === undefined ? undefined : byId.get(id)
  if (payment === undefined) return problem(res, 404, 'No such resource')
  if (req.method !== 'GET' && req.method !== 'HEAD')
    return problem(res, 405, 'Use GET', { Allow: 'GET, HEAD' })
  return json(res, 200, payment)
}

async function charge(req: IncomingMessage, res: ServerResponse): Promise<void> {
  const body = await readBody(req)
  if (body === null)
    return problem(res, 413, `A payment has at most ${MAX_BODY} bytes`, { Connection: 'close' })
  const order = parseOrder(body)
  if (order === null) return problem(res, 400, 'Expected JSON with a positive integer amount and a currency')
  const delay = parseDelay(req.headers['x-demo-delay'])
  if (delay === null) return problem(res, 400, 'X-Demo-Delay is like 800ms or 2s, at most 60s')

  const payment = {
    id: `pay_${randomBytes(9).toString('base64url')}`,
    amount: order.amount,
    currency: order.currency,
    created: new Date().toISOString(),
  }
  const key = req.headers['idempotency-key']
  insert.run(
    payment.id,
    payment.amount,
    payment.currency,
    payment.created,
    typeof key === 'string' ? key : null,
  )
  process.stdout.write(`charged ${payment.amount} ${payment.currency} as ${payment.id}\n`)

  // The money has moved; from here on only the answer can get lost.
  if (delay > 0) await sleep(delay)
  if (req.headers['x-demo'] === 'drop-answer') {
    req.socket.destroy()
    return
  }
  json(res, 201, payment, { Location: `/v1/payments/${payment.id}` })
}

async function readBody(req: IncomingMessage): Promise<string | null> {
  const chunks: Buffer[] = []
  let size = 0
  for await (const chunk of req as AsyncIterable<Buffer>) {
    size += chunk.length
    if (size > MAX_BODY) return null
    chunks.push(chunk)
  }
  return Buffer.concat(chunks).toString('utf8')
}

function parseOrder(body: string): { amount: number; currency: string } | null {
  let value: unknown
  try {
    value = JSON.parse(body)
  } catch {
    return null
  }
  if (typeof value !== 'object' || value === null || !('amount' in value) || !('currency' in value))
    return null
  const { amount, currency } = value
  if (typeof amount !== 'number' || !Number.isSafeInteger(amount) || amount <= 0) return null
  if (typeof currency !== 'string' || !/^[A-Za-z]{3}$/.test(currency)) return null
  return { amount, currency: currency.toLowerCase() }
}

function parseDelay(header: string | string[] | undefined): number | null {
  if (header === undefined) return 0
  const [, digits, unit] = /^(\d{1,6})(ms|s)$/.exec(String(header)) ?? []
  if (digits === undefined) return null
  const ms = Number(digits) * (unit === 's' ? 1000 : 1)
  return ms <= MAX_DELAY ? ms : null
}

function json(res: ServerResponse, status: number, body: object, headers: Record<string, string> = {}): void {
  const bytes = Buffer.from(`${JSON.stringify(body)}\n`)
  res.writeHead(status, { 'Content-Type': 'application/json', 'Content-Length': bytes.length, ...headers })
  res.end(bytes)
}

function problem(res: ServerResponse, status: number, title: string, headers?: Record<string, string>): void {
  json(res, status, { title, status }, { 'Content-Type': 'application/problem+json', ...headers })
}

let stopping = false

function stop(): void {
  if (stopping) return
  stopping = true
  // Answers that are on their way are finished; idle connections are closed at once.
  server.close(() => db.close())
  server.closeIdleConnections()
}

process.once('SIGTERM', stop)
process.once('SIGINT', stop)

server.listen(Number(flags.port), flags.host, () => {
  const address = server.address()
  if (address === null || typeof address === 'string') return
  const host = address.family === 'IPv6' ? `[${address.address}]` : address.address
  process.stdout.write(`${JSON.stringify({ msg: 'listening', url: `http://${host}:${address.port}` })}\n`)
})
