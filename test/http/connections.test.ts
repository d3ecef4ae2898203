import { once } from 'node:events'
import type { AddressInfo } from 'node:net'
import t from 'tap'
import { TrafficServer } from '../../src/http/connections.ts'
import { everything } from '../support/raw.ts'

const UPGRADE = 'Connection: Upgrade\r\nUpgrade: websocket\r\n'

void t.test('a bug in any listener ends the connection and not the process', async (t) => {
  const bugs: unknown[] = []
  const wrong = (): never => {
    throw new Error('a bug')
  }
  const server = new TrafficServer({}, wrong, (error) => bugs.push(error))
  for (const event of ['upgrade', 'connect', 'checkContinue', 'checkExpectation']) server.on(event, wrong)
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  for (const request of [
    'GET / HTTP/1.1\r\nHost: a\r\n\r\n',
    `GET / HTTP/1.1\r\nHost: a\r\n${UPGRADE}\r\n`,
    'CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n',
    'PUT / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n',
    'PUT / HTTP/1.1\r\nHost: a\r\nExpect: more\r\nContent-Length: 1\r\n\r\n',
  ]) {
    bugs.length = 0
    t.equal(await everything(port, request), '', request)
    t.match(bugs, [{ message: 'a bug' }], request)
  }
  server.close()
  await once(server, 'close')
})
