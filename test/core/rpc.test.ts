import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import fc from 'fast-check'
import t from 'tap'
import type { Profile } from '../../src/core/policy.ts'
import type { StoredResponse } from '../../src/core/record.ts'
import { RPC_CODES, type RpcCode } from '../../src/core/rpc/codes.ts'
import { type RpcDetail, statusMessage } from '../../src/core/rpc/details.ts'
import { MessageCount, messagesIn } from '../../src/core/rpc/messages.ts'
import { rpcOf, timeoutOf, timeoutText } from '../../src/core/rpc/protocol.ts'
import { rpcAction, rpcCodeOf } from '../../src/core/rpc/status.ts'
import { outcomeOf, outcomeSpans } from '../../src/core/settle.ts'
import { decoded, framed } from '../support/grpc.ts'
import { RESULT, ROUTE } from './fixtures.ts'

const typed = (type: string): string[] => ['Content-Type', type]
const sentAs = (type: string) => ({ headers: typed(type), protocol: rpcOf(ROUTE.match, typed(type)) })

void t.test('the media type tells the protocol of a call', async (t) => {
  for (const [type, protocol] of [
    ['application/grpc', 'grpc'],
    ['application/grpc+proto', 'grpc'],
    ['Application/GRPC+json; charset=utf-8', 'grpc'],
    ['application/grpc-web', 'grpc-web'],
    ['application/grpc-web+proto', 'grpc-web'],
    ['application/grpc-web-text+proto', 'grpc-web-text'],
    ['application/grpc-other', null],
    ['application/grpcx', null],
    ['application/connect+proto', null],
    ['application/json', null],
  ] as const)
    t.equal(rpcOf({}, typed(type)), protocol, type)
  for (const type of ['application/json', 'application/proto'])
    for (const [match, more] of [
      [{ grpc: 'a.B/C' }, []],
      [{}, ['Connect-Protocol-Version', '1']],
    ] as const)
      t.equal(rpcOf(match, [...typed(type), ...more]), 'connect', type)
  t.equal(rpcOf({ grpc: 'a.B/C' }, typed('text/plain')), null)
})

void t.test('§7 what the code of an answer means, by profile', async (t) => {
  const meaning: Record<string, string> = {
    OK: 'store store store store',
    CANCELLED: 'unknown unknown release store',
    UNKNOWN: 'unknown unknown release store',
    INVALID_ARGUMENT: 'store store store store',
    DEADLINE_EXCEEDED: 'unknown unknown release store',
    NOT_FOUND: 'store store store store',
    ALREADY_EXISTS: 'store store store store',
    PERMISSION_DENIED: 'store store store store',
    RESOURCE_EXHAUSTED: 'release unknown release release',
    FAILED_PRECONDITION: 'store store store store',
    ABORTED: 'store store store release',
    OUT_OF_RANGE: 'store store store store',
    UNIMPLEMENTED: 'store unknown release store',
    INTERNAL: 'unknown unknown release store',
    UNAVAILABLE: 'unknown unknown release store',
    DATA_LOSS: 'unknown unknown release store',
    UNAUTHENTICATED: 'release release release release',
  }
  for (const code of RPC_CODES) {
    const profiles = ['standard', 'strict', 'lenient', 'stripe'] as const
    t.equal(profiles.map((profile) => rpcAction(profile, code)).join(' '), meaning[code], code)
  }
})

const NOTHING = Buffer.alloc(0)

