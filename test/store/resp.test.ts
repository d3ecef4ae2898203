import fc from 'fast-check'
import t from 'tap'
import { CommandBuffer, commandHead, Replies, ReplyError, type RespReply } from '../../src/store/resp.ts'

function parsed(...pieces: (string | Buffer)[]): RespReply[] {
  const replies: RespReply[] = []
  const parser = new Replies((reply) => void replies.push(reply))
  for (const piece of pieces) {
    const bytes = Buffer.from(piece as string, 'latin1')
    parser.push(bytes)
    // The connection reads into the same bytes again.
    bytes.fill(0xee)
  }
  return replies
}

/** How a server writes it: the inverse of the parser. */
function written(reply: RespReply): Buffer {
  if (reply === null) return Buffer.from('$-1\r\n')
  if (typeof reply === 'number') return Buffer.from(`:${reply}\r\n`)
  if (typeof reply === 'string') return Buffer.from(`+${reply}\r\n`, 'latin1')
  if (reply instanceof ReplyError) return Buffer.from(`-${reply.message}\r\n`)
  if (Buffer.isBuffer(reply))
    return Buffer.concat([Buffer.from(`$${reply.length}\r\n`), reply, Buffer.from('\r\n')])
  return Buffer.concat([Buffer.from(`*${reply.length}\r\n`), ...reply.map(written)])
}

void t.test('every type of reply is parsed', async (t) => {
  t.strictSame(parsed(':0\r\n:-1\r\n:1795000000000\r\n'), [0, -1, 1795000000000])
  t.strictSame(parsed(':9007199254740991\r\n'), [9007199254740991])
  t.strictSame(parsed(':-1000000000000000000\r\n'), [-1e18], 'as long as an integer of Redis may be')
  t.strictSame(parsed('+OK\r\n+\r\n'), ['OK', ''])
  t.strictSame(parsed('$0\r\n\r\n$2\r\n\r\n\r\n$-1\r\n*-1\r\n'), [
    Buffer.alloc(0),
    Buffer.from('\r\n'),
    null,
    null,
  ])
  t.strictSame(parsed('*0\r\n*2\r\n*1\r\n:1\r\n*0\r\n'), [[], [[1], []]])
  t.strictSame(parsed('*3\r\n:0\r\n$-1\r\n-ERR ü\r\n'.replace('ü', '\xc3\xbc')), [
    [0, null, new ReplyError('ERR ü')],
  ])
  t.equal(
    new ReplyError("ERR unknown command 'AUTH', with args beginning with: 'app' 'secret'").message,
    "ERR unknown command 'AUTH'",
  )
})

const leaf = fc.oneof(
  fc.constant(null),
  fc.integer({ min: -(2 ** 31), max: 2 ** 31 }).map((n) => n || 0),
  fc.constantFrom('OK', 'PONG', ''),
  fc.uint8Array({ maxLength: 40, size: 'max' }).map((bytes) => Buffer.from(bytes)),
  fc.constantFrom(0, 1, 4095, 4096, 4097, 70_000).map((length) => Buffer.alloc(length, '\r\n$1')),
  fc.constant(new ReplyError('ERR because')),
)
const { reply } = fc.letrec<{ reply: RespReply }>((tie) => ({
  reply: fc.oneof({ maxDepth: 5 }, leaf, fc.array(tie('reply'), { maxLength: 5 })),
}))

void t.test('replies are parsed as sent, whatever pieces they arrive in', async (t) => {
  fc.assert(
    fc.property(
      fc.array(reply, { maxLength: 8, size: 'max' }),
      fc.infiniteStream(fc.integer({ min: 1, max: 40 })),
      (sent, sizes) => {
        const bytes = Buffer.concat(sent.map(written))
        const pieces: Buffer[] = []
        for (let at = 0; at < bytes.length; ) {
          const [{ value: size }] = [sizes.next()]
          // Small pieces, and some that hold many replies.
          const end = at + (size > 30 ? size * 1000 : size)
          pieces.push(bytes.subarray(at, end))
          at = end
        }
        t.strictSame(parsed(...pieces), sent)
        t.strictSame(parsed(bytes), sent)
      },
    ),
    { numRuns: 60 },
  )
})

void t.test('a chunk full of replies may end in the middle of a line', async (t) => {
  const ones = Array.from({ length: 16_000 }, () => 1)
  t.strictSame(parsed(`${':1\r\n'.repeat(16_000)}+O`, 'K\r\n'), [...ones, 'OK'])
})

void t.test('invalid RESP2 throws at once, and the replies before it count', async (t) => {
  const nonsense = {
    'HTTP/1.1 400 Bad Request\r\n': /type 72/,
    '\r\n': /type 13/,
    '\n': /CR LF/,
    '%1\r\n': /type 37/,
    ':\r\n': /without digits/,
    ':-\r\n': /without digits/,
    ':1x\r\n': /other characters/,
    ':1:\r\n': /other characters/,
    ':1/\r\n': /other characters/,
    ':1\r\r\n': /other characters/,
    ':1x\n': /CR LF/,
    [`:${'1'.repeat(20)}\r\n`]: /too many/,
    ':1\n': /CR LF/,
    '$-2\r\n': /-2 bytes/,
    '$536870913\r\n': /536870913 bytes/,
    '$1\r\nabc': /longer than it said/,
    '$1\r\na\rc': /longer than it said/,
    '*-2\r\n': /-2 elements/,
    '*1048577\r\n': /1048577 elements/,
    ['*1\r\n'.repeat(9)]: /too deep/,
    [`+${'x'.repeat(70_000)}`]: /without an end/,
    [`+${'x'.repeat(70_000)}\r\n`]: /without an end/,
  }
  for (const [bytes, message] of Object.entries(nonsense)) {
    const replies: RespReply[] = []
    const parser = new Replies((reply) => void replies.push(reply))
    t.throws(() => parser.push(Buffer.from(`:1\r\n${bytes}`, 'latin1')), { name: 'ProtocolError', message })
    t.strictSame(replies, [1])
  }
  t.throws(() => parsed('\n'), { message: /CR LF/ })
  const parser = new Replies(() => {})
  parser.push(Buffer.from(`+${'x'.repeat(40_000)}`))
  t.throws(() => parser.push(Buffer.from('x'.repeat(40_000))), { message: /without an end/ })
})

