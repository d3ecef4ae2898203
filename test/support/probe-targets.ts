/** Small APIs of the same shop, unprotected and behind public packages that promise idempotency, each set up as its README says. */
import { once } from 'node:events'
import { createServer, type RequestListener } from 'node:http'
import type { AddressInfo } from 'node:net'
import { text } from 'node:stream/consumers'
import { setTimeout as wait } from 'node:timers/promises'
import {
  IdempotencyAlreadyInProgressError,
  IdempotencyConfig,
  makeIdempotent,
} from '@aws-lambda-powertools/idempotency'
import { CachePersistenceLayer } from '@aws-lambda-powertools/idempotency/cache'
import { Idempotency, IdempotencyError, type IdempotencyResponse } from '@node-idempotency/core'
import { MemoryStorageAdapter } from '@node-idempotency/storage-adapter-memory'
import express, { json } from 'express'
import { getSharedIdempotencyService, idempotency } from 'express-idempotency'

interface Served {
  readonly status: number
  readonly headers: Readonly<Record<string, string>>
  readonly body: string
}

/** Its work takes a moment, so that duplicates meet it. A negative amount is refused; one of 500 is charged, and then fails. */
class Shop {
  orders = 0

  async order(path: string, payload: string): Promise<Served> {
    const { amount } = JSON.parse(payload) as { readonly amount: number }
    const headers = { 'Content-Type': 'application/json' }
    if (amount < 0) return { status: 400, headers, body: '{"error":"negative"}' }
    const id = ++this.orders
    await wait(30)
    if (amount === 500) return { status: 500, headers, body: '{"error":"failed"}' }
    return { status: 201, headers: { ...headers, Location: `${path}/${id}` }, body: `{"id":${id}}` }
  }
}

export interface Target extends AsyncDisposable {
  readonly url: string
}

async function listening(listener: RequestListener): Promise<Target> {
  const server = createServer(listener)
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections()
      await new Promise((resolve) => server.close(resolve))
    },
  }
}

type Answering = (request: Parameters<RequestListener>[0], payload: string) => Promise<Served>

function serving(shop: Shop, answer: Answering): Promise<Target> {
  return listening((request, response) => {
    if (request.url === '/count') return void response.end(String(shop.orders))
    void text(request)
      .then((payload) => answer(request, payload))
      .then(({ status, headers, body }) => response.writeHead(status, headers).end(body))
  })
}

/** Knows nothing of keys. It also streams what it does (`/events`), and redirects to it (`/moved`). */
export function unprotected(): Promise<Target> {
  const shop = new Shop()
  return serving(shop, async ({ url = '' }, payload) => {
    const served = await shop.order(url, payload)
    if (served.status !== 201) return served
    if (url === '/moved') return { status: 303, headers: { Location: `/orders/${shop.orders}` }, body: '' }
    if (url !== '/events') return served
    return { status: 200, headers: { 'Content-Type': 'text/event-stream' }, body: `data: ${served.body}\n\n` }
  })
}

export function expressIdempotency(): Promise<Target> {
  const shop = new Shop()
  const app = express()
  // It prints errors otherwise.
  app.set('env', 'test')
  app.use(json())
  app.get('/count', (_, response) => response.send(String(shop.orders)))
  app.post(['/orders', '/refunds'], idempotency(), (request, response) => {
    if (getSharedIdempotencyService().isHit(request)) return
    void shop
      .order(request.url as string, JSON.stringify(request.body))
      .then(({ status, headers, body }) => response.status(status).set(headers).send(body))
  })
  return listening(app)
}

export function nodeIdempotency(): Promise<Target> {
  const shop = new Shop()
  const guard = new Idempotency(new MemoryStorageAdapter())
  return serving(shop, async ({ url = '', method = '', headers }, payload) => {
    const asked = { method, headers, path: url, body: JSON.parse(payload) as Record<string, unknown> }
    let known: IdempotencyResponse<Served> | undefined
    try {
      known = await guard.onRequest<Served, unknown>(asked)
    } catch (error) {
      if (!(error instanceof IdempotencyError)) throw error
      const isMisuse = error.code.includes('FINGERPRINT')
      return {
        status: isMisuse ? 422 : error.code.includes('LEN') ? 400 : 409,
        headers: {},
        body: error.code,
      }
    }
    if (known?.body !== undefined) return known.body
    const served = await shop.order(url, payload)
    await guard.onResponse(asked, { body: served })
    return served
  })
}

/** What the package needs of Redis. */
class Cache {
  readonly #values = new Map<string, string>()

  async get(name: string): Promise<string | null> {
    return this.#values.get(name) ?? null
  }

  async set(name: string, value: string, { NX = false }: { NX?: boolean } = {}): Promise<string | null> {
    if (NX && this.#values.has(name)) return null
    this.#values.set(name, value)
    return 'OK'
  }

  async del(names: readonly string[]): Promise<number> {
    return names.filter((name) => this.#values.delete(name)).length
  }
}

export function powertools(): Promise<Target> {
  const shop = new Shop()
  const config = new IdempotencyConfig({ eventKeyJmesPath: 'headers."idempotency-key"' })
  config.registerLambdaContext({ getRemainingTimeInMillis: () => 30_000 })
  const handler = makeIdempotent(
    (event: { readonly path: string; readonly headers: unknown; readonly body: string }) =>
      shop.order(event.path, event.body),
    {
      persistenceStore: new CachePersistenceLayer({ client: new Cache() }),
      config,
    },
  )
  return serving(shop, async ({ url = '', headers }, body) => {
    try {
      return await handler({ path: url, headers, body })
    } catch (error) {
      if (!(error instanceof IdempotencyAlreadyInProgressError)) throw error
      return { status: 409, headers: {}, body: '' }
    }
  })
}
