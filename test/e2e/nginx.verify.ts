import t, { type Test } from 'tap'
import { type ChargesApi, startChargesApi } from '../../examples/charges-api/server.ts'
import { type Cut, cutter } from '../clients/cutter.ts'
import { configFile, newKey, type Reply, send, tempDir, until } from '../support/e2e.ts'
import { haproxy, NO_HAPROXY } from '../support/haproxy.ts'
import { example, NO_NGINX, nginx } from '../support/nginx.ts'
import { proxyInProcess, proxyProcess, type TestProxy } from '../support/proxy.ts'
import { freePort, RedisServer } from '../support/redis.ts'
import { refusalOf } from '../support/replicas.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(120_000)

/** The examples of docs/guides/retrying-proxies.md, as published. */
const options = { skip: NO_NGINX }

function charge(place: { readonly url: string }, key: string | null, path = '/v1/charges'): Promise<Reply> {
  return send(place, key, {
    path,
    body: 'amount=4200&currency=eur&source=tok_visa',
    headers: { authorization: 'Bearer sk_test_example', 'content-type': 'application/x-www-form-urlencoded' },
  })
}

async function apiOf(t: Test): Promise<ChargesApi> {
  const api = await startChargesApi()
  t.teardown(() => api[Symbol.asyncDispose]())
  return api
}

async function proxyOf(t: Test, store: string, upstream: string, more = ''): Promise<TestProxy> {
  const proxy = await proxyInProcess(
    `upstream: { url: "${upstream}", timeout: 5s }
store: { url: "${store}" }
drain: { timeout: 1s }
routes:
  - { name: charges, match: { methods: [POST], path: /v1/charges }, key: required, inFlight: { mode: wait }${more} }`,
  )
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return proxy
}

/** Each connection is cut in its first exchange, each at a different place. */
function cutsOf(up: number, down: number): Cut[] {
  const places: Omit<Cut, 'how'>[] = [
    ...[0, 1, up >> 1, up - 1, up].map((after) => ({ way: 'up', after }) as const),
    ...[0, 12, down >> 1, down - 1].map((after) => ({ way: 'down', after }) as const),
  ]
  return places.flatMap((place) => (['reset', 'end'] as const).map((how) => ({ ...place, how })))
}

/** Replaces the two servers of an example. */
function servers(first: number, second: number, ports: readonly [number, number]) {
  return {
    [`127.0.0.1:${ports[0]} `]: `127.0.0.1:${first} `,
    [`127.0.0.1:${ports[1]} `]: `127.0.0.1:${second} `,
    '127.0.0.1:8000': 'LISTEN',
  }
}

const FRONTS = [
  {
    name: 'nginx',
    skip: NO_NGINX,
    start: (t: Test, port: number, b: TestProxy) =>
      nginx(t, example('in-front.conf', servers(port, b.port, [8080, 8081]))),
  },
  {
    name: 'HAProxy',
    skip: NO_HAPROXY,
    start: (t: Test, port: number, b: TestProxy) => {
      const readyPort = Number(new URL(b.adminUrl).port)
      return haproxy(t, { port, readyPort }, { port: b.port, readyPort })
    },
  },
]

for (const { name, skip, start } of FRONTS)
  t.test(`X01 ${name} before two replicas resends a cut charge: one charge each`, { skip }, async (t) => {
    await using redis = await RedisServer.start()
    const api = await apiOf(t)
    const a = await proxyOf(t, redis.url, api.url)
    const b = await proxyOf(t, redis.url, api.url)
    await using whole = await cutter(a.port)
    t.equal((await charge(whole, newKey())).status, 200)
    const cuts = cutsOf(whole.first.up.length, whole.first.down.length)
    await using wire = await cutter(a.port, cuts)
    const front = await start(t, wire.port, b)

    // Charges go to A first and to B first by turns: it takes twice as many to meet every cut.
    for (let n = 0; n < 2 * cuts.length; n++) {
      const key = newKey()
      // After the head of a response it cannot resend: it cuts its client, which retries.
      const first = await charge(front, key).catch(() => null)
      const again = await charge(b, key)
      t.equal(api.under(key).length, 1, `${n}: one charge`)
      t.match(again, { status: 200, replayed: true, body: JSON.stringify(api.under(key)[0]) })
      if (first !== null) t.match(first, { status: 200, body: again.body })
    }
    t.ok(wire.connections >= cuts.length, 'every cut happened')
    const saved =
      (await b.metric('idempotency_requests_total{route="charges",outcome="replayed"}')) +
      (await b.metric('idempotency_requests_total{route="charges",outcome="waited"}'))
    t.ok(saved > 2 * cuts.length, `it sent ${saved - 2 * cuts.length} duplicates`)
  })

