import { once } from 'node:events'
import { createServer } from 'node:http'
import { type AddressInfo, connect, type Socket } from 'node:net'
import t, { type Test } from 'tap'
import type { Dispatcher } from 'undici'
import { observeBody } from '../../src/http/protected.ts'
import { StreamRequest } from '../../src/http/request.ts'
import type { BodyReading } from '../../src/protect/request.ts'
import { Budget } from '../../src/runtime/limits.ts'
import { ExchangeTap } from '../../src/upstream/exchange-tap.ts'
import type { Upstream } from '../../src/upstream/pool.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import { scriptedPeer } from '../support/exchange.ts'
import { freePort } from '../support/redis.ts'
import { DISPATCHERS, type Http, opened as openedFor } from './support.ts'

const noBug = (error: unknown): void => {
  throw error
}
const HEARD = { method: 'POST', responseLimit: 1000 }

interface World {
  readonly witness: ExchangeTap
  readonly budget: Budget
  readonly bugs: unknown[]
  /** One tapped POST: the status and the body that its sender sees, or the error's code. */
  ask(signal?: AbortSignal): Promise<string>
}

function opened(url: string, http: Http): Promise<Upstream> {
  return openedFor(url, { connectTimeout: 1000, timeout: 5000, idleTimeout: 5000 }, http)
}

async function world(
  t: Test,
  http: Http,
  answer: string | ((socket: Socket) => void),
  url?: string,
): Promise<World> {
  const peer = await scriptedPeer((socket) => {
    if (typeof answer === 'string') socket.write(answer, 'latin1')
    else answer(socket)
  })
  t.teardown(() => peer[Symbol.asyncDispose]())
  const upstream = await opened(url ?? peer.url, http)
  t.teardown(() => upstream.close())
  const budget = new Budget(10_000)
  const bugs: unknown[] = []
  const witness = new ExchangeTap(HEARD, budget, (error) => void bugs.push(error))
  return {
    witness,
    budget,
    bugs,
    async ask(signal) {
      try {
        return await heard(witness, upstream, signal)
      } catch (error) {
        const { code = '', name } = error as NodeJS.ErrnoException
        return code === '' ? name : code
      }
    },
  }
}

/** One POST by a sender of its own, tapped by the witness: what the sender sees. */
function heard(witness: ExchangeTap, { dispatcher }: Upstream, signal?: AbortSignal): Promise<string> {
  return new Promise((resolve, reject) => {
    let status = 0
    let text = ''
    const owner: Dispatcher.DispatchHandler = {
      onRequestStart(controller) {
        if (signal?.aborted) controller.abort(signal.reason as Error)
        signal?.addEventListener('abort', () => controller.abort(signal.reason as Error))
      },
      onResponseStart: (_controller, code) => void (status = code),
      onResponseData: (_controller, chunk) => void (text += chunk.toString()),
      onResponseEnd: () => resolve(`${status} ${text}`),
      onResponseError: (_controller, error) => reject(error),
    }
    const body = Buffer.from('{}')
    dispatcher.dispatch(
      { method: 'POST', path: '/', headers: ['Host', 'a.test'], body },
      witness.handlerFor(owner),
    )
  })
}

const OK = 'HTTP/1.1 201 Made\r\nX-A: 1\r\nx-a: 2\r\nConnection: X-B\r\nX-B: 3\r\nContent-Length: 2\r\n\r\nok'

