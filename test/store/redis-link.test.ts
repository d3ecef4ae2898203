import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { admittingScript, script } from '../../src/store/redis-connection.ts'
import {
  hostPortText,
  type LinkEvents,
  RedisLink,
  redisFailure,
  repliesMismatch,
  wordsOf,
} from '../../src/store/redis-link.ts'
import { addressOf } from '../../src/store/redis-url.ts'
import { ReplyError, type RespArg, type RespReply } from '../../src/store/resp.ts'
import { type Answer, fake } from '../support/fake-redis.ts'
import { until } from './fixtures.ts'

const PATIENT: Millis = 10_000
const FAST: Millis = 100
const APPLIED = { name: 'StoreUnavailable', maybeApplied: true }
const NOT_APPLIED = { name: 'StoreUnavailable', maybeApplied: false }
const same = (reply: RespReply) => reply
const ask = (link: RedisLink, name: string, ...args: RespArg[]) => link.ask<RespReply>(name, args, same)
const textOf = (reply: RespReply) => (Buffer.isBuffer(reply) ? reply.toString() : reply)
const echo: Answer = ([, arg = '']) => `$${arg.length}\r\n${arg}\r\n`

async function linked(
  t: Test,
  answer: Answer,
  { timeoutMs = PATIENT, onMessage }: { timeoutMs?: Millis; onMessage?: LinkEvents['onMessage'] } = {},
) {
  const server = await fake(t, answer)
  const errors: string[] = []
  const closings: number[] = []
  const { promise: connected, resolve: onConnected } = Promise.withResolvers<void>()
  const { promise: closed, resolve } = Promise.withResolvers<void>()
  const link = new RedisLink(addressOf(server.url), timeoutMs, {
    onConnected,
    onError: (message) => void errors.push(message),
    onClosed: () => {
      closings.push(performance.now())
      resolve()
    },
    onMessage,
  })
  t.teardown(() => link.destroy())
  t.equal(link.isOpen, false, 'not before it is connected')
  await connected
  t.equal(link.isOpen, true)
  return { ...server, link, errors, closings, closed }
}

/** Takes a server that has already answered: what it is sent next is written at once. */
const sent = () => new Promise(setImmediate)

void t.test('a place is named as in a URL', async (t) => {
  t.equal(hostPortText({ host: 'redis.test', port: 6379 }), 'redis.test:6379')
  t.equal(hostPortText({ host: '::1', port: 6380 }), '[::1]:6380')
})

void t.test(
  'a script is sent the identity where it admits, and a number that its reply ends with',
  async (t) => {
    const seen: string[][] = []
    const { link, url } = await linked(t, (command) => {
      seen.push(command)
      return `*2\r\n:7\r\n:${command.at(-1)}\r\n`
    })
    t.strictSame(link.address, addressOf(url))
    const [put, get] = [admittingScript('put'), script('get')]
    t.strictSame(await link.run(put, [1, 'a'], same), [7])
    link.identity = 'run-id'
    t.strictSame(await link.run(put, [1, 'a'], same), [7])
    t.strictSame(await link.run(get, [1, 'b'], same), [7])
    t.strictSame(
      seen.map(([name, , ...args]) => [name, ...args]),
      [
        ['evalsha', '1', 'a', '', '1'],
        ['evalsha', '1', 'a', 'run-id', '2'],
        ['evalsha', '1', 'b', '3'],
      ],
    )
    t.not(seen[0]?.[1], seen[2]?.[1])
  },
)

void t.test('a script that the server does not know is sent whole, once', async (t) => {
  const seen: string[][] = []
  let knows = true
  const { link } = await linked(t, (command) => {
    seen.push(command)
    if (command[0] === 'echo') return '+here\r\n'
    return command[0] === 'eval' && knows ? `*1\r\n:${command.at(-1)}\r\n` : '-NOSCRIPT none\r\n'
  })
  const get = script('get')
  t.strictSame(await link.run(get, [1, 'a'], same), [])
  t.strictSame(seen[1], ['eval', get.source, '1', 'a', '1'])
  knows = false
  await t.rejects(link.run(get, [1, 'a'], same), { ...NOT_APPLIED, message: /refuses: NOSCRIPT/ })
  t.strictSame(
    seen.map(([name]) => name),
    ['evalsha', 'eval', 'evalsha', 'eval'],
  )
  await t.rejects(ask(link, 'evalsha', 'f'), { ...NOT_APPLIED, message: /NOSCRIPT/ })
  t.equal(seen.length, 5, 'nor a plain command again')
  t.equal(await ask(link, 'echo'), 'here')
})

