import { once } from 'node:events'
import type { Socket } from 'node:net'
import { setTimeout as wait } from 'node:timers/promises'
import { type Ask, rawPost, type Scenario, type Work } from './clients.ts'
import { IDLE, REQUEST_LIMIT, RESPONSE_LIMIT } from './config.ts'

const BODY = `{"pad":"${'x'.repeat(4000)}"}`
/** More than the proxy and two sockets buffer when nobody reads. */
const MUCH = 16 * RESPONSE_LIMIT
const SHADOW = '/v1/shadow'
const RETRY = [201, 'idempotency_key_in_progress'] as const

/** Closes the connection, or resets it. */
function leave({ random }: Work, socket: Socket): void {
  if (random() < 0.5) socket.destroy()
  else socket.resetAndDestroy()
}

function fresh({ next }: Work, more: Partial<Ask> = {}): Ask {
  const operation = next()
  return { path: '/v1/payments', key: operation, operation, body: BODY, ...more }
}

/** Leaves in the middle of the answer. */
const during =
  (act: string, more: Partial<Ask> = {}): Scenario =>
  async (work) => {
    const ask = fresh(work, { act, ...more })
    if (ask.path === SHADOW) work.clients.cutInShadow++
    const socket = await work.clients.raw(rawPost(ask), BODY)
    await Promise.race([once(socket, 'data'), once(socket, 'close')])
    leave(work, socket)
  }

/** Leaves at each stage of a request in turn. */
export const ABORTS: readonly Scenario[] = [
  /** Connected, nothing sent. */
  async (work) => leave(work, await work.clients.raw()),
  /** In the middle of the head. */
  async (work) => {
    const head = rawPost(fresh(work))
    const socket = await work.clients.raw(head.slice(0, head.length / 2))
    await wait(5)
    leave(work, socket)
  },
  /** In the middle of the body: nothing is claimed, so the retry executes. */
  async (work) => {
    const ask = fresh(work)
    const socket = await work.clients.raw(rawPost(ask), BODY.slice(0, 2000))
    await wait(5)
    leave(work, socket)
    await work.clients.ask(ask, 201)
  },
  /** Right after sending the whole request. */
  async (work) => {
    const ask = fresh(work)
    const socket = await work.clients.raw()
    socket.write(rawPost(ask))
    socket.end(BODY)
    await wait(work.random() * 3)
    leave(work, socket)
    await work.clients.ask(ask, ...RETRY)
  },
  /** While the upstream works. */
  async (work) => {
    const ask = fresh(work, { act: 'late:40' })
    const socket = await work.clients.raw(rawPost(ask), BODY)
    await wait(20)
    leave(work, socket)
    await work.clients.ask(ask, ...RETRY)
  },
  /** While held as a duplicate. */
  async (work) => {
    const ask = fresh(work, { path: '/v1/waiting', act: 'late:60' })
    const first = work.clients.ask(ask, 201)
    await wait(20)
    const socket = await work.clients.raw(rawPost(ask), BODY)
    await wait(20)
    leave(work, socket)
    await first
  },
  during(`ok:${RESPONSE_LIMIT}`),
  during(`chunks:${3 * RESPONSE_LIMIT}`),
  during('events:20'),
  /** In the middle of a replay. */
  async (work) => {
    const ask = fresh(work, { act: `ok:${RESPONSE_LIMIT}` })
    await work.clients.ask(ask, 201)
    const socket = await work.clients.raw(rawPost(ask), BODY)
    await Promise.race([once(socket, 'data'), once(socket, 'close')])
    leave(work, socket)
  },
  /** During unprotected requests: an upload, a download. */
  async (work) => {
    const ask = { path: '/v1/things', operation: work.next() }
    const socket = await work.clients.raw(rawPost(ask, REQUEST_LIMIT), BODY)
    await wait(5)
    leave(work, socket)
  },
  during(`chunks:${3 * RESPONSE_LIMIT}`, { path: '/v1/unguarded' }),
  during('events:20', { path: '/v1/unguarded' }),
  /** During requests in shadow mode. */
  async (work) => {
    work.clients.cutInShadow++
    const socket = await work.clients.raw(rawPost(fresh(work, { path: SHADOW, act: 'late:30' })), BODY)
    await wait(work.random() * 20)
    leave(work, socket)
  },
  during('events:20', { path: SHADOW }),
  /** After two requests in one write. */
  async (work) => {
    const [one, other] = [fresh(work), fresh(work)]
    const socket = await work.clients.raw(rawPost(one), BODY, rawPost(other), BODY)
    await wait(work.random() * 5)
    leave(work, socket)
  },
  /** With a tunnel half open. */
  async (work) => {
    const socket = await work.clients.raw(
      'GET /socket HTTP/1.1\r\nhost: api.test\r\nconnection: upgrade\r\nupgrade: websocket\r\n' +
        'sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n',
    )
    await Promise.race([once(socket, 'data'), once(socket, 'close')])
    socket.write('ping')
    await wait(5)
    leave(work, socket)
  },
  /** Never sends the rest: gets an error, or is cut off. */
  async (work) => {
    const socket = await work.clients.raw(rawPost(fresh(work)), BODY.slice(0, 100))
    socket.resume()
    await Promise.race([once(socket, 'close'), wait(4 * IDLE)])
    leave(work, socket)
  },
  /** Never reads the rest. */
  async (work) => {
    const socket = await work.clients.raw(rawPost(fresh(work, { act: `chunks:${MUCH}` })), BODY)
    socket.pause()
    await wait(2 * IDLE)
    leave(work, socket)
  },
]
