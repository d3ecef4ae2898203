import { once } from 'node:events'
import { createServer } from 'node:http'
import { type AddressInfo, connect } from 'node:net'
import t from 'tap'
import { refusal } from '../../src/core/refusal.ts'
import { StreamRequest, type StreamResponse } from '../../src/http/request.ts'
import { ResponseWriter } from '../../src/http/write.ts'
import { post, readAnswer } from '../support/raw.ts'

async function serving(
  answer: (request: StreamRequest, response: StreamResponse) => void,
  keepAliveTimeout = 60_000,
): Promise<{ port: number } & AsyncDisposable> {
  const server = createServer(
    { keepAliveTimeout, keepAliveTimeoutBuffer: 0, IncomingMessage: StreamRequest },
    answer,
  ).listen(0, '127.0.0.1')
  await once(server, 'listening')
  return {
    port: (server.address() as AddressInfo).port,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections()
      await new Promise((resolve) => server.close(resolve))
    },
  }
}

void t.test(
  'P27 the watch over a slow reader does not change the keep-alive timeout of the connection',
  async (t) => {
    const writer = new ResponseWriter('urn:x:', 60_000)
    await using server = await serving((request, response) => {
      request.resume().on('end', () => writer.problem(response, refusal('upstream_failed', 'x')))
    }, 300)
    const client = connect(server.port, '127.0.0.1')
    for (let i = 0; i < 2; i++) {
      client.write(post('/', null, '{}'))
      t.equal((await readAnswer(client)).status, 502)
    }
    client.resume()
    await once(client, 'end')
    t.pass('closed when idle')
    client.destroy()
  },
)

void t.test('P24 a refusal before the upload is whole can be read, then the connection closes', async (t) => {
  const writer = new ResponseWriter('urn:x:', 60_000)
  await using server = await serving((_request, response) =>
    writer.problem(response, refusal('request_too_large', 'x')),
  )
  const client = connect(server.port, '127.0.0.1')
  client.write('POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n')
  const upload = setInterval(() => client.write(Buffer.alloc(1000)), 10)
  client.on('error', () => {})
  t.equal((await readAnswer(client)).status, 413)
  client.resume()
  await new Promise((resolve) => client.once('close', resolve))
  clearInterval(upload)
})
