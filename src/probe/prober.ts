import { randomUUID } from 'node:crypto'
import { subscribe, unsubscribe } from 'node:diagnostics_channel'
import { setTimeout as wait } from 'node:timers/promises'
import { Agent, request } from 'undici'
import { pointerTokens } from '../core/body/json-pointer.ts'
import { linesOf, type RawHeaders, RESPONSE_HEADER } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import { jsonOrText } from './variants.ts'

export type HeaderLine = readonly [name: string, value: string]

/** The request that every case repeats or changes. */
export interface Template {
  readonly url: URL
  readonly method: string
  readonly headers: readonly HeaderLine[]
  /** `{uuid}` in it is replaced anew for each key. */
  readonly body: string | null
  readonly keyHeader: string
  /** Bodies with other content, with content that the API refuses, and with content on which it fails. */
  readonly otherBody: string | null
  readonly errorBody: string | null
  readonly failureBody: string | null
  readonly otherCaller: HeaderLine | null
  readonly otherUrl: URL | null
}

/** How to read the number of executions. */
export interface Counter {
  readonly url: URL
  /** JSON pointer to a number, or to an array whose items count; null: the whole body is the number. */
  readonly pointer: string | null
}

/** What a case changes about the template. */
export interface Change {
  readonly body?: string | null
  readonly header?: HeaderLine | null
  readonly url?: URL | null
}

export interface Answer {
  /** 0: no answer. */
  readonly status: number
  readonly headers: RawHeaders
  /** Its first {@link MAX_BODY} bytes; without an answer, the reason. */
  readonly body: Buffer
}

/** The probe cannot continue; the message says why. */
export class Stopped extends Error {}

const MAX_BODY = 1024 * 1024
/** Number of retries while an operation is in progress. */
export const PATIENCE = 8

interface Sent {
  readonly url: URL
  readonly method: string
  readonly headers: string[]
  readonly body: Buffer | null
}

/** Sends the requests of the cases, each on its own connection, and counts executions. */
export class Prober implements AsyncDisposable {
  readonly template: Template
  /** Answers in the current case. */
  answers: Answer[] = []
  /** Number of requests so far, except to the counter. */
  requests = 0
  readonly #counter: Counter | null
  readonly #quotes: boolean
  readonly #timeout: Millis
  readonly #agent: Agent
  #counted = 0
  #done = 0

  constructor(template: Template, counter: Counter | null, quotes: boolean, timeout: Millis) {
    this.template = template
    this.#counter = counter
    this.#quotes = quotes
    this.#timeout = timeout
    this.#agent = new Agent({ pipelining: 0, connect: { timeout } })
  }

  beginCase(): void {
    this.answers = []
    this.#done = 0
  }

  /** Executions in the current case, as of the last {@link work}; null: no counter. */
  get done(): number | null {
    return this.#counter === null ? null : this.#done
  }

  /** A header value with a key that was never used, in the notation of the profile. */
  newKey(): string {
    return this.#quotes ? `"${randomUUID()}"` : randomUUID()
  }

  async send(key: string | null, change: Change = {}): Promise<Answer> {
    this.requests++
    const answer = await this.#exchange(this.#toSend(key, change), AbortSignal.timeout(this.#timeout))
    this.answers.push(answer)
    return answer
  }

