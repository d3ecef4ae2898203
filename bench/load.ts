import { once } from 'node:events'
import { connect, type Socket } from 'node:net'
import { setTimeout as wait } from 'node:timers/promises'
import { connect as connectTls } from 'node:tls'
import { Http2Client } from './http2-client.ts'

/** How long the last answers of a round may take. */
const STRAGGLERS = 15_000
/** Pause after the last answer, so that the candidate's remaining work counts, too. */
const SETTLE = 20

/** `http2`: with prior knowledge. */
export type Protocol = 'http1' | 'tls' | 'http2' | 'grpc'

export interface Load {
  readonly port: number
  readonly protocol?: Protocol
  /** Keep-alive connections, each with one request at a time. */
  readonly connections: number
  readonly milliseconds: number
  /** Maximum number of requests. */
  readonly most?: number
  /** The complete n-th request of the round. */
  readonly request: (n: number) => Buffer
  /** Required of every answer, or the figures mean nothing. */
  readonly status: number
  /** CPU time of the candidate so far, in microseconds. */
  readonly cpu: () => number
  /**
   * Requests per second, each due at its own time even if earlier ones are unanswered. Absent: every connection sends its next
   * request as soon as it has its answer.
   */
  readonly perSecond?: number
}

export interface LoadResult {
  readonly requests: number
  readonly cpuPerRequest: number
  readonly perSecond: number
  /** Milliseconds from when the request was due to the answer's last byte. */
  readonly p50: number
  readonly p99: number
  /** The part of it before the request was sent: no connection was free, or the generator was late. */
  readonly lateP99: number
}

/** Sends for that time, waits for outstanding answers, and checks each status. */
export async function load(options: Load): Promise<LoadResult> {
  const { milliseconds, request, status, cpu, most = Number.POSITIVE_INFINITY } = options
  const clients = await open(options)
  const latencies: number[] = []
  const late: number[] = []
  let sent = 0
  const cpuBefore = cpu()
  const startedAt = performance.now()
  const until = startedAt + milliseconds
  const due =
    options.perSecond === undefined ? performance.now.bind(performance) : paced(options.perSecond, startedAt)
  const drive = async (client: Exchanges): Promise<void> => {
    for (;;) {
      const dueAt = await due()
      if (dueAt >= until || sent >= most) return
      late.push(performance.now() - dueAt)
      const got = await client.exchange(request(sent++))
      if (got !== status) throw new Error(`answered ${got} instead of ${status}: ${client.last}`)
      latencies.push(performance.now() - dueAt)
    }
  }
  let timer: NodeJS.Timeout | undefined
  const missing = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error('answers are missing')), milliseconds + STRAGGLERS)
  })
  try {
    await Promise.race([Promise.all(clients.map(drive)), missing])
    const seconds = (performance.now() - startedAt) / 1000
    await wait(SETTLE)
    const micros = cpu() - cpuBefore
    return {
      requests: latencies.length,
      cpuPerRequest: micros / latencies.length,
      perSecond: latencies.length / seconds,
      p50: at(latencies, 0.5),
      p99: at(latencies, 0.99),
      lateP99: at(late, 0.99),
    }
  } finally {
    clearTimeout(timer)
    for (const client of clients) client.close()
  }
}

/** Sends one request at a time. */
export interface Exchanges {
  /** The last answer's head, for error messages. */
  readonly last: string
  /** Sends a whole request in HTTP/1.1; resolves with the status once the answer is complete. */
  exchange(request: Buffer): Promise<number>
  close(): void
}

function open({ protocol = 'http1', port, connections }: Load): Promise<Exchanges[]> {
  if (protocol === 'http2' || protocol === 'grpc')
    return Http2Client.openAll(port, connections, protocol === 'grpc')
  return Promise.all(Array.from({ length: connections }, () => Client.open(port, protocol === 'tls')))
}

/** Returns the due times of evenly spaced requests, each once it has come. */
function paced(perSecond: number, startedAt: number): () => number | Promise<number> {
  const waiting: ((dueAt: number) => void)[] = []
  let given = 0
  const next = (): number => startedAt + (given * 1000) / perSecond
  const take = (): number => {
    const dueAt = next()
    given++
    return dueAt
  }
  const tick = (): void => {
    while (waiting.length > 0 && next() <= performance.now()) waiting.shift()?.(take())
    if (waiting.length > 0) setTimeout(tick, 1)
  }
  return () => {
    if (next() <= performance.now()) return take()
    if (waiting.length === 0) setTimeout(tick, 1)
    return new Promise((resolve) => waiting.push(resolve))
  }
}

function at(values: number[], share: number): number {
  values.sort((a, b) => a - b)
  return values[Math.floor(values.length * share)] ?? Number.NaN
}

/** Minimal HTTP: a length or chunks, one answer at a time. */
export class Client implements Exchanges {
  readonly #socket: Socket
  #answered: ((status: number) => void) | null = null
  #failed: ((error: Error) => void) | null = null
  #status = 0
  /** Missing bytes of the answer; -1: the head is incomplete; Infinity: chunked. */
  #missing = -1
  #head = ''
  #tail = ''

  private constructor(socket: Socket) {
    this.#socket = socket
    socket.setNoDelay(true)
    socket.on('data', (chunk: Buffer) => this.#take(chunk))
    socket.on('error', (error) => this.#failed?.(error))
    socket.on('close', () => this.#failed?.(new Error(`the connection was closed: ${this.last}`)))
  }

  static async open(port: number, isTls = false): Promise<Client> {
    const place = { port, host: '127.0.0.1' }
    const socket = isTls ? connectTls({ ...place, rejectUnauthorized: false }) : connect(place)
    await once(socket, isTls ? 'secureConnect' : 'connect')
    return new Client(socket)
  }

  get last(): string {
    return this.#head.slice(0, 400)
  }

  exchange(request: Buffer): Promise<number> {
    return new Promise((resolve, reject) => {
      this.#answered = resolve
      this.#failed = reject
      this.#head = ''
      this.#missing = -1
      this.#socket.write(request)
    })
  }

  close(): void {
    this.#socket.destroy()
  }

  #take(chunk: Buffer): void {
    let body = chunk.length
    if (this.#missing < 0) {
      this.#head += chunk.toString('latin1')
      const end = this.#head.indexOf('\r\n\r\n')
      if (end < 0) return
      body = this.#head.length - end - 4
      this.#status = Number(this.#head.slice(9, 12))
      const length = /\ncontent-length: *(\d+)/i.exec(this.#head.slice(0, end))?.[1]
      this.#missing = length === undefined ? Number.POSITIVE_INFINITY : Number(length)
      this.#tail = this.#head.slice(end + 4)
    } else if (this.#missing === Number.POSITIVE_INFINITY) this.#tail += chunk.toString('latin1')
    if (this.#missing === Number.POSITIVE_INFINITY) {
      this.#tail = this.#tail.slice(-7)
      if (!this.#tail.endsWith('0\r\n\r\n')) return
    } else {
      this.#missing -= body
      if (this.#missing > 0) return
    }
    const answered = this.#answered
    this.#answered = null
    this.#failed = null
    answered?.(this.#status)
  }
}
