/**
 * A charges API that can be asked what it did. It does nothing about retries: it only writes down, with each charge, the
 * `Idempotency-Record` that the proxy sends along, and answers questions by it. See README.md beside it.
 */
import { timingSafeEqual } from 'node:crypto'
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import { json } from 'node:stream/consumers'
import { parseArgs } from 'node:util'

const { values: flags } = parseArgs({
  options: {
    port: { type: 'string', default: process.env.PORT ?? '3000' },
    host: { type: 'string', default: process.env.HOST ?? '127.0.0.1' },
  },
})
/** Who may ask: the proxy, with credentials of its own. */
const TOKEN = `Bearer ${process.env.RECONCILE_TOKEN ?? 'only-for-this-example'}`

interface Charge {
  readonly id: string
  readonly record: string
  readonly amount: number
  readonly state: 'succeeded' | 'declined'
}
const charges: Charge[] = []

const server = createServer((request, response) => {
  handle(request, response).catch(() => answer(response, 400, { error: 'not understood' }))
})

async function handle(request: IncomingMessage, response: ServerResponse): Promise<void> {
  const { pathname, searchParams } = new URL(request.url ?? '/', 'http://charges')
  if (request.method === 'GET' && pathname === '/healthz')
    return answer(response, 200, { charges: charges.length })
  if (pathname !== '/v1/charges') return answer(response, 404, { error: 'no such thing' })
  if (request.method === 'POST') return charge(request, response)

  const asked = Buffer.from(request.headers.authorization ?? '')
  const known = Buffer.from(TOKEN)
  if (asked.length !== known.length || !timingSafeEqual(asked, known))
    return answer(response, 401, { error: 'the reconciler alone may ask' })
  const found = charges.find(({ record }) => record === searchParams.get('record'))
  // Never 404 for a question that was not understood: 404 frees a key.
  if (!searchParams.has('record')) return answer(response, 400, { error: 'which record?' })
  return found === undefined
    ? answer(response, 404, { error: 'no such charge' })
    : answer(response, 200, found)
}

/** `X-Demo: drop-answer` charges and cuts the connection; `drop-request` cuts it before anything is done. */
async function charge(request: IncomingMessage, response: ServerResponse): Promise<void> {
  const { amount } = (await json(request)) as { amount: number }
  const trouble = request.headers['x-demo']
  if (trouble === 'drop-request') return void request.socket.destroy()
  const made: Charge = {
    id: `ch_${charges.length + 1}`,
    record: String(request.headers['idempotency-record']),
    amount,
    state: amount > 100_000 ? 'declined' : 'succeeded',
  }
  charges.push(made)
  if (trouble === 'drop-answer') return void request.socket.destroy()
  answer(response, made.state === 'declined' ? 402 : 201, made)
}

function answer(response: ServerResponse, status: number, body: unknown): void {
  response.writeHead(status, { 'Content-Type': 'application/json' }).end(JSON.stringify(body))
}

server.listen(Number(flags.port), flags.host, () => {
  const address = server.address()
  const port = typeof address === 'object' && address !== null ? address.port : flags.port
  process.stdout.write(`charges API on http://${flags.host}:${port}\n`)
})
process.once('SIGTERM', () => server.close().closeAllConnections())