void t.test('where each protocol has its status', async (t) => {
  const web = (text: string): Buffer => Buffer.concat([framed('paid'), framed(text, 0x80)])
  const answer = { status: 200, headers: [] as string[] }
  const json = (value: unknown): Buffer => Buffer.from(JSON.stringify(value))
  for (const [protocol, more, code] of [
    ['grpc', { trailers: ['grpc-status', '0'] }, 'OK'],
    ['grpc', { trailers: ['Grpc-Status', '14'] }, 'UNAVAILABLE'],
    ['grpc', { headers: ['grpc-status', '16'], body: NOTHING }, 'UNAUTHENTICATED'],
    // Clients ignore a status before a message.
    ['grpc', { headers: ['grpc-status', '16'], body: framed('paid') }, 'none'],
    ['grpc', { headers: ['grpc-status', '16'] }, 'none'],
    ['grpc', { headers: ['grpc-status', '16'], status: 401, body: Buffer.from('no') }, 'UNAUTHENTICATED'],
    ['grpc', { headers: ['grpc-status', '16'], trailers: ['grpc-status', '0'] }, 'none'],
    ['grpc', { trailers: ['grpc-status', '16', 'grpc-status', '0'] }, 'none'],
    ['grpc', { trailers: ['grpc-status', '0', 'grpc-status', '0'] }, 'OK'],
    ['grpc', { trailers: ['grpc-status', '0'], body: framed('paid').subarray(0, 7) }, 'none'],
    ['grpc', { trailers: ['grpc-status', '5'], body: framed('paid').subarray(0, 7) }, 'NOT_FOUND'],
    ['grpc', { status: 204, body: NOTHING }, 'none'],
    ['grpc', { trailers: ['grpc-status', '99'] }, 'UNKNOWN'],
    ['grpc', { trailers: ['grpc-status', 'zero'] }, 'UNKNOWN'],
    ['grpc', {}, 'none'],
    ['grpc', { body: web('grpc-status: 0') }, 'none'],
    ['grpc', { status: 503 }, null],
    ['grpc-web', { body: web('grpc-status: 0\r\ngrpc-message: \r\n') }, 'OK'],
    ['grpc-web', { body: web('grpc-message: x\r\nGRPC-Status:5') }, 'NOT_FOUND'],
    ['grpc-web', { headers: ['grpc-status', '3'], body: NOTHING }, 'INVALID_ARGUMENT'],
    ['grpc-web', { headers: ['grpc-status', '16'], body: web('grpc-status: 0') }, 'none'],
    ['grpc-web', { headers: ['grpc-status', '0'], body: framed('paid').subarray(0, 7) }, 'none'],
    ['grpc-web', { body: web('grpc-status: 16\r\ngrpc-status: 0') }, 'none'],
    ['grpc-web', { body: Buffer.concat([framed('grpc-status: 16', 0x80), web('grpc-status: 0')]) }, 'none'],
    ['grpc-web', { body: framed('paid') }, 'none'],
    ['grpc-web', { body: web('grpc-message: x') }, 'none'],
    ['grpc-web', { body: framed('grpc-status: 0', 0x81) }, 'none'],
    ['grpc-web', { body: web('grpc-status: 0').subarray(0, -1) }, 'none'],
    ['grpc-web', {}, 'none'],
    ['grpc-web-text', { body: Buffer.from(web('grpc-status: 7').toString('base64')) }, 'PERMISSION_DENIED'],
    ['grpc-web-text', { body: Buffer.from('no base64!') }, 'none'],
    ['connect', {}, 'OK'],
    ['connect', { status: 409, body: json({ code: 'aborted' }) }, 'ABORTED'],
    ['connect', { status: 499, body: json({ code: 'canceled' }) }, 'CANCELLED'],
    ['connect', { status: 500, body: json({ code: 'ok' }) }, null],
    ['connect', { status: 502, body: json(null) }, null],
    ['connect', { status: 502, body: Buffer.from('<html>') }, null],
    ['connect', { status: 502 }, null],
  ] as const)
    t.equal(rpcCodeOf(protocol, { ...answer, ...more }), code, `${protocol} ${JSON.stringify(more)}`)
})

void t.test(
  'entries of a route about codes come before the profile, and those about statuses do not count',
  async (t) => {
    const outcomes = [
      { status: 2, when: [], outcome: 'release' },
      { status: 'UNAVAILABLE', when: [], outcome: 'release' },
    ] as const
    const of = (code: RpcCode): string => {
      const trailers = ['grpc-status', String(RPC_CODES.indexOf(code))]
      const answer = { status: 200, headers: [], trailers }
      return outcomeOf({ ...ROUTE, outcomes }, sentAs('application/grpc'), answer, null, RESULT).kind
    }
    t.strictSame([of('OK'), of('UNAVAILABLE'), of('INTERNAL')], ['completed', 'not_executed', 'unknown'])
  },
)

