import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { RedisLink } from '../../src/store/redis-link.ts'
import { addressOf } from '../../src/store/redis-url.ts'
import type { RespArg } from '../../src/store/resp.ts'
import { type Answer, fake } from '../support/fake-redis.ts'
import { until } from './fixtures.ts'

/* What a link writes arrives as it was asked for, however slowly the server reads it. */

const PATIENT: Millis = 10_000
const FAST: Millis = 400
/** The memory that commands are gathered in. */
const CHUNK = 64 * 1024
const echo: Answer = ([, arg = '']) => `$${arg.length}\r\n${arg}\r\n`
const ask = (link: RedisLink, name: string, ...args: RespArg[]) =>
  link.ask<string>(name, args, (reply) => String(reply))
/** The turn in which commands are written is over. */
const sent = () => new Promise(setImmediate)

async function linked(t: Test, answer: Answer, timeoutMs = PATIENT) {
  const server = await fake(t, answer)
  const { promise: connected, resolve: onConnected } = Promise.withResolvers<void>()
  const link = new RedisLink(addressOf(server.url), timeoutMs, { onConnected, onError() {}, onClosed() {} })
  t.teardown(() => link.destroy())
  await connected
  await until(() => server.sockets.length === 1)
  return { ...server, link }
}

void t.test('commands of one turn that take two pieces of memory are all sent', async (t) => {
  const { link } = await linked(t, echo)
  const texts = ['a', 'b'].map((letter) => letter.repeat(0.6 * CHUNK))
  t.strictSame(await Promise.all(texts.map((text) => ask(link, 'echo', text))), texts)
  t.equal(await ask(link, 'echo', 'next'), 'next')
})

void t.test('memory is not used again while the server has not read it', async (t) => {
  const { link, sockets } = await linked(t, (command, socket) =>
    command[0] === 'set' ? '+OK\r\n' : echo(command, socket),
  )
  sockets[0]?.pause()
  // More than fits between the two.
  const large = ask(link, 'set', 'a', Buffer.alloc(16 * 1024 * 1024))
  const texts = Array.from({ length: 20 }, (_, n) => `text ${n}`)
  const asked: Promise<string>[] = []
  for (const text of texts) {
    await sent()
    asked.push(ask(link, 'echo', text))
  }
  await sent()
  sockets[0]?.resume()
  t.equal(await large, 'OK')
  t.strictSame(await Promise.all(asked), texts)
})

void t.test('a command times out while others are sent', async (t) => {
  const { link } = await linked(t, () => null, FAST)
  let more = 0
  const ignored = (): void => {}
  const timer = setInterval(() => {
    if (more++ < 20) ask(link, 'get', 'b').catch(ignored)
    else clearInterval(timer)
  }, FAST / 8)
  t.teardown(() => clearInterval(timer))
  await t.rejects(ask(link, 'get', 'a'), { name: 'StoreUnavailable', message: /timed out/ })
  t.ok(more < 20, `${more} others`)
})

void t.test('a command that can no longer be written was not applied', async (t) => {
  let isFirst = true
  const { link } = await linked(t, (_, socket) => {
    if (isFirst) socket.end('+first\r\n')
    isFirst = false
    return null
  })
  t.equal(await ask(link, 'get', 'a'), 'first')
  const asked: Promise<unknown>[] = []
  while (link.isOpen) {
    asked.push(ask(link, 'get', 'b').catch((error: unknown) => error))
    await sent()
  }
  // The server had ended its side before the last two of them, and the connection was not closed yet.
  for (const late of asked.slice(-2))
    t.match(await late, { name: 'StoreUnavailable', maybeApplied: false, message: /Connection is closed/ })
})
