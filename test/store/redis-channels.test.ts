import type { Socket } from 'node:net'
import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import type { Millis, RecordId } from '../../src/core/record.ts'
import { Channels } from '../../src/store/redis-channels.ts'
import type { RedisTarget } from '../../src/store/redis-connection.ts'
import { addressOf } from '../../src/store/redis-url.ts'
import { type Answer, fake, greeting } from '../support/fake-redis.ts'
import { until } from './fixtures.ts'

/* Servers that publish what the test wants. Real ones: redis-watch.test.ts. */

const PATIENT: Millis = 10_000
const [A, B, C] = ['a', 'b', 'c'] as [RecordId, RecordId, RecordId]

const bulk = (text: string) => `$${text.length}\r\n${text}\r\n`
const confirm = (kind: string, channel: string) => `*3\r\n${bulk(kind)}${bulk(channel)}:1\r\n`
const message = (channel: string) => `*3\r\n${bulk('smessage')}${bulk(channel)}${bulk('')}`
const usual: Answer = ([kind = '', channel = '']) => confirm(kind, channel)

async function serverOf(t: Test) {
  const server = { answer: usual, asked: [] as string[], last: null as Socket | null }
  const { url, sockets } = await fake(
    t,
    greeting((command, socket) => {
      server.asked.push(command.join(' '))
      server.last = socket
      return server.answer(command, socket)
    }),
  )
  const target: RedisTarget = { find: () => addressOf(url) }
  const say = (text: string) => void server.last?.write(text)
  return Object.assign(server, { target, sockets, say })
}

function channelsOf(t: Test, of: (id: RecordId) => RedisTarget | null, timeoutMs = PATIENT) {
  const events: string[] = []
  const state = { isMoved: false }
  const channels = new Channels({
    timeoutMs,
    onEvent: (kind, detail) => void events.push(`${kind}: ${detail}`),
    channelOf: (id) => `c:${id}`,
    targetOf: of,
    isMoved: () => state.isMoved,
  })
  t.teardown(() => channels.close())
  const watch = async (id: RecordId) => {
    const watcher = { told: 0, stop: () => {} }
    watcher.stop = await channels.watch(id, () => void watcher.told++)
    return watcher
  }
  return { channels, events, watch, state }
}

const hasEnded = ({ readableEnded, destroyed }: Socket) => readableEnded || destroyed

void t.test('a watcher is told of messages on the channel of its record', async (t) => {
  const server = await serverOf(t)
  const { watch, events } = channelsOf(t, () => server.target)
  await wait(10)
  t.equal(server.sockets.length, 0, 'nobody watches')
  const [a, b] = [await watch(A), await watch(B)]
  t.strictSame(server.asked, ['ssubscribe c:a', 'ssubscribe c:b'])
  server.say(message('c:a') + message('c:x') + message('c:a'))
  await until(() => a.told === 2)
  server.say(message('c:b'))
  await until(() => b.told === 1)
  t.equal(a.told, 2)
  a.stop()
  await until(() => server.asked.length === 3)
  t.equal(server.asked[2], 'sunsubscribe c:a')
  server.say(message('c:a') + message('c:b'))
  await until(() => b.told === 2)
  t.equal(a.told, 2)
  const again = await watch(A)
  t.equal(server.asked[3], 'ssubscribe c:a')
  server.say(message('c:a'))
  await until(() => again.told === 1)
  t.equal(server.sockets.length, 1)
  t.strictSame(events, [])
})

void t.test('when its server may be another, all is subscribed again, and told', async (t) => {
  const server = await serverOf(t)
  const { channels, watch } = channelsOf(t, () => server.target)
  channels.resubscribe()
  const [a, b] = [await watch(A), await watch(B)]
  channels.resubscribe()
  await until(() => a.told === 1 && b.told === 1)
  t.strictSame(server.asked.slice(2).toSorted(), ['ssubscribe c:a', 'ssubscribe c:b'])
  t.equal(server.sockets.length, 2)
  server.say(message('c:b'))
  await until(() => b.told === 2)
  t.equal(a.told, 1)
})

void t.test('a connection that ends, or brings nonsense, is replaced, and all is told', async (t) => {
  const server = await serverOf(t)
  const { watch, events } = channelsOf(t, () => server.target)
  const [a, b] = [await watch(A), await watch(B)]
  let told = 0
  for (const end of [
    () => server.last?.destroy(),
    () => server.say('*1\r\n:1\r\n'),
    () => server.say('+OK\r\n'),
    () => server.say(confirm('ssubscribe', 'c:a')),
  ]) {
    end()
    told++
    await until(() => a.told === told && b.told === told)
  }
  t.equal(server.sockets.length, 5)
  t.strictSame(events, [], 'other connections to that server tell of it')
})

void t.test('a slot that leaves its server ends the subscription, and the next one is told', async (t) => {
  const server = await serverOf(t)
  const { watch } = channelsOf(t, () => server.target)
  const [a, b] = [await watch(A), await watch(B)]
  server.say(confirm('sunsubscribe', 'c:a') + confirm('sunsubscribe', 'c:x'))
  await until(() => a.told === 1)
  t.strictSame(server.asked.slice(2), ['ssubscribe c:a'])
  t.equal(b.told, 0)
  t.equal(server.sockets.length, 1)
})

