/** The traffic listener as a Fastify application: what its routes, hooks and `inject()` do. */
import { once } from 'node:events'
import { type AddressInfo, Socket } from 'node:net'
import { Readable } from 'node:stream'
import fc from 'fast-check'
import { type FastifyInstance, type FastifyReply, type FastifyRequest, fastify } from 'fastify'
import { pino } from 'pino'
import t from 'tap'
import { compose } from '../../src/compose/proxy.ts'
import type { Config } from '../../src/config/config.ts'
import { loadConfig } from '../../src/config/load.ts'
import type { RouteMatch, RoutePolicy } from '../../src/core/policy.ts'
import { parseTarget, policiesOf, Router } from '../../src/core/route.ts'
import { TrafficServer } from '../../src/http/connections.ts'
import { PlainRequest, PlainResponse } from '../../src/http/plain.ts'
import { type ProtectPlugin, protectedRoutes } from '../../src/http/protected.ts'
import type { TrafficRequest } from '../../src/http/request.ts'
import { Routing } from '../../src/http/routing.ts'
import { matching } from '../core/fixtures.ts'
import { values } from '../support/exchange.ts'
import { rawRequest } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

function configOf(yaml: string): Config {
  const loaded = loadConfig({ file: 'f', text: yaml, env: {}, flags: {} })
  if (!loaded.ok) throw new Error('the configuration is invalid')
  return loaded.config
}

const FRAMING = { hosts: 1, length: 0, codings: [], upgrade: false }

t.test('app.inject() runs a whole protected request, and its replay', async (t) => {
  await using upstream = await upstreamStub((_, response) => {
    response.writeHead(201, { 'Content-Type': 'application/json' }).end('{"id":1}')
  })
  const config = configOf(
    [
      `upstream: { url: "${upstream.url}" }`,
      'store: { url: "memory:" }',
      'wellKnown: true',
      'cors: { origins: "https://shop.example" }',
      'routes: [{ name: pay, match: { path: "/pay/:id" }, key: required }]',
    ].join('\n'),
  )
  const parts = await compose(config, pino({ level: 'silent' }), null, {
    acceptsRescope: false,
    place: 'alone',
  })
  t.teardown(() => parts.closing.disposeAsync())
  const { app } = parts.traffic
  const caller = { authorization: 'Bearer a', origin: 'https://shop.example' }
  const pay = (key: string | null, amount: number) => {
    const headers = { ...caller, ...(key === null ? {} : { 'idempotency-key': key }) }
    return app.inject({ method: 'POST', url: '/pay/1', headers, payload: { amount } })
  }
  const first = await pay('k', 1)
  t.match([first.statusCode, first.json(), upstream.seen.length], [201, { id: 1 }, 1])
  t.equal(first.headers['idempotent-replayed'], undefined)
  const again = await pay('k', 1)
  t.match([again.statusCode, again.json(), upstream.seen.length], [201, { id: 1 }, 1])
  t.equal(again.headers['idempotent-replayed'], 'true')
  t.equal(again.headers['access-control-allow-origin'], 'https://shop.example')
  t.match((await pay('k', 2)).json(), { status: 422, code: 'idempotency_key_reused' })
  t.match((await pay(null, 1)).json(), { status: 400, code: 'idempotency_key_missing' })
  t.match((await app.inject('/.well-known/idempotency')).json().routes[0], { path: '/pay/{id}' })
  t.equal(upstream.seen.length, 1)
  t.equal((await app.inject({ method: 'DELETE', url: '/pay/1?a=b' })).statusCode, 201)
  t.match(upstream.seen[1], { method: 'DELETE', target: '/pay/1?a=b' })

  const lost = new PlainRequest('POST', '/pay/1', [], FRAMING, new Socket(), Buffer.alloc(0))
  let arrival: TrafficRequest['arrival']
  Object.defineProperty(lost, 'arrival', {
    get: () => arrival,
    set(found: typeof arrival) {
      arrival = found && { ...found, policy: 'no such route' }
    },
  })
  const response = new PlainResponse(lost, 0, () => {})
  app.routing(lost as never, response as never)
  t.ok(response.destroyed, 'what the router misses does not pass unprotected')
  t.equal(upstream.seen.length, 2)
})

/** An application with these routes alone. */
async function routed(matches: readonly RouteMatch[]): Promise<{
  /** The name of the route that gets a request. */
  readonly chosen: (method: string, target: string) => string | null
  readonly policies: readonly RoutePolicy[]
}> {
  const base = configOf('upstream: { url: "http://127.0.0.1:1" }')
  const { defaults } = base
  const key = { ...defaults.key, presence: 'ignored' } as const
  const config = { ...base, routes: matches.map((match, n) => ({ ...defaults, key, match, name: `r${n}` })) }
  const routing = new Routing(config, { host: null, takesTrailers: false, loop: { id: '', entry: '' } })
  const app = fastify({
    rewriteUrl: routing.rewriteUrl as never,
    routerOptions: { maxParamLength: Number.MAX_SAFE_INTEGER },
  })
  app.addConstraintStrategy(routing.constraint)
  let found: string | null = null
  app.setNotFoundHandler((_request, reply) => void reply.hijack())
  app.register(protectedRoutes, {
    config,
    handle: () => (request: FastifyRequest, reply: FastifyReply) => {
      reply.hijack()
      found = request.routeOptions.config.policy ?? null
    },
  } as unknown as ProtectPlugin)
  await app.ready()
  return {
    policies: policiesOf(config),
    chosen(method, target) {
      found = null
      const request = new PlainRequest(method, target, [], FRAMING, {} as never, Buffer.alloc(0))
      app.routing(request as never, {} as never)
      return found
    },
  }
}