void t.test('a script that is refused for another reason is not sent again', async (t) => {
  const seen: string[] = []
  const { link } = await linked(t, ([name = '']) => {
    seen.push(name)
    return '-ERR no NOSCRIPT\r\n'
  })
  await t.rejects(link.run(script('get'), [0], same), {
    ...NOT_APPLIED,
    message: 'Redis refuses: ERR no NOSCRIPT',
  })
  t.strictSame(seen, ['evalsha'])
})

void t.test('a reply to another script is no reply, and ends the connection', async (t) => {
  for (const reply of ['*2\r\n:7\r\n:2\r\n', '*0\r\n', ':1\r\n', '+OK\r\n']) {
    const { link, errors, closed } = await linked(t, () => reply)
    const message = 'no answer from Redis: replies do not match their commands'
    await t.rejects(link.run(script('get'), [0], same), { ...APPLIED, message })
    await closed
    t.strictSame(errors, ['replies do not match their commands'])
    t.equal(link.isOpen, false)
  }
})

void t.test('a reader is told the link, and may find that a reply belongs to another command', async (t) => {
  const { link, errors, closed } = await linked(t, echo)
  t.equal(await link.ask('echo', ['a'], (_, on) => on), link)
  const wrong = link.ask('echo', ['a'], () => {
    throw new TypeError('bug')
  })
  const next = ask(link, 'echo', 'b')
  await t.rejects(wrong, { name: 'TypeError' })
  t.equal(textOf(await next), 'b', 'a bug is the problem of its own command alone')
  const other = link.ask('echo', ['c'], () => {
    throw repliesMismatch()
  })
  const after = ask(link, 'echo', 'd')
  await t.rejects(other, { ...APPLIED, message: /replies do not match/ })
  await t.rejects(after, { ...APPLIED, message: /Connection is closed/ })
  await closed
  t.strictSame(errors, ['replies do not match their commands'])
})

void t.test('a reply that nobody asked for ends the connection', async (t) => {
  const { link, sockets, errors, closed } = await linked(t, echo)
  await ask(link, 'echo', 'a')
  sockets[0]?.write('+more\r\n')
  await closed
  t.strictSame(errors, ['an unexpected reply'])
})

void t.test('replies are matched by order, however many are awaited', async (t) => {
  const { link } = await linked(t, echo)
  const round = async (count: number) => {
    const numbers = Array.from({ length: count }, (_, n) => String(n))
    const replies = await Promise.all(numbers.map((n) => ask(link, 'echo', n)))
    t.strictSame(replies.map(textOf), numbers)
  }
  // Beginning at various places, up to the room there is, and beyond.
  for (const count of [5, 64, 63, 1, 65, 127, 128, 129, 300]) await round(count)
})

void t.test('large arguments arrive in their places', async (t) => {
  const { link } = await linked(t, echo)
  const texts = ['a', 'b'.repeat(10_000), 'c', 'd'.repeat(200_000)]
  const replies = await Promise.all(texts.map((text) => ask(link, 'echo', Buffer.from(text))))
  t.ok(replies.every((reply, n) => textOf(reply) === texts[n]))
})

void t.test('a command times out after its time, not before, and its late reply is dropped', async (t) => {
  const late: string[] = []
  const { link, sockets, closings } = await linked(
    t,
    (command, socket) => {
      if (command[0] !== 'hold') return echo(command, socket)
      late.push(command[1] as string)
      return null
    },
    { timeoutMs: FAST },
  )
  for (const reply of ['+late\r\n', '-ERR late\r\n', ':1\r\n']) {
    const asked = performance.now()
    await t.rejects(ask(link, 'hold', 'x'), {
      ...APPLIED,
      message: 'no answer from Redis: Command timed out',
    })
    const took = performance.now() - asked
    t.ok(took >= FAST - 2, `after ${took} ms`)
    sockets[0]?.write(reply)
    t.equal(textOf(await ask(link, 'echo', 'own')), 'own')
  }
  t.equal(late.length, 3)
  // A later command has a time of its own.
  const first = t.rejects(ask(link, 'hold', 'x'), APPLIED)
  await wait(FAST / 2)
  const asked = performance.now()
  await t.rejects(ask(link, 'hold', 'y'), APPLIED)
  await first
  t.ok(performance.now() - asked >= FAST - 2)
  t.equal(closings.length, 0)
})

