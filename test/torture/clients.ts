import { setTimeout as wait } from 'node:timers/promises'
import { Agent, request } from 'undici'
import type { Answer, History, Operation } from './history.ts'
import type { Random } from './random.ts'

export const ROUTES = ['pay', 'wait', 'keep'] as const
const BODY = '{"amount":100,"currency":"EUR"}'
/** Equal as JSON: the same request, formatted differently. */
const RESPELT = '{ "currency": "EUR", "amount": 1e2 }'
const OTHER = '{"amount":999,"currency":"EUR"}'

/** Whether the two are the same request, as JSON. */
export function isSamePayload(a: string, b: string): boolean {
  return (a === OTHER) === (b === OTHER)
}

/** Responses after which a client that follows the documentation retries. */
function mayRetry({ status, code }: Answer): boolean {
  if (status === 0 || code === 'idempotency_outcome_unknown' || code === 'idempotency_key_in_progress')
    return true
  return [408, 429, 502, 503, 504].includes(status)
}

/** Whether the response is final. */
export function isFinal(answer: Answer): boolean {
  if (answer.code === 'idempotency_response_unavailable' || answer.code === 'idempotency_key_reused')
    return true
  return answer.code === null && (answer.status === 201 || answer.status === 500)
}

/** Clients that charge cards and retry, each operation at any of the replicas. */
export class Clients implements AsyncDisposable {
  readonly #history: History
  readonly #random: Random
  readonly #ports: readonly number[]
  readonly #agent: Agent
  requests = 0
  #operations = 0

  constructor(history: History, random: Random, ports: readonly number[], connections: number) {
    this.#agent = new Agent({ connections, headersTimeout: 8000, bodyTimeout: 8000 })
    this.#history = history
    this.#random = random
    this.#ports = ports
  }

  /** One operation: retried until its response is final, or its client gives up. */
  async operation(): Promise<void> {
    const random = this.#random
    const number = this.#operations++
    // Two callers use the same key: neither may see the other's response.
    const caller = `Bearer ${number % 2 === 0 ? 'alice' : 'bob'}`
    const operation = this.#history.open(random.pick(ROUTES), caller, `k-${Math.floor(number / 2)}`)
    for (let attempt = 0; attempt < 4; attempt++) {
      const together = random.chance(0.15) ? random.between(2, 4) : 1
      const answers = await Promise.all(
        Array.from({ length: together }, async () => {
          if (together > 1) await wait(random.between(0, 30))
          const body = random.chance(0.02) ? OTHER : random.chance(0.1) ? RESPELT : BODY
          const leave = random.chance(0.05) ? random.between(1, 400) : null
          return this.ask(operation, body, leave)
        }),
      )
      // Some retry although they have their response.
      if (!answers.some(mayRetry) && !random.chance(0.1)) return
      await wait(random.between(5, 400))
    }
  }

  /** `leave`: the client goes away after this many milliseconds. */
  async ask(operation: Operation, body = BODY, leave: number | null = null): Promise<Answer> {
    this.requests++
    const port = this.#random.pick(this.#ports)
    const { route, caller, key } = operation
    const nth = this.requests
    this.#history.note(operation, `#${nth} to ${port}${body === OTHER ? ', another payload' : ''}`)
    const answer = await this.#send(
      port,
      `/${route}`,
      { authorization: caller, 'idempotency-key': key },
      body,
      leave,
    )
    // Equal bytes are kept once.
    const same = operation.executions.find(({ body }) => body === answer.body)
    operation.answers.push(same === undefined ? answer : { ...answer, body: same.body })
    const what =
      answer.status === 0 ? 'no answer' : (answer.code ?? `${answer.status} ${answer.body.slice(0, 90)}`)
    this.#history.note(operation, `#${nth} ${answer.replayed ? 'replayed ' : ''}${what}`)
    return answer
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#agent.destroy()
  }

  async #send(
    port: number,
    path: string,
    headers: Readonly<Record<string, string>>,
    body: string,
    leave: number | null,
  ): Promise<Answer> {
    try {
      const response = await request(`http://127.0.0.1:${port}${path}`, {
        method: 'POST',
        dispatcher: this.#agent,
        headers: { ...headers, 'content-type': 'application/json' },
        body,
        ...(leave === null ? {} : { signal: AbortSignal.timeout(leave) }),
      })
      const text = await response.body.text()
      const own = response.headers['content-type'] === 'application/problem+json'
      return {
        status: response.statusCode,
        code: own ? (JSON.parse(text) as { code: string }).code : null,
        replayed: response.headers['idempotent-replayed'] === 'true',
        body: text,
        payload: body,
      }
    } catch {
      return { status: 0, code: null, replayed: false, body: '', payload: body }
    }
  }
}