for (const http of DISPATCHERS) {
  t.test(`${http}: the tap keeps the answer as an exchange would, and the sender gets it`, async (t) => {
    const { witness, budget, ask } = await world(t, http, OK)
    t.notOk(witness.over)
    t.equal(await ask(), '201 ok')
    const ended = await witness.ended
    t.ok(witness.over)
    t.match(ended, {
      proof: 'responded',
      response: { status: 201, reason: 'Made', headers: ['X-A', '1', 'x-a', '2', 'Date', String] },
    })
    t.equal(budget.held, 2)
    witness.ignore()
    witness.gone()
    t.equal(await witness.ended, ended)
    if (ended.proof === 'responded') ended.release()
    t.equal(budget.held, 0)
  })

  t.test(`${http}: without a connection or a client, the tap proves that nothing was sent`, async (t) => {
    const nowhere = await world(t, http, '', `http://127.0.0.1:${await freePort()}`)
    t.equal(await nowhere.ask(), 'ECONNREFUSED')
    t.match(await nowhere.witness.ended, { proof: 'not_sent' })

    const never = new ExchangeTap(HEARD, nowhere.budget, noBug)
    const upstream = await opened('http://127.0.0.1:1', http)
    await upstream.close()
    await t.rejects(heard(never, upstream))
    t.match(await never.ended, { proof: 'not_sent' })
  })

  t.test(`${http}: an ignored exchange proves nothing, and its sender still gets the answer`, async (t) => {
    const { witness, ask } = await world(t, http, OK)
    const asked = ask()
    witness.ignore()
    t.ok(witness.over)
    t.match(await witness.ended, { proof: 'unknown' })
    t.equal(await asked, '201 ok')
  })

  void t.test(`${http}: an exchange given up before a connection is free was not sent`, async (t) => {
    const peer = await scriptedPeer(() => {})
    t.teardown(() => peer[Symbol.asyncDispose]())
    const upstream = await opened(peer.url, http)
    const [one, two] = [0, 1].map(() => new ExchangeTap(HEARD, new Budget(10), noBug)) as [
      ExchangeTap,
      ExchangeTap,
    ]
    const ask = (witness: ExchangeTap, signal: AbortSignal) => heard(witness, upstream, signal).catch(String)
    const [first, second] = [new AbortController(), new AbortController()]
    const asked = [ask(one, first.signal), ask(two, second.signal)]
    while (peer.requests.length === 0) await new Promise((next) => setTimeout(next, 5))
    second.abort()
    first.abort()
    await Promise.all(asked)
    t.match(await one.ended, { proof: 'unknown' }, 'it had been sent')
    t.match(await two.ended, { proof: 'not_sent' })
    t.equal(peer.requests.length, 1)
    await upstream.close()
  })

  void t.test(`${http}: an exchange whose client left before it began is unknown`, async (t) => {
    const { witness } = await world(t, http, OK)
    witness.gone()
    t.match(await witness.ended, { proof: 'unknown' })
  })

  void t.test(`${http}: an answer that the guard would break off still reaches its sender`, async (t) => {
    const coded = 'HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n'
    const { witness, budget, ask } = await world(t, http, coded)
    t.equal(await ask(), '200 ok')
    t.match(await witness.ended, { proof: 'unknown', reason: /transfer coding/ })
    t.equal(budget.held, 0)
  })

  void t.test(`${http}: an answer over the limit is read to its end and not kept`, async (t) => {
    const { witness, budget, ask } = await world(
      t,
      http,
      `HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n${'x'.repeat(2000)}`,
    )
    t.equal((await ask()).length, 2004)
    const ended = (await witness.ended) as Extract<Forwarded, { proof: 'live' }>
    t.match(ended, { proof: 'live', why: 'too_large' })
    ended.live.drain()
    t.equal(await ended.live.done, 'complete')
    t.equal(budget.held, 0)
  })

  void t.test(`${http}: a bug in the tap ends the tap, not the exchange`, async (t) => {
    const { witness, budget, bugs, ask } = await world(t, http, OK)
    const error = new Error('a bug')
    budget.take = () => {
      throw error
    }
    t.equal(await ask(), '201 ok')
    t.match(await witness.ended, { proof: 'unknown' })
    t.same(bugs, [error])
  })
}

void t.test('a body is observed whole or not at all', async (t) => {
  const heard: Promise<BodyReading>[] = []
  const budget = new Budget(10_000)
  const server = createServer({ IncomingMessage: StreamRequest }, (request, response) => {
    heard.push(Promise.resolve(observeBody(request, 1000, budget)))
    // Nobody reads this body: Node removes its listeners and reads it to its end.
    if (request.url === '/dumped') response.end()
    else request.resume().on('end', () => response.end())
  }).listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => server.close())
  const { port } = server.address() as AddressInfo
  const ask = async (path: string, first: string, second: string): Promise<BodyReading> => {
    const socket = connect(port, '127.0.0.1')
    socket.write(
      `POST ${path} HTTP/1.1\r\nHost: a\r\nContent-Length: ${first.length + second.length}\r\n\r\n${first}`,
    )
    while (heard.length === 0) await new Promise((next) => setTimeout(next, 5))
    socket.write(second)
    const reading = await (heard.pop() as Promise<BodyReading>)
    socket.destroy()
    return reading
  }
  const whole = await ask('/read', 'one', 'two')
  t.match(whole, { kind: 'body', body: Buffer.from('onetwo') })
  if (whole.kind === 'body') whole.release()
  t.match(await ask('/dumped', 'one', 'two'), { kind: 'aborted' })
  t.match(await ask('/read', '', 'x'.repeat(1001)), { kind: 'too_large' })
  t.match(await ask('/read', '', ''), { kind: 'body', body: Buffer.alloc(0) })
  t.equal(budget.held, 0)
})