void t.test('a script whose late reply is that of another ends the connection', async (t) => {
  const { link, sockets, errors, closed } = await linked(t, () => null, { timeoutMs: FAST })
  await t.rejects(link.run(script('get'), [0], same), APPLIED)
  sockets[0]?.write('*1\r\n:2\r\n')
  await closed
  t.strictSame(errors, ['replies do not match their commands'])
})

void t.test('a script that has timed out is not sent whole after all', async (t) => {
  const seen: string[] = []
  const { link, sockets } = await linked(
    t,
    (command, socket) => {
      seen.push(command[0] as string)
      return command[0] === 'echo' ? echo(command, socket) : null
    },
    { timeoutMs: FAST },
  )
  await t.rejects(link.run(script('get'), [0], same), APPLIED)
  sockets[0]?.write('-NOSCRIPT none\r\n')
  for (const text of ['a', 'b']) t.equal(textOf(await ask(link, 'echo', text)), text)
  t.strictSame(seen, ['evalsha', 'echo', 'echo'])
})

void t.test('a connection is dead after five commands in a row that time out', async (t) => {
  let isSilent = true
  const { link, closed, closings } = await linked(
    t,
    (command, socket) => (isSilent ? null : echo(command, socket)),
    { timeoutMs: FAST },
  )
  const silent = async (count: number) => {
    const asked = Array.from({ length: count }, () => ask(link, 'echo', 'x'))
    for (const one of await Promise.allSettled(asked)) t.match(one, { reason: APPLIED })
  }
  await silent(4)
  t.equal(link.isOpen, true)
  await silent(1)
  await closed
  t.equal(closings.length, 1)
  isSilent = false
})

void t.test('any reply shows that a connection is not silent', async (t) => {
  let held: (() => void)[] = []
  const { link, closings } = await linked(
    t,
    (_, socket) => {
      held.push(() => socket.write('+late\r\n'))
      return null
    },
    { timeoutMs: FAST },
  )
  for (let round = 0; round < 2; round++) {
    const asked = Array.from({ length: 4 }, () => ask(link, 'get', 'x'))
    for (const one of await Promise.allSettled(asked)) t.match(one, { reason: APPLIED })
    for (const answer of held) answer()
    held = []
    await wait(20)
  }
  t.equal(link.isOpen, true)
  t.equal(closings.length, 0)
})

void t.test('a command that alone gets no reply ends the connection', async (t) => {
  const { link, sockets, closed } = await linked(t, () => null, { timeoutMs: FAST })
  const asked = [ask(link, 'first'), ask(link, 'second'), ask(link, 'third')]
  await sent()
  await until(() => sockets[0]?.bytesRead !== 0)
  sockets[0]?.write('+first\r\n')
  t.match(await Promise.allSettled(asked), [
    { value: 'first' },
    { reason: { ...APPLIED, message: /timed out/ } },
    { reason: { ...APPLIED, message: /Connection is closed/ } },
  ])
  await closed
})

void t.test('end sends what is asked, takes no more and does not wait for ever', async (t) => {
  const seen: string[] = []
  const { link, sockets, closings } = await linked(t, ([name = '']) => {
    seen.push(name)
    return null
  })
  // A server that keeps its side open.
  Object.assign(sockets[0] as object, { allowHalfOpen: true })
  const asked = ask(link, 'last')
  const began = performance.now()
  const ended = link.end()
  t.equal(link.isOpen, false)
  await t.rejects(asked, { ...APPLIED, message: /Connection is closed/ })
  await ended
  const took = performance.now() - began
  t.ok(took >= 240 && took < 2000, `after ${took} ms`)
  t.strictSame(seen, ['last'])
  t.equal(closings.length, 1)
  await link.end()
})