void t.test('a record that has moved is subscribed where it is', async (t) => {
  const [one, two] = [await serverOf(t), await serverOf(t)]
  const at = new Map<RecordId, RedisTarget>([
    [A, one.target],
    [B, one.target],
    [C, two.target],
  ])
  const { channels, watch } = channelsOf(t, (id) => at.get(id) ?? null)
  const [a, b, c] = [await watch(A), await watch(B), await watch(C)]
  at.set(A, two.target)
  channels.moved()
  await until(() => a.told === 1)
  t.strictSame(two.asked, ['ssubscribe c:c', 'ssubscribe c:a'])
  t.strictSame([b.told, c.told], [0, 0])
  t.notOk(hasEnded(one.sockets[0] as Socket), 'it is still needed')
  two.say(message('c:a'))
  await until(() => a.told === 2)
  at.set(B, two.target)
  channels.moved()
  await until(() => b.told === 1)
  await until(() => hasEnded(one.sockets[0] as Socket))
  t.equal(two.sockets.length, 1)
  // One that comes back has a connection again.
  at.set(B, one.target)
  channels.moved()
  await until(() => b.told === 2)
  t.equal(one.sockets.length, 2)
})

void t.test('a server that nobody watches any more is left once slots have moved', async (t) => {
  const [one, two] = [await serverOf(t), await serverOf(t)]
  const { channels, watch } = channelsOf(t, (id) => (id === A ? one.target : two.target))
  const a = await watch(A)
  await watch(B)
  a.stop()
  channels.moved()
  await until(() => one.sockets.every(hasEnded))
  t.notOk(two.sockets.some(hasEnded))
})

void t.test('between two attempts to connect a watch waits for neither', async (t) => {
  const { url, sockets } = await fake(t, (_, socket) => {
    socket.destroy()
    return null
  })
  const target: RedisTarget = { find: () => addressOf(url) }
  const { watch } = channelsOf(t, () => target)
  await watch(A)
  // From then on half a second passes between them.
  await until(() => sockets.length === 5)
  await wait(50)
  const began = performance.now()
  await watch(B)
  t.ok(performance.now() - began < 300)
})

void t.test('a record whose server is unknown is subscribed once it is known, and told', async (t) => {
  const server = await serverOf(t)
  let target: RedisTarget | null = null
  const { channels, watch } = channelsOf(t, () => target)
  const a = await watch(A)
  channels.moved()
  t.equal(a.told, 0)
  target = server.target
  channels.moved()
  await until(() => a.told === 1)
  t.strictSame(server.asked, ['ssubscribe c:a'])
  a.stop()
  await until(() => server.asked.length === 2)
})

void t.test('a refusal is told once, until there is none; not where the slot has moved', async (t) => {
  const server = await serverOf(t)
  const { channels, watch, events, state } = channelsOf(t, () => server.target)
  server.answer = () => '-MOVED 1 10.0.0.1:1\r\n'
  state.isMoved = true
  const a = await watch(A)
  t.strictSame(events, [])
  state.isMoved = false
  server.answer = () => '-NOPERM no\r\n'
  await watch(B)
  await watch(C)
  t.strictSame(events, [
    'error: subscribing is refused, so waiting requests poll the store: Redis refuses: NOPERM no',
  ])
  t.equal(server.sockets.length, 1, 'a refusal is an answer')
  server.answer = usual
  channels.moved()
  await until(() => a.told === 1)
  server.answer = () => '-NOPERM no\r\n'
  channels.resubscribe()
  await until(() => events.length === 2)
})

void t.test('a subscription without an answer is not waited for, and made on a new connection', async (t) => {
  const server = await serverOf(t)
  const { watch } = channelsOf(t, () => server.target, 100)
  server.answer = () => null
  const began = performance.now()
  const a = await watch(A)
  t.ok(performance.now() - began < 2000)
  server.answer = usual
  await until(() => a.told > 0)
  t.ok(server.sockets.length > 1)
})

void t.test('another answer to a subscription, or to its end, belongs to another command', async (t) => {
  const server = await serverOf(t)
  const { watch } = channelsOf(t, () => server.target)
  const a = await watch(A)
  server.answer = ([, channel = '']) => confirm('subscribe', channel)
  const watching = watch(B)
  await until(() => server.asked.length >= 2)
  server.answer = usual
  const b = await watching
  await until(() => b.told > 0 && a.told > 0)
  const sockets = server.sockets.length
  server.answer = () => '+OK\r\n'
  b.stop()
  await until(() => server.asked.includes('sunsubscribe c:b'))
  server.answer = usual
  await until(() => server.sockets.length > sockets)
})

void t.test('close ends the connections, and whoever waits for a subscription', async (t) => {
  const server = await serverOf(t)
  const { channels, watch } = channelsOf(t, () => server.target)
  await watch(A)
  server.answer = () => null
  const waiting = watch(B)
  await until(() => server.asked.length === 2)
  // It keeps its side open.
  for (const socket of server.sockets) socket.allowHalfOpen = true
  const began = performance.now()
  const closing = channels.close()
  await waiting
  t.ok(performance.now() - began < 200)
  await closing
  t.ok(performance.now() - began >= 200)
  t.ok(hasEnded(server.sockets[0] as Socket))
  const late = await watch(C)
  await wait(30)
  t.equal(server.sockets.length, 1)
  late.stop()
  const never = channelsOf(t, () => server.target)
  await never.channels.close()
  await never.watch(A)
  await wait(30)
  t.equal(server.sockets.length, 1)
})
