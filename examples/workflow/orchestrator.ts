/**
 * Books: reserve, charge, confirm, notify, each a service behind a proxy of its own. It keeps nothing. The key of each step is made of the
 * record that its own proxy forwards and of the step's name, so whoever repeats the whole repeats each step safely. See README.md.
 */
import { createServer, type IncomingMessage } from 'node:http'
import type { AddressInfo } from 'node:net'
import { json } from 'node:stream/consumers'

const STEPS = ['reserve', 'charge', 'confirm', 'notify'] as const

/** A step neither done nor refused as far as anybody knows: nothing may follow it, and the same request may be sent again. */
class Unsettled extends Error {}

interface Done {
  readonly id: number
}

/** One attempt at the whole; `demo` tells a part where to die. */
class Booking {
  readonly #record: string
  readonly #demo: string

  constructor(record: string, demo: string) {
    this.#record = record
    this.#demo = demo
  }

  async run(order: object): Promise<{ readonly status: number; readonly body: object }> {
    const done = new Map<string, Done>()
    for (const step of STEPS) {
      const answer = await this.#call(step, step, order)
      if (answer === 'refused') {
        for (const [earlier, { id }] of [...done].reverse()) await this.#undo(earlier, id)
        return { status: 424, body: { state: 'cancelled', refused: step } }
      }
      done.set(step, answer)
    }
    return { status: 201, body: { state: 'booked', ...Object.fromEntries(done) } }
  }

  async #undo(step: string, id: number): Promise<void> {
    if ((await this.#call(step, `undo-${step}`, { id })) === 'refused')
      throw new Unsettled(`undo-${step} was refused: a person has to look at ${step} ${id}`)
  }

  async #call(step: string, action: string, body: object): Promise<Done | 'refused'> {
    let response = await this.#post(step, action, body)
    // A refusal counts once it is stored: then every repetition meets it, and takes the same way. The second answer tells.
    if (response.status >= 400 && response.status < 500) response = await this.#post(step, action, body)
    const text = await response.text()
    if (this.#demo === `SIGKILL orchestrator after ${action}`) process.kill(process.pid, 'SIGKILL')
    if (response.ok) return JSON.parse(text) as Done
    if (response.status < 500 && response.headers.get('idempotent-replayed') === 'true') return 'refused'
    throw new Unsettled(`${action}: ${response.status} ${text}`)
  }

  #post(step: string, action: string, body: object): Promise<Response> {
    return fetch(`${process.env[`${step.toUpperCase()}_URL`]}/${action}`, {
      method: 'POST',
      headers: {
        'Idempotency-Key': `${this.#record}.${action}`,
        'Content-Type': 'application/json',
        'X-Demo': this.#demo,
      },
      body: JSON.stringify(body),
      signal: AbortSignal.timeout(15_000),
    }).catch((error: Error) => {
      throw new Unsettled(`${action}: ${error.cause instanceof Error ? error.cause.message : error.message}`)
    })
  }
}

async function book(request: IncomingMessage): Promise<{ readonly status: number; readonly body: object }> {
  const record = request.headers['idempotency-record']
  if (typeof record !== 'string')
    return { status: 400, body: { error: 'this API is called through its proxy' } }
  const order = (await json(request)) as object
  return new Booking(record, String(request.headers['x-demo'] ?? '')).run(order)
}

const server = createServer((request, response) => {
  book(request).then(
    ({ status, body }) =>
      response.writeHead(status, { 'Content-Type': 'application/json' }).end(JSON.stringify(body)),
    (error: Error) => {
      const isUnsettled = error instanceof Unsettled
      // With `Retry-After`, 503 says to the proxy that the same request may be executed again.
      response.writeHead(isUnsettled ? 503 : 400, {
        'Content-Type': 'application/json',
        ...(isUnsettled && { 'Retry-After': '1' }),
      })
      response.end(JSON.stringify({ error: error.message }))
    },
  )
})
server.listen(Number(process.env.PORT ?? 3000), '127.0.0.1', () =>
  process.stdout.write(`listening on http://127.0.0.1:${(server.address() as AddressInfo).port}\n`),
)