void t.test('§7 a code that says that nothing was done does not say so behind a message', async (t) => {
  const of = (profile: Profile, code: RpcCode, type: string, body: Buffer | undefined): string => {
    const status = String(RPC_CODES.indexOf(code))
    const inBody = type.includes('web') && body !== undefined
    const answer = inBody
      ? { status: 200, headers: [], body: Buffer.concat([body, framed(`grpc-status: ${status}`, 0x80)]) }
      : { status: 200, headers: [], trailers: ['grpc-status', status], ...(body && { body }) }
    return outcomeOf({ ...ROUTE, profile }, sentAs(type), answer, null, RESULT).kind
  }
  for (const type of ['application/grpc', 'application/grpc-web'])
    for (const [profile, code] of [
      ['standard', 'RESOURCE_EXHAUSTED'],
      ['standard', 'UNAUTHENTICATED'],
      ['strict', 'UNAUTHENTICATED'],
      ['stripe', 'ABORTED'],
    ] as const) {
      t.equal(of(profile, code, type, NOTHING), 'not_executed', `${type} ${profile} ${code}`)
      t.equal(of(profile, code, type, framed('one')), 'unknown', `${type} ${profile} ${code}, a message`)
    }
  t.equal(of('standard', 'RESOURCE_EXHAUSTED', 'application/grpc', undefined), 'unknown', 'a stream')
  t.equal(of('standard', 'RESOURCE_EXHAUSTED', 'application/grpc', framed('one').subarray(0, 6)), 'unknown')
  t.equal(of('lenient', 'RESOURCE_EXHAUSTED', 'application/grpc', framed('one')), 'not_executed')
  const gateway = { status: 429, headers: ['grpc-status', '8'], body: Buffer.from('too many'), trailers: [] }
  t.equal(outcomeOf(ROUTE, sentAs('application/grpc'), gateway, null, RESULT).kind, 'not_executed', 'a page')
})

void t.test('V04 what a proxy behind this one refuses as a call is never kept', async (t) => {
  const of = (type: string, status: number, code: string | null, more: readonly string[] = []): string => {
    const headers = ['Idempotency-Retry', 'same-key', ...more]
    if (code !== null) headers.push('Idempotency-Problem', `code=${code}`)
    const answer = { status, headers, body: NOTHING, trailers: [] }
    return outcomeOf(ROUTE, sentAs(type), answer, null, RESULT).kind
  }
  // Here it is no call.
  const plain = (status: number, code: string | null): string => of('application/json', status, code)
  t.equal(plain(500, 'idempotency_outcome_unknown'), 'not_executed')
  t.equal(plain(500, 'upstream_failed'), 'unknown')
  t.equal(plain(500, null), 'completed', 'of an upstream')
  t.equal(plain(500, 'other'), 'completed', 'of an upstream')
  t.equal(plain(200, 'upstream_unreachable'), 'completed', 'a success is believed')
  const call = (code: string): string => of('application/grpc', 200, code, ['Grpc-Status', '14'])
  t.equal(call('idempotency_store_unavailable'), 'not_executed')
  t.equal(call('idempotency_caller_missing'), 'not_executed', 'until it can be verified')
})

void t.test('a stored failure is kept as long as other failures', async (t) => {
  const retention = { ...ROUTE, ttl: 1000, ttlFailed: 10 }
  const kept = (lines: Pick<StoredResponse, 'headers' | 'trailers'>): number => {
    const response = { status: 200, reason: '', body: Buffer.alloc(0), ...lines }
    return outcomeSpans({ kind: 'completed', result: { kept: true, response } }, retention).dueIn
  }
  t.strictSame(
    [
      kept({ headers: [], trailers: ['grpc-status', '0'] }),
      kept({ headers: [], trailers: ['grpc-status', '5'] }),
      kept({ headers: ['grpc-status', '5'], trailers: [] }),
      kept({ headers: [], trailers: [] }),
    ],
    [1000, 10, 10, 1000],
  )
})

void t.test('messages are behind a flag and their length', async (t) => {
  const body = Buffer.concat([framed('one'), framed('', 1), framed('a: b', 0x81)])
  t.match(messagesIn('grpc', body), [
    { isCompressed: false, isTrailers: false, bytes: Buffer.from('one') },
    { isCompressed: true, isTrailers: false, bytes: Buffer.alloc(0) },
    { isCompressed: true, isTrailers: true, bytes: Buffer.from('a: b') },
  ])
  t.strictSame(messagesIn('grpc', Buffer.alloc(0)), [])
  // Of padded pieces in a row.
  const pieces = [framed('a').toString('base64'), framed('bc').toString('base64')].join('')
  t.match(messagesIn('grpc-web-text', Buffer.from(pieces)), [
    { bytes: Buffer.from('a') },
    { bytes: Buffer.from('bc') },
  ])
  for (const text of ['AAA', 'A===', 'AA=A', '=AAA', 'AAA*', 'AA\n=', '====', 'AAAAAAAA='])
    t.equal(messagesIn('grpc-web-text', Buffer.from(text)), null, text)
  const long = framed(randomBytes(8 * 1024 ** 2))
  const [found] = messagesIn('grpc-web-text', Buffer.from(long.toString('base64'))) ?? []
  t.ok(found?.bytes.equals(long.subarray(5)))
  t.equal(messagesIn('grpc', Buffer.alloc(5 * 1000), 2)?.length, 2)
  for (let cut = 1; cut < 8; cut++)
    t.equal(messagesIn('grpc', framed('one').subarray(0, cut)), null, `${cut}`)
  t.equal(messagesIn('grpc', framed('one', 2)), null, 'a flag that nobody knows')
})

