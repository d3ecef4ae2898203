/**
 * A gRPC payments service. It knows nothing of idempotency: every `Create` that reaches it is one more payment. See README.md beside it.
 */
import { join } from 'node:path'
import { parseArgs } from 'node:util'
import { Server, ServerCredentials, type ServerUnaryCall, type sendUnaryData, status } from '@grpc/grpc-js'
import protobuf from 'protobufjs'

const PROTO = protobuf.loadSync(join(import.meta.dirname, 'payments.proto'))
const CreateRequest = PROTO.lookupType('shop.v1.CreateRequest')
const Payment = PROTO.lookupType('shop.v1.Payment')

interface Create {
  readonly requestId?: string
  readonly amount?: string
}

export interface PaymentsService extends AsyncDisposable {
  readonly url: string
  /** The amount of every payment that was made. */
  readonly made: readonly string[]
}

/** Port 0: any free one. */
export async function startPayments(port = 0): Promise<PaymentsService> {
  const made: string[] = []
  const server = new Server()
  server.addService(
    {
      create: {
        path: '/shop.v1.Payments/Create',
        requestStream: false,
        responseStream: false,
        requestDeserialize: (bytes: Buffer) =>
          CreateRequest.toObject(CreateRequest.decode(bytes), { longs: String }) as Create,
        requestSerialize: (value: Create) =>
          Buffer.from(CreateRequest.encode(CreateRequest.fromObject(value)).finish()),
        responseSerialize: (value: object) => Buffer.from(Payment.encode(Payment.fromObject(value)).finish()),
        responseDeserialize: (bytes: Buffer) => Payment.toObject(Payment.decode(bytes)),
      },
    },
    {
      create: (
        { request: { amount = '0' } }: ServerUnaryCall<Create, object>,
        done: sendUnaryData<object>,
      ) => {
        if (Number(amount) <= 0)
          return done({ code: status.INVALID_ARGUMENT, details: 'the amount must be positive' })
        made.push(amount)
        done(null, { id: `pay_${made.length}`, amount })
      },
    },
  )
  const bound = await new Promise<number>((resolve, reject) =>
    server.bindAsync(`127.0.0.1:${port}`, ServerCredentials.createInsecure(), (error, chosen) =>
      error === null ? resolve(chosen) : reject(error),
    ),
  )
  return {
    url: `http://127.0.0.1:${bound}`,
    made,
    [Symbol.asyncDispose]: async () => server.forceShutdown(),
  }
}

if (import.meta.main) {
  const { values } = parseArgs({ options: { port: { type: 'string', default: '50051' } } })
  const { url } = await startPayments(Number(values.port))
  process.stdout.write(`payments at ${url}\n`)
}
