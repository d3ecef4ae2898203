import {
  type CallOptions,
  Client,
  type ClientOptions,
  credentials,
  Metadata,
  Server,
  ServerCredentials,
  type ServerDuplexStream,
  type ServerUnaryCall,
  type sendUnaryData,
  status,
} from '@grpc/grpc-js'
import protobuf from 'protobufjs'
import type { RpcCode } from '../../src/core/rpc/codes.ts'
import { type Seen, type UpstreamStub, upstreamStub } from './upstream.ts'

/** A message behind its flag and length. */
export function framed(message: Buffer | string, flag = 0): Buffer {
  const bytes = Buffer.from(message as string)
  const prefix = Buffer.alloc(5)
  prefix[0] = flag
  prefix.writeUInt32BE(bytes.length, 1)
  return Buffer.concat([prefix, bytes])
}

/** What a client of gRPC got. */
export interface Called {
  readonly code: string
  readonly details: string
  readonly message: Buffer | null
  /** Of the head. */
  readonly metadata: Readonly<Record<string, unknown>>
  readonly trailers: Metadata
}

export interface Call extends CallOptions {
  readonly key?: string
  readonly metadata?: Readonly<Record<string, string>>
  readonly message?: Buffer | string
  readonly method?: string
  /** Gets the call, to cancel it. */
  readonly began?: (cancel: () => void) => void
}

export interface Caller extends Disposable {
  (call: Call): Promise<Called>
}

const METHOD = '/shop.Payments/Create'
const ECHO = '/shop.Payments/Echo'

/** A client of the real library; messages are bytes. */
export function callerOf(port: number, options: ClientOptions = {}): Caller {
  const client = new Client(`127.0.0.1:${port}`, credentials.createInsecure(), options)
  const bytes = (message: Buffer): Buffer => message
  const call = ({ key, metadata = {}, message = 'pay', method = METHOD, began, ...more }: Call) => {
    const sent = new Metadata()
    if (key !== undefined) sent.set('idempotency-key', key)
    for (const [name, value] of Object.entries(metadata)) sent.set(name, value)
    return new Promise<Called>((resolve) => {
      let head: Called['metadata'] = {}
      let answer: Buffer | null = null
      const running = client.makeUnaryRequest(
        method,
        bytes,
        bytes,
        Buffer.from(message as string),
        sent,
        more,
        (_error, value) => {
          answer = value ?? null
        },
      )
      running.on('metadata', (got: Metadata) => {
        head = got.getMap()
      })
      running.on('status', ({ code, details, metadata: trailers }) =>
        // The message comes in the same turn.
        setImmediate(() =>
          resolve({ code: status[code], details, message: answer, metadata: head, trailers }),
        ),
      )
      began?.(() => running.cancel())
    })
  }
  return Object.assign(call, { [Symbol.dispose]: () => client.close() })
}

/** As googleapis publishes them, but for the packages, which the reader of this text would resolve. */
const DETAILS = protobuf.parse(`
syntax = "proto3";
package google.rpc;
message Any { string type_url = 1; bytes value = 2; }
message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
message Duration { int64 seconds = 1; int32 nanos = 2; }
message RetryInfo { Duration retry_delay = 1; }
message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
message BadRequest {
  message FieldViolation { string field = 1; string description = 2; }
  repeated FieldViolation field_violations = 1;
}`).root

/** The value of a message of `google.rpc`. */
export function decoded(type: string, bytes: Uint8Array): Record<string, unknown> {
  const found = DETAILS.lookupType(type)
  return found.toObject(found.decode(bytes), { longs: Number })
}

/** The details of an answer, by the last part of their type, and the code and message beside them. */
export function detailsOf({ trailers }: Called): Record<string, unknown> {
  const [bytes] = trailers.get('grpc-status-details-bin')
  if (!(bytes instanceof Buffer)) return {}
  const { code, message, details } = decoded('google.rpc.Status', bytes)
  const parts = (details as { type_url?: string; typeUrl: string; value: Uint8Array }[]).map(
    ({ typeUrl, value }) => {
      const type = typeUrl.replace('type.googleapis.com/', '')
      return [type.replace('google.rpc.', ''), decoded(type, value)]
    },
  )
  return { code, message, ...Object.fromEntries(parts) }
}