void t.test('whatever bytes come, they are messages or none, in one piece or many', async () => {
  const message = fc.tuple(fc.uint8Array({ maxLength: 20 }), fc.constantFrom(0, 1, 0x80))
  const bodies = fc.oneof(
    fc
      .array(message, { maxLength: 4 })
      .map((all) => Buffer.concat(all.map(([bytes, flag]) => framed(Buffer.from(bytes), flag)))),
    fc.uint8Array({ maxLength: 40 }).map((bytes) => Buffer.from(bytes)),
  )
  fc.assert(
    fc.property(bodies, fc.integer({ min: 1, max: 9 }), (body, size) => {
      const messages = messagesIn('grpc-web', body)
      const text = Buffer.from(body.toString('base64'))
      assert.deepEqual(messagesIn('grpc-web-text', text), messages)
      if (messages === null) return
      assert.deepEqual(
        Buffer.concat(
          messages.map(({ bytes, ...flags }) =>
            framed(bytes, Number(flags.isCompressed) | (flags.isTrailers ? 0x80 : 0)),
          ),
        ),
        body,
      )
      const count = new MessageCount()
      let isStream = false
      for (let at = 0; at < body.length; at += size) isStream ||= count.saw(body.subarray(at, at + size))
      assert.equal(isStream, messages.filter(({ isTrailers }) => !isTrailers).length > 1)
    }),
  )
})

void t.test('a second message makes an answer a stream, however its bytes arrive', async (t) => {
  const one = Buffer.concat([framed('one'), framed('grpc-status: 0', 0x80)])
  const two = Buffer.concat([framed(''), framed('two')])
  for (let size = 1; size <= two.length; size++)
    for (const [body, expected] of [
      [one, false],
      [two, true],
    ] as const) {
      const count = new MessageCount()
      const pieces = Array.from({ length: Math.ceil(body.length / size) }, (_, n) =>
        body.subarray(n * size, (n + 1) * size),
      )
      t.equal(
        pieces.some((piece) => count.saw(piece)),
        expected,
        `${size}`,
      )
    }
})

void t.test('deadlines are read and written in the units of their protocols', async (t) => {
  for (const [value, time] of [
    ['1H', 3_600_000],
    ['2M', 120_000],
    ['3S', 3000],
    ['250m', 250],
    ['5000u', 5],
    ['1000000n', 1],
    ['99999999H', 99_999_999 * 3_600_000],
    ['123456789m', null],
    ['1', null],
    ['-1S', null],
    ['1s', null],
    ['', null],
  ] as const)
    t.equal(timeoutOf('grpc', ['grpc-timeout', value]), time, value)
  t.equal(timeoutOf('grpc', []), null)
  t.equal(timeoutOf('connect', ['Connect-Timeout-Ms', '1500']), 1500)
  t.equal(timeoutOf('connect', ['Connect-Timeout-Ms', '1S']), null)
  t.strictSame(
    [-5, 0.4, 250.9, 99_999_999, 100_000_000, 9e12].map((left) => timeoutText('grpc', left)),
    ['1m', '1m', '250m', '99999999m', '100000S', '99999999S'],
  )
  t.equal(timeoutText('connect', 250.9), '250')
})

void t.test('details are what google.rpc defines', async (t) => {
  const details: RpcDetail[] = [
    { type: 'ErrorInfo', reason: 'R', domain: 'd', metadata: { a: 'é'.repeat(300), b: '' } },
    { type: 'RetryInfo', seconds: 0 },
    { type: 'RetryInfo', seconds: 90_000 },
    { type: 'BadRequest', field: 'f', description: '' },
  ]
  const status = decoded('google.rpc.Status', statusMessage(16, 'no', details))
  t.match(status, { code: 16, message: 'no' })
  const found = (status.details as { typeUrl: string; value: Buffer }[]).map(({ typeUrl, value }) =>
    decoded(typeUrl.replace('type.googleapis.com/', ''), value ?? Buffer.alloc(0)),
  )
  t.strictSame(found, [
    { reason: 'R', domain: 'd', metadata: { a: 'é'.repeat(300), b: '' } },
    { retryDelay: {} },
    { retryDelay: { seconds: 90_000 } },
    { fieldViolations: [{ field: 'f' }] },
  ])
})