void t.test('arrays are taken up to the largest and the deepest', async (t) => {
  t.strictSame(parsed('*1048576\r\n'), [], 'its elements are yet to come')
  t.strictSame(parsed(`${'*1\r\n'.repeat(8)}:1\r\n`), [[[[[[[[[1]]]]]]]]])
})

/** A command is an array of bulk strings, as a reply may be. */
function sent(outgoing: CommandBuffer): string[][] {
  const commands: string[][] = []
  const parser = new Replies(
    (reply) => void commands.push((reply as Buffer[]).map((part) => part.toString('latin1'))),
  )
  for (const part of outgoing.take()) parser.push(part)
  return commands
}

void t.test('commands arrive with the arguments they were given', async (t) => {
  const arg = fc.oneof(
    fc.constantFrom('', 'idempotency:pay:{af}:r:x', 'NX'),
    fc.integer(),
    fc.uint8Array({ maxLength: 40, size: 'max' }).map((bytes) => Buffer.from(bytes)),
    fc.constantFrom(4096, 4097, 65_536, 200_000).map((length) => Buffer.alloc(length, 'ab\r\n')),
  )
  fc.assert(
    fc.property(
      fc.array(fc.array(arg, { maxLength: 6 }), { maxLength: 40, size: 'max' }),
      fc.boolean(),
      (commands, reuses) => {
        const outgoing = new CommandBuffer()
        // What was taken stays whole while more is added.
        const first = [...commands]
        for (let round = 0; round < 2; round++) {
          for (const args of first) outgoing.add(commandHead('evalsha', 'abc'), args)
          t.strictSame(
            sent(outgoing),
            first.map((args) => [
              'evalsha',
              'abc',
              ...args.map((value) => (Buffer.isBuffer(value) ? value.toString('latin1') : String(value))),
            ]),
          )
          if (reuses) outgoing.reuse()
        }
      },
    ),
    { numRuns: 30 },
  )
})

void t.test('large arguments are not copied, and taken bytes are not overwritten', async (t) => {
  const outgoing = new CommandBuffer()
  const large = Buffer.alloc(65_536, 1)
  outgoing.add(commandHead('set'), ['a', large])
  outgoing.add(commandHead('get'), ['b'])
  const taken = outgoing.take()
  t.equal(taken[1], large)
  t.equal(taken.length, 3)
  const before = taken.map((part) => Buffer.from(part))
  for (let n = 0; n < 3000; n++) outgoing.add(commandHead('get'), ['c'.repeat(43)])
  t.strictSame(taken, before)
  t.equal(sent(outgoing).length, 3000)
  t.strictSame(outgoing.take(), [])
  const huge = 'x'.repeat(100_000)
  outgoing.add(commandHead('eval', huge), [])
  t.strictSame(sent(outgoing), [['eval', huge]])
})

void t.test('an argument fits wherever in its memory a command begins', async (t) => {
  const filler = Array.from({ length: 15 }, () => Buffer.alloc(4096, 'f'))
  for (let left = 0; left < 150; left++) {
    const outgoing = new CommandBuffer()
    outgoing.add(commandHead('a'), [...filler, Buffer.alloc(3850 + left, 'f')])
    const args = ['short', Buffer.from('bytes'), 123_456, 'more than a few', 'characters'.repeat(3)]
    outgoing.add(commandHead('b'), args)
    t.strictSame(sent(outgoing)[1], ['b', ...args.map(String)], `${left}`)
  }
  const outgoing = new CommandBuffer()
  outgoing.add(commandHead('a'), ['x'.repeat(100_000)])
  t.strictSame(sent(outgoing), [['a', 'x'.repeat(100_000)]])
})

void t.test('lengths are written as Redis reads them', async (t) => {
  const outgoing = new CommandBuffer()
  outgoing.add(commandHead('get'), ['', 'x'.repeat(9), 'x'.repeat(10)])
  t.equal(
    String(Buffer.concat(outgoing.take())),
    '*4\r\n$3\r\nget\r\n$0\r\n\r\n$9\r\nxxxxxxxxx\r\n$10\r\nxxxxxxxxxx\r\n',
  )
})

void t.test('text that is not ASCII, though it must be, does not shift what follows', async (t) => {
  const outgoing = new CommandBuffer()
  outgoing.add(commandHead('ü'), [])
  for (const text of ['ü', 'ü'.repeat(40), 'end']) outgoing.add(commandHead('echo'), [text])
  t.strictSame(sent(outgoing), [['ü'], ['echo', 'ü'], ['echo', 'ü'.repeat(40)], ['echo', 'end']])
})
