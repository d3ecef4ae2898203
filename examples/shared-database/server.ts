/**
 * A charges API whose tables are in the proxy's own PostgreSQL. It ends its attempt in the transaction that charges, by
 * `idempotency.complete`: both are there, or neither. See README.md beside it and docs/postgres.md.
 */
import { randomBytes } from 'node:crypto'
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { json as jsonOf } from 'node:stream/consumers'
import pg from 'pg'

const url = process.env.DATABASE_URL ?? 'postgres://charges_api@127.0.0.1:5432/charges'
const pool = new pg.Pool({ connectionString: url })
// Of connections that nobody uses: the next one is a new one.
pool.on('error', () => {})

/** The attempt was overtaken, or ended by somebody else. */
const STALE = 'IP002'
const HEADERS = [['Content-Type', 'application/json']]

async function charge(request: IncomingMessage, response: ServerResponse): Promise<void> {
  const { amount } = (await jsonOf(request)) as { amount: number }
  const record = String(request.headers['idempotency-record'])
  const fence = String(request.headers['idempotency-fence'])
  /** `X-Demo: SIGKILL at charged`: what happens to this process, and where. */
  const [signal, , where] = String(request.headers['x-demo'] ?? '').split(' ')
  const at = (step: string): void => {
    if (step === where) process.kill(process.pid, signal)
  }

  at('received')
  const made = { id: `ch_${randomBytes(9).toString('base64url')}`, amount }
  const body = Buffer.from(JSON.stringify(made))
  const client = await pool.connect()
  let isCommitting = false
  try {
    await client.query('BEGIN')
    await client.query('INSERT INTO charges (id, amount, record) VALUES ($1, $2, $3)', [
      made.id,
      amount,
      record,
    ])
    at('charged')
    const attempt = [record, fence, 201, JSON.stringify(HEADERS), body]
    const { rows } = await client.query('SELECT idempotency.complete($1, $2, $3, $4, $5) AS ended', attempt)
    at('ended')
    isCommitting = true
    // Not ended now: this very answer was committed before, and must not be charged for once more.
    await client.query(rows[0].ended === true ? 'COMMIT' : 'ROLLBACK')
    client.release()
  } catch (error) {
    // Not back to the pool: the server rolls back when the connection ends.
    client.release(true)
    say(`attempt ${fence} of ${record}: ${String(error)}`)
    // Nobody knows whether that was committed. The proxy will find out.
    if (isCommitting) return void response.destroy()
    const isStale = (error as { code?: string }).code === STALE
    return answer(response, isStale ? 409 : 503, { error: 'not charged' }, 'not-applied')
  }
  // Only now: what is recorded is the answer, whatever becomes of this one.
  at('committed')
  answer(response, 201, made)
}

function say(line: string): void {
  process.stdout.write(`${line}\n`)
}

/** What became of a record, for the proxy. */
async function find(record: string | null, response: ServerResponse): Promise<void> {
  const { rows } = await pool.query('SELECT id, amount::int, record FROM charges WHERE record = $1', [record])
  if (rows.length > 0) answer(response, 200, rows[0])
  else answer(response, 404, { error: 'no charge' })
}

function answer(response: ServerResponse, status: number, body: object, outcome?: 'not-applied'): void {
  if (outcome !== undefined) response.setHeader('Idempotency-Outcome', outcome)
  response.writeHead(status, HEADERS.flat()).end(JSON.stringify(body))
}

const server = createServer((request, response) => {
  const { pathname, searchParams } = new URL(request.url ?? '/', 'http://api')
  const answered =
    pathname !== '/v1/charges'
      ? answer(response, 404, { error: 'no such resource' })
      : request.method === 'POST'
        ? charge(request, response)
        : find(searchParams.get('record'), response)
  Promise.resolve(answered).catch(() => response.destroy())
})
server.listen(Number(process.env.PORT ?? 3000), '127.0.0.1', () =>
  say(`listening on http://127.0.0.1:${(server.address() as AddressInfo).port}`),
)