/** An answer of the upstream. */
export interface Told {
  /** Null: none, though head and trailers are apart; absent: they are one. */
  readonly message?: Buffer | string | null
  readonly code?: RpcCode
  readonly flag?: number
  readonly metadata?: Readonly<Record<string, string>>
  readonly trailers?: Readonly<Record<string, string>>
}

/** An upstream that speaks gRPC over HTTP/1.1, with trailers. Null: it breaks off. */
export function rpcStub(
  answer: (seen: Seen, n: number) => Told | null | Promise<Told | null>,
): Promise<UpstreamStub> {
  const stub: Promise<UpstreamStub> = upstreamStub(async (seen, response, request) => {
    const told = await answer(seen, (await stub).seen.length)
    if (told === null) return void request.socket.destroy()
    const { message, code = 'OK', flag, metadata = {}, trailers = {} } = told
    const ended = { 'grpc-status': String(status[code]), ...trailers }
    const head = { 'content-type': 'application/grpc', ...metadata }
    if (message === undefined) return void response.writeHead(200, { ...head, ...ended }).end()
    response.writeHead(200, { ...head, trailer: Object.keys(ended).join(', ') })
    if (message === null) response.flushHeaders()
    else response.write(framed(message, flag))
    response.addTrailers(ended)
    response.end()
  })
  return stub
}

/** A handler of the real library's server. Streams are answered message by message. */
export type Handler = (message: Buffer, call: ServerUnaryCall<Buffer, Buffer>) => Told | Promise<Told>

/** The real library's server. `methods`: unary, by name. `echo`: a method with streams both ways. */
export async function rpcServer(handler: Handler): Promise<{ readonly url: string } & AsyncDisposable> {
  const bytes = (message: Buffer): Buffer => message
  const wire = {
    requestSerialize: bytes,
    requestDeserialize: bytes,
    responseSerialize: bytes,
    responseDeserialize: bytes,
  }
  const server = new Server()
  server.addService(
    {
      create: { path: METHOD, requestStream: false, responseStream: false, ...wire },
      echo: { path: ECHO, requestStream: true, responseStream: true, ...wire },
    },
    {
      create: (call: ServerUnaryCall<Buffer, Buffer>, done: sendUnaryData<Buffer>) =>
        void Promise.resolve(handler(call.request, call)).then(
          ({ message = '', code = 'OK', metadata = {}, trailers = {} }) => {
            call.sendMetadata(metadataOf(metadata))
            if (code === 'OK') done(null, Buffer.from((message ?? '') as string), metadataOf(trailers))
            else done({ code: status[code], details: code, metadata: metadataOf(trailers) })
          },
        ),
      echo: (call: ServerDuplexStream<Buffer, Buffer>) => {
        call.on('data', (message) => call.write(message)).on('end', () => call.end())
      },
    },
  )
  const port = await new Promise<number>((resolve, reject) =>
    server.bindAsync('127.0.0.1:0', ServerCredentials.createInsecure(), (error, bound) =>
      error === null ? resolve(bound) : reject(error),
    ),
  )
  return {
    url: `http://127.0.0.1:${port}`,
    [Symbol.asyncDispose]: async () => server.forceShutdown(),
  }
}

function metadataOf(lines: Readonly<Record<string, string>>): Metadata {
  return Metadata.fromHttp2Headers({ ...lines })
}

/** Sends each message once the one before was answered; resolves with the answers and the code. */
export function echoed(port: number, messages: readonly string[], key?: string): Promise<string[]> {
  const client = new Client(`127.0.0.1:${port}`, credentials.createInsecure())
  const bytes = (message: Buffer): Buffer => message
  const call = client.makeBidiStreamRequest(
    ECHO,
    bytes,
    bytes,
    metadataOf(key === undefined ? {} : { 'idempotency-key': key }),
  )
  const got: string[] = []
  const left = [...messages]
  const next = (): void => {
    const message = left.shift()
    if (message === undefined) call.end()
    else call.write(Buffer.from(message))
  }
  return new Promise((resolve) => {
    call.on('data', (message: Buffer) => {
      got.push(String(message))
      next()
    })
    call.on('error', () => {})
    call.on('status', ({ code }) => {
      client.close()
      resolve([...got, status[code]])
    })
    next()
  })
}
