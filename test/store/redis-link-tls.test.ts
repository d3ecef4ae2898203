import { once } from 'node:events'
import type { AddressInfo } from 'node:net'
import { createServer } from 'node:tls'
import t from 'tap'
import { RedisLink } from '../../src/store/redis-link.ts'
import type { RespReply } from '../../src/store/resp.ts'
import { certificate } from '../support/certificates.ts'

/* A link over TLS is there once the server has proved who it is. Real servers: redis-tls.test.ts. */

const own = certificate('IP:127.0.0.1')
const stranger = certificate('IP:127.0.0.1')
t.teardown(() => {
  own[Symbol.dispose]()
  stranger[Symbol.dispose]()
})

void t.test('only a server whose certificate is trusted is linked to', async (t) => {
  const server = createServer({ cert: own.cert, key: own.key }, (socket) => {
    socket.on('error', () => {})
    socket.on('data', () => socket.write('+here\r\n'))
  }).listen(0, '127.0.0.1')
  server.on('tlsClientError', () => {})
  await once(server, 'listening')
  t.teardown(() => server.close())
  const { port } = server.address() as AddressInfo
  const linked = async (ca: Buffer) => {
    const events: string[] = []
    const { promise, resolve } = Promise.withResolvers<void>()
    const event = (name: string) => () => {
      events.push(name)
      resolve()
    }
    const address = { host: '127.0.0.1', port, username: '', password: '', db: 0 }
    const link = new RedisLink({ ...address, tls: { ca } }, 10_000, {
      onConnected: event('connected'),
      onError: (message) => void events.push(message),
      onClosed: event('closed'),
    })
    t.teardown(() => link.destroy())
    await promise
    return { link, events }
  }
  const { link, events } = await linked(own.cert)
  t.strictSame(events, ['connected'])
  t.equal(await link.ask<RespReply>('get', ['a'], (reply: RespReply) => reply), 'here')
  const other = await linked(stranger.cert)
  t.strictSame([other.events.length, other.events[1]], [2, 'closed'])
  t.match(other.events[0], /self.signed certificate/)
})
