/**
 * @node-idempotency/core with its Redis adapter, in a Fastify that calls the upstream: port, upstream's port, Redis's port.
 * The library has no proxy of its own; this follows its README, with the upstream call as the business logic.
 */
import { Idempotency, IdempotencyError, type IdempotencyResponse } from '@node-idempotency/core'
import { RedisStorageAdapter } from '@node-idempotency/storage-adapter-redis'
import { fastify } from 'fastify'
import { Pool } from 'undici'

const [port, upstream, redis] = process.argv.slice(2).map(Number)
const storage = new RedisStorageAdapter({ url: `redis://127.0.0.1:${redis}` })
await storage.connect()
const idempotency = new Idempotency(storage)
const pool = new Pool(`http://127.0.0.1:${upstream}`, { connections: 128 })

const app = fastify()
app.post('/*', async (request, reply) => {
  const asked = {
    method: request.method,
    headers: request.headers,
    path: request.url,
    body: request.body as Record<string, unknown>,
  }
  let known: IdempotencyResponse<string> | undefined
  try {
    known = await idempotency.onRequest<string, unknown>(asked)
  } catch (error) {
    if (!(error instanceof IdempotencyError)) throw error
    return reply.code(409).send({ code: error.code })
  }
  if (known !== undefined) {
    const { status, type } = known.additional as { status: number; type: string }
    return reply.code(status).header('content-type', type).send(known.body)
  }
  const { statusCode, headers, body } = await pool.request({
    method: 'POST',
    path: request.url,
    headers: {
      'content-type': 'application/json',
      'idempotency-key': request.headers['idempotency-key'] as string,
    },
    body: JSON.stringify(request.body),
  })
  const text = await body.text()
  const type = headers['content-type'] as string
  await idempotency.onResponse(asked, { body: text, additional: { status: statusCode, type } })
  return reply.code(statusCode).header('content-type', type).send(text)
})
await app.listen({ host: '127.0.0.1', port: port as number })