void t.test('a timeout that is noticed while it ends does not keep it from ending', async (t) => {
  const { link, sockets, closings } = await linked(t, () => null, { timeoutMs: FAST })
  // A server that keeps its side open.
  Object.assign(sockets[0] as object, { allowHalfOpen: true })
  const asked = t.rejects(ask(link, 'get', 'a'), { ...APPLIED, message: /Connection is closed/ })
  await sent()
  await sent()
  // As long as the command's timer: runs right after it, before what that one has scheduled.
  const ending = wait(FAST).then(() => link.end())
  const busyUntil = performance.now() + 2 * FAST
  while (performance.now() < busyUntil);
  await ending
  await asked
  t.equal(closings.length, 1)
})

void t.test('end is immediate where the server closes its side, too', async (t) => {
  const { link, errors } = await linked(t, () => null)
  const began = performance.now()
  await link.end()
  t.ok(performance.now() - began < 200)
  t.strictSame(errors, [])
})

void t.test('a connection that is there in time is kept', async (t) => {
  const { url } = await fake(t, echo)
  const { promise: connected, resolve: onConnected } = Promise.withResolvers<void>()
  const events = { onConnected, onError() {}, onClosed() {} }
  const link = new RedisLink(addressOf(url), PATIENT, events, 500)
  t.teardown(() => link.destroy())
  await connected
  await wait(600)
  t.equal(textOf(await ask(link, 'echo', 'a')), 'a')
})

void t.test('end of a connection that is not there yet is immediate', async (t) => {
  const { url } = await fake(t, () => null)
  let connections = 0
  const link = new RedisLink(addressOf(url), PATIENT, {
    onConnected: () => connections++,
    onError() {},
    onClosed() {},
  })
  const began = performance.now()
  await link.end()
  t.ok(performance.now() - began < 200)
  t.equal(connections, 0)
})

void t.test('a connection that has ended takes no commands, whoever has ended it', async (t) => {
  const refused = { ...NOT_APPLIED, message: 'no answer from Redis: Connection is closed.' }
  const { link, errors, closed } = await linked(t, () => null)
  link.destroy()
  t.equal(link.isOpen, false)
  await t.rejects(ask(link, 'get', 'a'), refused)
  await closed
  t.strictSame(errors, [])
  await t.rejects(ask(link, 'get', 'a'), refused)
  await t.rejects(link.run(script('get'), [0], same), refused)
  const other = await linked(t, () => null)
  other.sockets[0]?.destroy()
  await other.closed
  t.equal(other.link.isOpen, false)
  await t.rejects(ask(other.link, 'get', 'a'), refused)
})

void t.test('a message is not taken for a reply', async (t) => {
  const messages: RespReply[] = []
  const awaited: unknown[] = []
  const { link, sockets } = await linked(t, () => '+news\r\n+reply\r\n', {
    onMessage: (message, read) => {
      awaited.push(read)
      if (message === 'reply') return false
      messages.push(message)
      return true
    },
  })
  t.equal(await ask(link, 'get', 'a'), 'reply')
  t.strictSame(messages, ['news'])
  t.strictSame(awaited, [same, same])
  sockets[0]?.write('+more\r\n')
  await until(() => messages.length === 2)
  t.equal(awaited[2], undefined, 'nobody waits')
})

void t.test('a server that has become a replica is left, after the replies to come', async (t) => {
  const { link, closed } = await linked(t, ([name]) => (name === 'set' ? '-READONLY replica\r\n' : '+OK\r\n'))
  const asked = [ask(link, 'set', 'a', 1), ask(link, 'get', 'a')]
  t.match(await Promise.allSettled(asked), [
    { reason: { ...NOT_APPLIED, message: /READONLY/ } },
    { value: 'OK' },
  ])
  await closed
})

void t.test('a refusal says what is wrong, and that nothing was applied', async (t) => {
  t.match(redisFailure('WRONGTYPE of key'), { name: 'CorruptRecord' })
  t.match(redisFailure('OOM command not allowed'), { name: 'StoreFull', maybeApplied: false })
  t.match(redisFailure('ERR WRONGTYPE OOM'), {
    ...NOT_APPLIED,
    message: 'Redis refuses: ERR WRONGTYPE OOM',
    reply: 'ERR WRONGTYPE OOM',
  })
})

void t.test('words are the bulk strings of an array', async (t) => {
  t.strictSame(wordsOf([Buffer.from('a'), 1, null, Buffer.from('b')]), ['a', '', '', 'b'])
  t.strictSame(wordsOf('OK'), [])
  t.strictSame(wordsOf(new ReplyError('ERR')), [])
})
