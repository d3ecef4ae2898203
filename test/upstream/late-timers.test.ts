import { once } from 'node:events'
import { Worker } from 'node:worker_threads'
import t from 'tap'
import { Budget } from '../../src/runtime/limits.ts'
import { forwarder } from '../../src/upstream/forward.ts'
import type { UpstreamRequest } from '../../src/upstream/port.ts'
import { opened } from './support.ts'

/** Answers in a thread of its own. */
const PEER = `
const server = require('node:net').createServer((socket) =>
  socket.on('data', () => socket.write('HTTP/1.1 201 Created\\r\\nContent-Length: 2\\r\\n\\r\\nok')))
server.listen(0, '127.0.0.1', () => require('node:worker_threads').parentPort.postMessage(server.address().port))`

/** This thread gets no processor for that long. */
function stall(ms: number): void {
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms)
}

t.test('what came while the proxy stood still counts, although every time is up', async (t) => {
  const peer = new Worker(PEER, { eval: true })
  t.teardown(() => peer.terminate())
  const [port] = (await once(peer, 'message')) as [number]
  for (const [what, limits] of [
    ['connectTimeout', { connectTimeout: 100 }],
    ['timeout', { timeout: 100 }],
    ['idleTimeout', { idleTimeout: 100 }],
  ] as const) {
    const upstream = await opened(`http://127.0.0.1:${port}`, limits)
    t.teardown(() => upstream.close())
    const { timeout = 10_000, idleTimeout = 10_000 } = limits as { timeout?: number; idleTimeout?: number }
    const forward = forwarder(upstream.dispatcher, {
      timeout: () => timeout,
      idleTimeout,
      budget: new Budget(1000),
    })
    const begun = Promise.withResolvers<void>()
    const request: UpstreamRequest = {
      method: 'POST',
      target: '/p',
      headers: ['Host', 'a.test'],
      body: Buffer.from('{}'),
      responseLimit: 100,
      mayBegin: () => {
        setImmediate(begun.resolve)
        return true
      },
    }
    const forwarded = forward(request)
    // The client connects in the next turn of the event loop.
    if (what === 'connectTimeout') await new Promise((next) => setImmediate(() => setImmediate(next)))
    else await begun.promise
    stall(300)
    t.match(await forwarded, { proof: 'responded', response: { status: 201 } }, what)
  }
})
