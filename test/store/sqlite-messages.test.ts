import { MessageChannel, receiveMessageOnPort } from 'node:worker_threads'
import fc from 'fast-check'
import t from 'tap'
import { type RecordId, STATES } from '../../src/core/record.ts'
import { HEAD_ROOM, SMALL_RECORD } from '../../src/store/codec.ts'
import {
  packRequests,
  packResults,
  type Request,
  unpackRequests,
  unpackResults,
} from '../../src/store/sqlite-messages.ts'
import { newId } from './fixtures.ts'

/** What arrives at the other end. */
function sent<Message>([message, transfer]: [Message, ArrayBuffer[]]): Message {
  const { port1, port2 } = new MessageChannel()
  port1.postMessage(message, transfer)
  const received = receiveMessageOnPort(port2)?.message as Message
  port1.close()
  return received
}

const id = fc.stringMatching(/^[\w-]{2,43}$/) as fc.Arbitrary<RecordId>
/** On both sides of the size from which a record is sent in memory of its own. */
const bytes = fc.oneof(
  fc.uint8Array({ maxLength: 40, size: 'max' }).map((array) => Buffer.from(array)),
  fc.integer({ min: 4090, max: 6000 }).map((length) => Buffer.alloc(length, String(length))),
)
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
  for (const requests of fc.sample(fc.array(request, { maxLength: 40, size: 'max' }), 200)) {
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
  for (const results of fc.sample(fc.array(result, { maxLength: 40, size: 'max' }), 200)) {
    const expected = plain(results)
    t.strictSame(plain(unpackResults(sent(packResults(results)))), expected)
  }
})

void t.test('a large record that has memory of its own takes that along; any other is copied', async (t) => {
  const filled = (length: number): Buffer => Buffer.from(new ArrayBuffer(length)).fill('x')
  const spare = SMALL_RECORD + 1 + HEAD_ROOM
  for (const [bytes, isAlone] of [
    [filled(SMALL_RECORD), false],
    [filled(SMALL_RECORD + 1), true],
    [filled(spare).subarray(0, SMALL_RECORD + 1), true],
    [filled(spare + 1).subarray(0, SMALL_RECORD + 1), false],
    [filled(spare).subarray(1), false],
  ] as const) {
    const { buffer, length } = bytes
    const [message, transfer] = packRequests([['put', newId(), bytes, 1, 2], ['ping']])
    t.same(message.large.length, isAlone ? 1 : 0)
    t.ok(message.large.every((memory) => memory === buffer))
    t.ok(transfer.length === 1 + message.large.length && transfer[0] === message.memory)
    const [put] = unpackRequests(sent([message, transfer]))
    t.same(put?.slice(2), [Buffer.alloc(length, 'x'), 1, 2])
    t.equal(bytes.length, isAlone ? 0 : length)
    t.equal(message.memory.byteLength, 0, 'so is the memory of the message')
  }
})

void t.test('of results, small records are copied, and large ones take their memory along', async (t) => {
  const filled = (length: number): Uint8Array => new Uint8Array(length).fill(7)
  const found = [filled(SMALL_RECORD), filled(SMALL_RECORD + 1)] as const
  const [message, transfer] = packResults([[1, found[0]], [2, found[1]], 3])
  t.equal(message.others.length, 2)
  t.ok(transfer.length === 2 && transfer[0] === message.memory && transfer[1] === found[1].buffer)
})