/** Clients that charge with a new key each time, by turns where nginx resends a POST and where it does not. They end with the test. */
class Clients implements AsyncDisposable {
  /** What each key got. */
  readonly got: (readonly [key: string, status: number])[] = []
  readonly #running: Promise<void>[]
  #on = true

  constructor(place: { readonly url: string }, count: number) {
    this.#running = Array.from({ length: count }, (_, n) => this.#run(place, n))
  }

  async #run(place: { readonly url: string }, n: number): Promise<void> {
    let turn = n
    while (this.#on) {
      const key = newKey()
      const answer = charge(place, key, turn++ % 2 === 0 ? '/v1/charges' : '/v1/refunds')
      this.got.push([key, await answer.then(({ status }) => status).catch(() => 0)])
    }
  }

  /** Resolves after this many more answers. */
  async go(count: number): Promise<void> {
    const before = this.got.length
    await until(() => this.got.length >= before + count)
  }

  async stop(): Promise<void> {
    this.#on = false
    await Promise.all(this.#running)
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.stop()
  }
}

t.test('Y19 replicas behind nginx restart in turn: no error, one charge a key', options, async (t) => {
  await using redis = await RedisServer.start()
  const charged = new Map<string, number>()
  await using api = await upstreamStub(({ headers }, response) => {
    const key = headers[headers.findIndex((name) => name.toLowerCase() === 'idempotency-key') + 1] as string
    charged.set(key, (charged.get(key) ?? 0) + 1)
    response.writeHead(200).end(key)
  })
  const file = configFile(
    tempDir(t),
    `upstream: { url: "${api.url}" }
store: { url: "${redis.url}" }
drain: { delay: 2s }
routes:
  - { name: money, match: { methods: [POST], path: "/v1/*" }, key: required, inFlight: { mode: wait } }
`,
  )
  const ports = [await freePort(), await freePort()] as const
  const start = async (port: number) => {
    const proxy = await proxyProcess(file, ['--listen', `127.0.0.1:${port}`])
    t.teardown(() => proxy[Symbol.asyncDispose]())
    return proxy
  }
  let replicas = await Promise.all(ports.map(start))
  const front = await nginx(t, example('in-front.conf', servers(...ports, [8080, 8081])))
  await using clients = new Clients(front, 8)
  await clients.go(100)
  for (let round = 0; round < 2; round++) {
    const next = []
    for (const [n, replica] of replicas.entries()) {
      replica.kill('SIGTERM')
      t.equal(await replica.exited, 0)
      next.push(await start(ports[n] as number))
    }
    replicas = next
  }
  await clients.go(100)
  await clients.stop()
  t.ok(clients.got.length > 500, `${clients.got.length} charges`)
  t.same(
    clients.got.filter(([, status]) => status !== 200),
    [],
  )
  t.same(
    clients.got.filter(([key]) => charged.get(key) !== 1),
    [],
  )
})

void t.test('without the proxy the same nginx charges twice', options, async (t) => {
  const api = await apiOf(t)
  await using wire = await cutter(api.port, [{ way: 'down', after: 0, how: 'reset' }])
  const front = await nginx(t, example('in-front.conf', servers(wire.port, api.port, [8080, 8081])))
  const key = newKey()
  t.equal((await charge(front, key)).status, 200)
  t.equal(api.under(key).length, 2)
})

void t.test('I02 nginx gives up waiting and asks the other replica: one charge', options, async (t) => {
  await using redis = await RedisServer.start()
  const api = await apiOf(t)
  const a = await proxyOf(t, redis.url, api.url)
  const b = await proxyOf(t, redis.url, api.url)
  const hasty = {
    ...servers(a.port, b.port, [8080, 8081]),
    'proxy_read_timeout 70s': 'proxy_read_timeout 1s',
  }
  const front = await nginx(t, example('in-front.conf', hasty))
  api.trouble({ delay: 1500 })
  const key = newKey()
  t.match(await charge(front, key), { status: 200, replayed: true })
  t.equal(api.made.length, 1)
})

