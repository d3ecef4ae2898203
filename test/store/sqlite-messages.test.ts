import { MessageChannel, receiveMessageOnPort } from 'node:worker_threads'
import fc from 'fast-check'
import t from 'tap'
import { type RecordId, STATES } from '../../src/core/record.ts'
import {
  packRequests,
  packResults,
  type Request,
  unpackRequests,
  unpackResults,
} from '../../src/store/sqlite-messages.ts'

/** What arrives at the other end. */
function sent<Message>([message, transfer]: [Message, ArrayBuffer[]]): Message {
  const { port1, port2 } = new MessageChannel()
  port1.postMessage(message, transfer)
  const received = receiveMessageOnPort(port2)?.message as Message
  port1.close()
  return received
}

const id = fc.stringMatching(/^[\w-]{2,43}$/) as fc.Arbitrary<RecordId>
const bytes = fc.uint8Array({ maxLength: 6000 }).map((array) => Buffer.from(array))
const span = fc.oneof(fc.nat(), fc.constantFrom(Number.POSITIVE_INFINITY, Number.NaN, -1))
const token = fc
  .uint8Array({ minLength: 16, maxLength: 16 })
  .map((array) => Buffer.from(array).toString('latin1'))
const of = fc.oneof(fc.maxSafeNat(), fc.subarray([...STATES]))
const request = fc.oneof(
  fc.tuple(fc.constant('put' as const), id, bytes, span, span),
  fc.tuple(fc.constant('swap' as const), id, bytes, span, span, fc.boolean(), token, of),
  fc.tuple(fc.constant('get' as const), id),
  fc.tuple(fc.constant('list' as const), fc.string(), fc.string(), fc.nat()),
  fc.constant(['ping'] as const),
) as fc.Arbitrary<Request>

void t.test('requests arrive as they were sent, in order', async (t) => {
  for (const requests of fc.sample(fc.array(request, { maxLength: 40 }), 200)) {
    // The memory of large records is transferred, and lost here.
    const expected = requests.map((each) =>
      each.map((arg) => (Buffer.isBuffer(arg) ? Buffer.from(arg) : arg)),
    )
    t.strictSame(unpackRequests(sent(packRequests(requests))), expected)
  }
})

/** A large record has memory of its own. */
const alone = fc.oneof(bytes, fc.nat({ max: 20_000 }).map(Buffer.alloc)).map((given) => new Uint8Array(given))
const now = fc.nat({ max: 2 ** 43 })
const result = fc.oneof(
  fc.tuple(now, fc.integer({ min: 1 }), fc.maxSafeNat(), now),
  fc.tuple(now, alone),
  fc.tuple(now, fc.constant(null)),
  fc.array(fc.boolean(), { maxLength: 5 }),
  fc.array(id, { maxLength: 5 }),
  fc.record(
    { message: fc.string(), full: fc.boolean(), maybeApplied: fc.boolean() },
    { noNullPrototype: true },
  ),
  now,
)

/** Bytes as text. */
function plain(results: readonly unknown[]): unknown[] {
  return results.map((each) =>
    Array.isArray(each) && each[1] instanceof Uint8Array
      ? [each[0], Buffer.from(each[1]).toString('hex')]
      : each,
  )
}

void t.test('results arrive as they were sent, in order', async (t) => {
  for (const results of fc.sample(fc.array(result, { maxLength: 40 }), 200)) {
    const expected = plain(results)
    t.strictSame(plain(unpackResults(sent(packResults(results)))), expected)
  }
})
