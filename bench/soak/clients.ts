import { once } from 'node:events'
import { connect, type Socket } from 'node:net'
import { setTimeout as wait } from 'node:timers/promises'
import { Pool } from 'undici'
import type { Ledger } from './ledger.ts'

export interface Ask {
  readonly path: string
  readonly method?: string
  /** `null`: none. */
  readonly key?: string | null
  /** The driver's own number of the operation, the same for all its attempts. */
  readonly operation?: string
  /** How the upstream answers (upstream.ts). */
  readonly act?: string
  readonly type?: string | null
  readonly body?: Buffer | string
  readonly caller?: string
  readonly headers?: Readonly<Record<string, string>>
}

export interface Reply {
  /** 0: the connection ended before the answer did. */
  readonly status: number
  /** `code` of the proxy's own answers. */
  readonly code: string | null
  readonly replayed: boolean
  readonly text: string
  /** Explained by an outage, or a machine that stood still: the next expectation need not hold. */
  readonly excused: boolean
}

/** The tools of a lane of the driver. */
export interface Work {
  readonly clients: Clients
  /** A number between 0 and 1; the same sequence in every run. */
  readonly random: () => number
  /** A new number of an operation, also its key. */
  readonly next: () => string
}

/** One kind of traffic: some requests that belong together. */
export type Scenario = (work: Work) => Promise<void>

/** Answers of the proxy that an outage explains for any request. */
const OUTAGE = new Set(['idempotency_store_unavailable', 'overloaded', 'upstream_unreachable'])
/** Answers explained by a machine that stood still for a while. */
const LATE = new Set([
  'upstream_timeout',
  'upstream_unreachable',
  'upstream_slow',
  'request_timeout',
  'idempotency_key_in_progress',
])
/** Pause of a client that is told to retry. */
const BACK_OFF = 25

/** Sends all requests to the proxy, counts them, and judges the answers. */
export class Clients {
  readonly port: number
  readonly #ledger: Ledger
  readonly #connections: number
  #pool: Pool
  requests = 0
  replays = 0
  /** Requests in shadow mode that were left before their answer. */
  cutInShadow = 0
  /** Answers by status and code. */
  readonly answers = new Map<string, number>()
  /** Unexpected events, with their counts. */
  readonly wrong = new Map<string, number>()

  constructor(port: number, connections: number, ledger: Ledger) {
    this.port = port
    this.#ledger = ledger
    this.#connections = connections
    this.#pool = this.#open()
  }

  /** Sends it; the answer must be among `expected` (statuses, or codes), or be explained by an outage. */
  async ask(ask: Ask, ...expected: readonly (number | string)[]): Promise<Reply> {
    this.requests++
    const reply = await this.#send(ask)
    const result = reply.code ?? reply.status
    this.answers.set(String(result), (this.answers.get(String(result)) ?? 0) + 1)
    const wanted = expected.includes(result)
    const excused = !wanted && (OUTAGE.has(String(result)) || LATE.has(String(result)))
    if (!wanted && !excused)
      this.blame(`${ask.path}, ${ask.act ?? 'ok'}: answered ${result} instead of ${expected.join(' or ')}`)
    if (OUTAGE.has(String(result))) await wait(BACK_OFF)
    return { ...reply, excused }
  }

  blame(what: string): void {
    this.wrong.set(what, (this.wrong.get(what) ?? 0) + 1)
  }

  /** A raw connection, for behaviour of no HTTP client. Its errors are expected; it is counted as a request. */
  async raw(...pieces: readonly (string | Buffer)[]): Promise<Socket> {
    this.requests++
    const socket = connect(this.port, '127.0.0.1')
    socket.on('error', () => {})
    await Promise.race([once(socket, 'connect'), once(socket, 'close')])
    for (const piece of pieces) socket.write(piece)
    return socket
  }

  /** Closes every connection; the next request opens new ones. */
  async rest(): Promise<void> {
    const pool = this.#pool
    this.#pool = this.#open()
    await pool.destroy()
  }

  async close(): Promise<void> {
    await this.#pool.destroy()
  }

  #open(): Pool {
    return new Pool(`http://127.0.0.1:${this.port}`, {
      connections: this.#connections,
      headersTimeout: 15_000,
      bodyTimeout: 15_000,
    })
  }

  async #send(ask: Ask): Promise<Omit<Reply, 'excused'>> {
    const { method = 'POST', path, body = null } = ask
    try {
      const response = await this.#pool.request({ method, path, headers: headersOf(ask), body })
      const own = response.headers['content-type'] === 'application/problem+json'
      const small = own || path.startsWith('/keys')
      const text = small ? await response.body.text() : ''
      if (!small) for await (const _ of response.body);
      const replayed = response.headers['idempotent-replayed'] === 'true'
      if (replayed) this.#checkReplay(ask, response.headers['x-execution'])
      const code = own ? (JSON.parse(text) as { code: string }).code : null
      return { status: response.statusCode, code, replayed, text }
    } catch {
      return { status: 0, code: null, replayed: false, text: '' }
    }
  }

  /** A replay shows the answer of an execution of this very operation. */
  #checkReplay({ path, operation = '' }: Ask, execution: unknown): void {
    this.replays++
    const known = this.#ledger.executions(operation).map((n) => `${operation}.${n}`)
    if (!known.includes(String(execution))) this.blame(`${path}: replayed the answer of another execution`)
  }
}

function headersOf({ key = null, operation, act, type = 'application/json', body, caller, headers }: Ask) {
  return {
    authorization: `Bearer ${caller ?? 'soak'}`,
    ...(body === undefined || type === null ? {} : { 'content-type': type }),
    ...(key === null ? {} : { 'idempotency-key': key }),
    ...(operation === undefined ? {} : { 'x-operation': operation }),
    ...(act === undefined ? {} : { 'x-act': act }),
    ...headers,
  }
}

/** The same request as bytes. `length`: the announced one, if it differs. */
export function rawPost(ask: Ask, length = Buffer.byteLength(ask.body ?? '')): string {
  const lines = Object.entries(headersOf(ask)).map(([name, value]) => `${name}: ${value}\r\n`)
  const { method = 'POST', path } = ask
  return `${method} ${path} HTTP/1.1\r\nhost: api.test\r\n${lines.join('')}content-length: ${length}\r\n\r\n`
}
