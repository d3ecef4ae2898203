/** Plain @fastify/http-proxy, started as in its README: port, upstream's port. */
import httpProxy from '@fastify/http-proxy'
import { fastify } from 'fastify'

const [port, upstream] = process.argv.slice(2).map(Number)
const app = fastify()
await app.register(httpProxy, { upstream: `http://127.0.0.1:${upstream}` })
await app.listen({ host: '127.0.0.1', port: port as number })