  /** Sends, and retries with growing pauses while the operation is in progress, for as long as a response may take. */
  async sendPatiently(key: string, change: Change = {}): Promise<Answer> {
    for (let n = 1; ; n++) {
      const answer = await this.send(key, change)
      const [advice = 'same-key'] = linesOf(answer.headers, RESPONSE_HEADER.retry.toLowerCase())
      if (answer.status !== 409 || advice !== 'same-key' || n === PATIENCE) return answer
      await wait(this.#timeout / 2 ** (PATIENCE - n))
    }
  }

  /** Sends, and closes the connection once the request is written. */
  async sendAndLeave(key: string): Promise<void> {
    this.requests++
    const leaving = new AbortController()
    const leave = (): void => queueMicrotask(() => leaving.abort())
    subscribe('undici:request:bodySent', leave)
    try {
      await this.#exchange(this.#toSend(key, {}), leaving.signal)
    } finally {
      unsubscribe('undici:request:bodySent', leave)
    }
  }

  /** Executions since the last call; null: no counter. */
  async work(): Promise<number | null> {
    if (this.#counter === null) return null
    const before = this.#counted
    this.#counted = await this.#read(this.#counter)
    const work = this.#counted - before
    if (work < 0)
      throw new Stopped(
        `the counter went back from ${before} to ${this.#counted}: it does not count executions`,
      )
    this.#done += work
    return work
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#agent.destroy()
  }

  #toSend(key: string | null, { body, header, url }: Change): Sent {
    const { template } = this
    const text = body ?? template.body
    const bare = key?.replaceAll('"', '').slice(-36) ?? ''
    const lines = header == null ? template.headers : withLine(template.headers, header)
    const keyed = key === null ? lines : [...lines, [template.keyHeader, key]]
    return {
      url: url ?? template.url,
      method: template.method,
      headers: keyed.flat(),
      body: text === null ? null : Buffer.from(text.replaceAll('{uuid}', bare === '' ? randomUUID() : bare)),
    }
  }

  async #exchange({ url, ...options }: Sent, signal: AbortSignal): Promise<Answer> {
    try {
      const { statusCode, headers, body } = await request(url, {
        ...options,
        method: options.method as 'POST',
        dispatcher: this.#agent,
        responseHeaders: 'raw',
        headersTimeout: this.#timeout,
        bodyTimeout: this.#timeout,
        signal,
      })
      const parts: Buffer[] = []
      let size = 0
      for await (const part of body as AsyncIterable<Buffer>) {
        parts.push(part)
        size += part.length
        if (size >= MAX_BODY) break
      }
      const read = Buffer.concat(parts).subarray(0, MAX_BODY)
      return { status: statusCode, headers: headers as unknown as string[], body: read }
    } catch (error) {
      const why = signal.aborted ? `no complete response within ${this.#timeout / 1000} s` : reasonOf(error)
      return { status: 0, headers: [], body: Buffer.from(why) }
    }
  }

  async #read({ url, pointer }: Counter): Promise<number> {
    // Credentials are not sent to another host.
    const isSameHost = url.origin === this.template.url.origin
    const headers = this.template.headers.filter(([name]) => isSameHost && !/^content-/i.test(name)).flat()
    const asked = { url, method: 'GET', headers, body: null }
    const { status, body } = await this.#exchange(asked, AbortSignal.timeout(this.#timeout))
    if (status === 0) throw new Stopped(`the counter at ${url.href} cannot be read: ${body.toString()}`)
    if (status !== 200) throw new Stopped(`the counter at ${url.href} answers ${status}; allowed: 200`)
    const found = pointerTokens(pointer ?? '').reduce(itemAt, jsonOrText(body))
    const count = pointer !== null && Array.isArray(found) ? found.length : found
    if (typeof count === 'number' && Number.isSafeInteger(count) && count >= 0) return count
    const kind = found === undefined ? 'nothing' : typeof found === 'object' ? 'JSON' : `a ${typeof found}`
    throw new Stopped(
      `the counter at ${url.href} has ${kind}${pointer === null ? '' : ` at ${pointer}`}; allowed: a whole number, or at --count-json an array whose items count`,
    )
  }
}

function itemAt(value: unknown, name: string): unknown {
  const isThere = typeof value === 'object' && value !== null && Object.hasOwn(value, name)
  return isThere ? (value as Readonly<Record<string, unknown>>)[name] : undefined
}

/** Adds the line, replacing others of its name. */
function withLine(lines: readonly HeaderLine[], line: HeaderLine): readonly HeaderLine[] {
  return [...lines.filter(([name]) => name.toLowerCase() !== line[0].toLowerCase()), line]
}

function reasonOf(error: unknown): string {
  const { message, code, errors } = error as NodeJS.ErrnoException & { readonly errors?: readonly Error[] }
  return errors?.[0]?.message ?? (message === '' ? (code ?? 'no reason') : message)
}