void t.test('nginx does not resend a request without a key', options, async (t) => {
  const api = await apiOf(t)
  const a = await proxyOf(t, 'memory:', api.url)
  await using wire = await cutter(a.port, [{ way: 'down', after: 0, how: 'reset' }])
  const front = await nginx(t, example('in-front.conf', servers(wire.port, a.port, [8080, 8081])))
  t.equal((await charge(front, null, '/v1/charges/')).status, 502, 'another location than = /v1/charges')
})

/** What the client got, what its retry gets, and how often the charge was made. */
async function through(
  t: Test,
  between: (api: ChargesApi) => Promise<{ readonly url: string }>,
): Promise<{ first: Reply; retry: Reply; charges: number }> {
  const api = await apiOf(t)
  const proxy = await proxyOf(t, 'memory:', (await between(api)).url)
  const key = newKey()
  const first = await charge(proxy, key)
  const retry = await charge(proxy, key)
  return { first, retry, charges: api.under(key).length }
}

/** nginx whose first server makes the charge, and is cut before it has answered. */
async function cutBetween(t: Test, api: ChargesApi, changes: Readonly<Record<string, string>>) {
  const wire = await cutter(api.port, [{ way: 'down', after: 0, how: 'reset' }])
  t.teardown(() => wire[Symbol.asyncDispose]())
  return nginx(t, example('between.conf', { ...servers(wire.port, api.port, [3000, 3001]), ...changes }))
}

void t.test('U08 nginx between proxy and API does not resend: 409, one charge', options, async (t) => {
  const { first, retry, charges } = await through(t, (api) => cutBetween(t, api, {}))
  t.equal(first.status, 502, "nginx's own response")
  t.strictSame(refusalOf(retry), [409, 'idempotency_outcome_unknown'])
  t.equal(charges, 1)
})

t.test('DANGER: non_idempotent between proxy and API charges one key twice', options, async (t) => {
  const { first, retry, charges } = await through(t, (api) =>
    cutBetween(t, api, {
      'proxy_next_upstream error timeout;': 'proxy_next_upstream error timeout non_idempotent;',
    }),
  )
  t.match([first.status, retry.status, retry.replayed], [200, 200, true], 'the client notices nothing')
  t.equal(charges, 2)
})

void t.test('U01 nginx between proxy and API skips a server that is down: one charge', options, async (t) => {
  const { first, charges } = await through(t, (api) =>
    // Nothing listens on port 1.
    nginx(t, example('between.conf', servers(1, api.port, [3000, 3001]))),
  )
  t.equal(first.status, 200)
  t.equal(charges, 1)
})

const UNKNOWN = [409, 'idempotency_outcome_unknown'] as const
/** nginx answers by itself. */
// biome-ignore format: a table
const OWN: readonly (readonly [what: string, location: string, first: number, retry: readonly [number, string | null]])[] = [
  ['no server behind it', 'proxy_pass http://127.0.0.1:1;', 502, UNKNOWN],
  ['`limit_req` with its default status', 'limit_req zone=one; proxy_pass API;', 503, UNKNOWN],
  ['`limit_req` with `limit_req_status 429`', 'limit_req zone=one; limit_req_status 429; proxy_pass API;', 429,
    [429, null]],
  ['the body is over `client_max_body_size`', 'client_max_body_size 10; proxy_pass API;', 413, [413, null]],
]

for (const [what, location, first, retry] of OWN)
  void t.test(`U08 nginx between proxy and API answers ${first} itself: ${what}`, options, async (t) => {
    const api = await apiOf(t)
    const between = await nginx(
      t,
      `limit_req_zone $binary_remote_addr zone=one:1m rate=1r/m;
server { listen LISTEN; location / { ${location.replace('API', api.url)} } }`,
    )
    const proxy = await proxyOf(t, 'memory:', between.url)
    // The only one that the limit lets through.
    if (location.includes('limit_req')) t.equal((await charge(proxy, newKey())).status, 200)
    const made = api.made.length
    const key = newKey()
    t.equal((await charge(proxy, key)).status, first)
    const again = await charge(proxy, key)
    t.strictSame(refusalOf(again), retry)
    t.equal(again.replayed, first === 413, 'a 413 is kept: the same request is always too large')
    t.equal(api.made.length, made, 'nothing was charged')
  })
