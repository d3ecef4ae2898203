/**
 * Pays once, however often it is run with the same request id: node pay.ts ADDRESS REQUEST_ID AMOUNT. The library itself retries what the
 * proxy says is safe.
 */
import { join } from 'node:path'
import { Client, credentials, Metadata } from '@grpc/grpc-js'
import protobuf from 'protobufjs'

const PROTO = protobuf.loadSync(join(import.meta.dirname, 'payments.proto'))
const CreateRequest = PROTO.lookupType('shop.v1.CreateRequest')
const Payment = PROTO.lookupType('shop.v1.Payment')

const RETRIES = {
  methodConfig: [
    {
      name: [{ service: 'shop.v1.Payments' }],
      retryPolicy: {
        maxAttempts: 5,
        initialBackoff: '0.2s',
        maxBackoff: '5s',
        backoffMultiplier: 2,
        // UNKNOWN too: the key makes it safe, and the proxy may know more by then.
        retryableStatusCodes: ['UNAVAILABLE', 'ABORTED', 'RESOURCE_EXHAUSTED', 'UNKNOWN'],
      },
    },
  ],
}

const [address = '127.0.0.1:8080', requestId = '', amount = '0'] = process.argv.slice(2)
const client = new Client(address, credentials.createInsecure(), {
  'grpc.service_config': JSON.stringify(RETRIES),
})
const metadata = new Metadata()
metadata.set('authorization', 'Bearer example')

client.makeUnaryRequest(
  '/shop.v1.Payments/Create',
  (value: object) => Buffer.from(CreateRequest.encode(CreateRequest.fromObject(value)).finish()),
  (bytes) => Payment.toObject(Payment.decode(bytes), { longs: String }),
  { requestId, amount },
  metadata,
  { deadline: Date.now() + 30_000 },
  (error, payment) => {
    client.close()
    if (error === null) process.stdout.write(`${JSON.stringify(payment)}\n`)
    else process.stderr.write(`${error.message}\n`)
    process.exitCode = error === null ? 0 : 1
  },
)
