import { once } from 'node:events'
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { buffer } from 'node:stream/consumers'
import { tableDefinition } from '../../src/store/dynamodb/layout.ts'

// The SDK needs credentials.
process.env['AWS_ACCESS_KEY_ID'] = 'test'
process.env['AWS_SECRET_ACCESS_KEY'] = 'test'

/** JSON as DynamoDB reads and writes it. */
export type Wire = Readonly<Record<string, unknown>>
/** An operation, and what it asks of the table. */
export type Asked = readonly [operation: string, input: Wire]
interface Reply {
  readonly status: number
  readonly body: Wire
}
class Failure implements Reply {
  readonly status: number
  readonly body: Wire
  constructor(status: number, type: string, more: Wire = {}) {
    this.status = status
    this.body = { __type: `x#${type}`, message: 'because', ...more }
  }
}
/** What is answered with status 200, or a failure. */
export type Answer = Wire | Failure
/** The same answer to every request, one after the other and then a failure, or as a function of what is asked. */
export type Script = Answer | readonly Answer[] | ((asked: Asked) => Answer | Promise<Answer>)

/** A value as it is on the wire: bytes are base64. */
export function wire(value: object): Wire {
  return JSON.parse(JSON.stringify(value, (_, one) => (isBuffer(one) ? base64(one) : one)))
}

function isBuffer(value: unknown): value is { readonly data: number[] } {
  return typeof value === 'object' && value !== null && 'type' in value && value.type === 'Buffer'
}

function base64({ data }: { readonly data: number[] }): string {
  return Buffer.from(data).toString('base64')
}

/** The answer to a write whose condition does not hold. */
export function refusal(item: Wire | null): Answer {
  return new Failure(400, 'ConditionalCheckFailedException', item === null ? {} : { Item: item })
}

export function failure(status: number, type: string): Answer {
  return new Failure(status, type)
}

/** Answers over HTTP what a test says, with no database behind it: for tests of what the store asks, and makes of the answers. */
export class ScriptedDynamoDb implements AsyncDisposable {
  /** The `Date` of its replies. */
  date = 'Sun, 22 Nov 2020 10:00:00 GMT'
  /** Of the first request: who asks for which region. */
  authorization = ''
  #asked: Asked[] = []
  #reply: (asked: Asked) => Answer | Promise<Answer> = () => ({})
  readonly #server: Server

  private constructor() {
    this.#server = createServer((request, response) => {
      this.#answer(request, response).catch(() => response.destroy())
    })
    this.#server.keepAliveTimeout = 0
  }

  static async start(): Promise<ScriptedDynamoDb> {
    const server = new ScriptedDynamoDb()
    await once(server.#server.listen(0, '127.0.0.1'), 'listening')
    return server
  }

  get endpoint(): string {
    const { port } = this.#server.address() as AddressInfo
    return `http://127.0.0.1:${port}`
  }

  get url(): string {
    return `dynamodb://mine?region=eu-west-3&endpoint=${this.endpoint}`
  }

  /** From now on. */
  answer(how: Script): void {
    this.#asked = []
    if (Array.isArray(how)) {
      const left = [...(how as readonly Answer[])]
      this.#reply = () => left.shift() ?? failure(400, 'NothingIsLeft')
    } else this.#reply = typeof how === 'function' ? how : () => how as Answer
  }

  describesTable(): void {
    this.answer({ Table: tableDefinition('mine') })
  }

  /** What was asked since the last time, or since `answer`. */
  taken(): readonly Asked[] {
    const asked = this.#asked
    this.#asked = []
    return asked
  }

  connections(): Promise<number> {
    return new Promise((resolve, reject) =>
      this.#server.getConnections((error, count) => (error === null ? resolve(count) : reject(error))),
    )
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const closed = once(this.#server, 'close')
    this.#server.close()
    this.#server.closeAllConnections()
    await closed
  }

  async #answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const { TableName, ...input } = JSON.parse((await buffer(request)).toString()) as Wire
    const operation = String(request.headers['x-amz-target']).replace(/^.*\./, '')
    this.authorization = String(request.headers.authorization)
    // One table only: a request for another one gets no answer that a test could pass with.
    const asked: Asked = [operation, TableName === 'mine' ? input : { TableName, ...input }]
    this.#asked.push(asked)
    const { status, body } = replyOf(await this.#reply(asked))
    response.statusCode = status
    response.setHeader('date', this.date)
    response.setHeader('content-type', 'application/x-amz-json-1.0')
    response.end(JSON.stringify(body))
  }
}

function replyOf(answer: Answer): Reply {
  return answer instanceof Failure ? answer : { status: 200, body: answer }
}