const SEGMENTS =
  "a A b caf%C3%A9 %FF %2F %41 %25 a*b * : a:b (a) a.b a-b a;v=1 . .. %zz $ ~ it's %3F %2A".split(' ')
const segment = fc.constantFrom(...SEGMENTS, '', 'a'.repeat(200))
const tail = fc.constantFrom('', '/', '/*')
const pattern = fc
  .tuple(fc.array(fc.oneof(segment, fc.constantFrom(':id', ':x-y', ':x.y')), { maxLength: 4 }), tail)
  .map(([segments, end]) => `/${segments.join('/')}${end}`)
const match = fc.record({
  path: pattern,
  methods: fc.constantFrom(['POST'], ['POST', 'GET'], ['GET', 'DELETE']),
  exact: fc.boolean(),
  case: fc.constantFrom('sensitive', 'insensitive'),
  parameters: fc.constantFrom('keep', 'strip'),
})
const target = fc
  .tuple(fc.array(segment, { maxLength: 5 }), fc.constantFrom('', '/', '?a=%zz', '?'))
  .map(([segments, end]) => `/${segments.join('/')}${end}`)

t.test('Fastify’s router takes the route that comes first in the file', async (t) => {
  let matched = 0
  await fc.assert(
    fc.asyncProperty(
      fc.array(match, { minLength: 1, maxLength: 6 }),
      fc.array(target, { minLength: 30, maxLength: 30 }),
      async (matches, targets) => {
        const on = await routed(matches)
        const router = new Router(on.policies)
        // The routes' own paths match more often.
        for (const sent of [...targets, ...matches.map(({ path }) => path.replace(/:[\w.-]+/g, 'a'))])
          for (const method of ['POST', 'GET', 'DELETE']) {
            const parsed = parseTarget(sent)
            const expected = parsed === null ? null : (router.match(method, parsed)?.name ?? null)
            if (expected !== null && expected !== 'default') matched++
            if (on.chosen(method, sent) !== expected)
              throw new Error(`${method} ${sent}: ${on.chosen(method, sent)} instead of ${expected}`)
          }
      },
    ),
    { numRuns: 150, seed: Number(process.env['FUZZ_SEED'] ?? 1) },
  )
  t.ok(matched > 500, `${matched} requests matched a route`)
})

t.test('40 routes of one pattern are no more than Fastify’s router takes', async (t) => {
  const on = await routed(Array.from({ length: 40 }, (_, n) => matching(['POST'], `/p/:x${n}`)))
  t.equal(on.chosen('POST', '/p/1'), 'r0')
})

for (const plain of [true, false])
  t.test(
    `routes, hooks and replies of a plugin work ${plain ? 'with' : 'without'} the plain reader`,
    async (t) => {
      let server!: TrafficServer
      const app: FastifyInstance = fastify({
        exposeHeadRoutes: false,
        serverFactory: (handler) => {
          server = new TrafficServer({ plain }, handler as never, (error) => t.error(error))
          return server
        },
      })
      app.decorateRequest('seen', '')
      app.addHook('onRequest', async (request, reply) => {
        reply.header('X-Seen', [String(request.headers['x-twice']), request.ip, request.hostname].join(' '))
      })
      app.get('/json', async () => ({ name: 'café €' }))
      app.get('/stream', (_request, reply) => reply.send(Readable.from([Buffer.from('a'), Buffer.from('b')])))
      app.get('/none', (_request, reply) => reply.code(204).header('set-cookie', ['a=1', 'b=2']).send())
      app.post('/body', (request, reply) => reply.send(request.body))
      await app.ready()
      t.teardown(() => server.closeAllConnections())
      server.listen(0, '127.0.0.1')
      await once(server, 'listening')
      const { port } = server.address() as AddressInfo
      const ask = (line: string, more = '') =>
        rawRequest(
          port,
          `${line} HTTP/1.1\r\nHost: a.example:1\r\nX-Twice: 1\r\nX-Twice: 2\r\nCookie: a=1\r\nCookie: b=2\r\n${more}`,
        )
      const json = await ask('GET /json', '\r\n')
      t.strictSame(JSON.parse(json.body.toString()), { name: 'café €' })
      t.strictSame(values(json, 'x-seen'), ['1, 2 127.0.0.1 a.example'])
      t.equal((await ask('GET /stream', '\r\n')).body.toString(), 'ab')
      t.strictSame(values(await ask('GET /none', '\r\n'), 'set-cookie'), ['a=1', 'b=2'])
      const body = await ask(
        'POST /body',
        'Content-Type: application/json\r\nContent-Length: 7\r\n\r\n{"a":1}',
      )
      t.strictSame(JSON.parse(body.body.toString()), { a: 1 })
      t.equal((await ask('GET /nowhere', '\r\n')).status, 404)
      server.close()
    },
  )
