import type { Socket } from 'node:net'
import type { Test } from 'tap'
import { metricIs, problemOf } from './exchange.ts'
import type { TestProxy } from './proxy.ts'
import { post, rawRequest } from './raw.ts'
import { type TcpStub, tcpStub, wholeRequest } from './upstream.ts'

export const OK = 'HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok'

export const REQUEST = post('/p', 'k-1', '{"a":1}')

/** A peer that misbehaves on its first connection and answers properly on all others. */
export async function faulty(commits: (socket: Socket) => void): Promise<TcpStub & { requests: string[] }> {
  const requests: string[] = []
  const stub = await tcpStub((socket, n) => {
    if (n === 1) {
      socket.on('data', (chunk: Buffer) => {
        if (chunk.includes('HTTP/1.1\r\n')) requests.push(chunk.toString('latin1'))
      })
      commits(socket)
      return
    }
    const next = (): void =>
      void wholeRequest(socket).then((request) => {
        requests.push(request)
        socket.write(OK)
        next()
      })
    next()
  })
  return Object.assign(stub, { requests })
}

export function seen(requests: readonly string[]): number {
  return requests.filter((request) => request.includes('k-1')).length
}

export async function unknownNow(t: Test, proxy: TestProxy): Promise<void> {
  for (let i = 0; i < 2; i++)
    t.match(problemOf(await rawRequest(proxy.port, REQUEST)), {
      code: 'idempotency_outcome_unknown',
      status: 409,
      retry: 'same-key',
    })
}

export async function poolWorks(t: Test, proxy: TestProxy): Promise<void> {
  t.equal((await rawRequest(proxy.port, post('/p', 'after', '{}'))).status, 201, 'the pool works')
  t.equal((await rawRequest(proxy.port, post('/other', null, '{}'))).status, 201)
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
}
