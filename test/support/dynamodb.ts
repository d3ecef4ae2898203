import { once } from 'node:events'
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { buffer } from 'node:stream/consumers'
import { promisify } from 'node:util'
import dynalite from 'dynalite'
import { tableDefinition } from '../../src/store/dynamodb/layout.ts'

// The SDK needs credentials; dynalite accepts any.
process.env['AWS_ACCESS_KEY_ID'] = 'test'
process.env['AWS_SECRET_ACCESS_KEY'] = 'test'

/** `error`: DynamoDB's answer; `cut`: the connection ends instead of an answer, before or after the operation; `silent`: no answer. */
export type Fault =
  | { readonly error: string; readonly status: number }
  | { readonly cut: 'before' | 'after' }
  | { readonly silent: true }
  | { readonly date: string }
  | { readonly answer: object }

type Item = Readonly<Record<string, unknown>>
/** A request as it was sent. */
export interface Asked {
  readonly operation: string
  /** Who asks for which region. */
  readonly authorization: string
  readonly input: {
    readonly TableName: string
    readonly Key?: Item
    readonly Item?: Item
    readonly ReturnValuesOnConditionCheckFailure?: string
  }
}

/** dynalite, behind a front that adds what it lacks, the item with a refusal, and faults. */
export class DynamoDbServer implements AsyncDisposable {
  /** What goes wrong with an operation; null: nothing. */
  fault: (asked: Asked) => Fault | null | Promise<Fault | null> = () => null
  /** Whether a refusal has the existing item, as with DynamoDB and not with its emulators. */
  tellsItem = true
  readonly asked: Asked[] = []
  readonly #dynalite: Server
  readonly #front: Server

  private constructor(behind: Server) {
    this.#dynalite = behind
    this.#front = createServer((request, response) => {
      // A test may end, and close dynalite, in the middle of a request.
      this.#answer(request, response).catch(() => response.destroy())
    })
  }

  static async start(table: object | null = tableDefinition('records')): Promise<DynamoDbServer> {
    const behind = dynalite({ createTableMs: 0, deleteTableMs: 0 })
    const server = new DynamoDbServer(behind)
    for (const one of [behind, server.#front]) {
      // A connection closed for idleness just as the next request is sent would look like a fault.
      one.keepAliveTimeout = 0
      await once(one.listen(0, '127.0.0.1'), 'listening')
    }
    if (table !== null) await server.run('CreateTable', table)
    return server
  }

  get url(): string {
    const { port } = this.#front.address() as AddressInfo
    return `dynamodb://records?region=eu-central-1&endpoint=http://127.0.0.1:${port}`
  }

  /** Runs an operation without faults. */
  async run(operation: string, input: object): Promise<{ readonly [member: string]: unknown }> {
    return JSON.parse((await this.#forward(operation, JSON.stringify(input))).text)
  }

  connections(): Promise<number> {
    return promisify(this.#front.getConnections.bind(this.#front))()
  }

  async empty(): Promise<void> {
    await this.run('DeleteTable', { TableName: 'records' })
    for (let there = true; there; )
      there = JSON.stringify(await this.run('ListTables', {})).includes('records')
    await this.run('CreateTable', tableDefinition('records'))
    this.asked.length = 0
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const server of [this.#front, this.#dynalite]) {
      const closed = once(server, 'close')
      server.close()
      server.closeAllConnections()
      await closed
    }
  }

  async #forward(
    operation: string,
    body: string,
  ): Promise<{ readonly status: number; readonly text: string }> {
    const { port } = this.#dynalite.address() as AddressInfo
    const reply = await fetch(`http://127.0.0.1:${port}`, {
      method: 'POST',
      headers: {
        'content-type': 'application/x-amz-json-1.0',
        'x-amz-target': `DynamoDB_20120810.${operation}`,
        'x-amz-date': '20260101T000000Z',
        authorization: 'AWS4-HMAC-SHA256 Credential=a/b/c/d/e, SignedHeaders=f, Signature=g',
      },
      body,
    })
    return { status: reply.status, text: await reply.text() }
  }

  async #answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const body = (await buffer(request)).toString()
    const operation = String(request.headers['x-amz-target']).replace(/^.*\./, '')
    const authorization = String(request.headers.authorization)
    const asked: Asked = { operation, authorization, input: JSON.parse(body) }
    this.asked.push(asked)
    const fault = await this.fault(asked)
    if (fault !== null && 'silent' in fault) return
    if (fault !== null && 'cut' in fault && fault.cut === 'before') return void request.socket.destroy()
    response.setHeader('content-type', 'application/x-amz-json-1.0')
    if (fault !== null && 'date' in fault) response.setHeader('date', fault.date)
    if (fault !== null && 'error' in fault) {
      response.statusCode = fault.status
      return void response.end(JSON.stringify({ __type: `com.amazonaws#${fault.error}`, message: 'no' }))
    }
    if (fault !== null && 'answer' in fault) return void response.end(JSON.stringify(fault.answer))
    const { status, text } = await this.#forward(operation, body)
    if (fault !== null && 'cut' in fault) return void request.socket.destroy()
    response.statusCode = status
    response.end(status === 400 ? await this.#withItem(asked, text) : text)
  }

  async #withItem({ input }: Asked, text: string): Promise<string> {
    if (!this.tellsItem || !text.includes('ConditionalCheckFailed')) return text
    if (input.ReturnValuesOnConditionCheckFailure !== 'ALL_OLD') return text
    const { pk, sk } = (input.Key ?? input.Item) as Item
    const found = await this.run('GetItem', {
      TableName: input.TableName,
      Key: { pk, sk },
      ConsistentRead: true,
    })
    return JSON.stringify({ ...JSON.parse(text), ...found })
  }
}
