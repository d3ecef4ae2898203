import { readFileSync, renameSync, writeFileSync } from 'node:fs'
import { Agent, request } from 'node:http'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { adminYaml, ask } from '../support/admin.ts'
import { bank } from '../support/bank.ts'
import { newKey, send, tempDir, until } from '../support/e2e.ts'
import { metricIs } from '../support/exchange.ts'
import { Mount } from '../support/mount.ts'
import { type ChildProxy, proxyProcess } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { heldUpstream, refusalOf } from '../support/replicas.ts'
import { upstreamStub, valueOf } from '../support/upstream.ts'

// A hundred reloads under load, and processes that start.
t.setTimeout(600_000)

const redis = await RedisServer.start()
t.teardown(() => redis[Symbol.asyncDispose]())

const RELOADED = 'the configuration was reloaded'
const SAME = 'the configuration was read again: nothing has changed'
const IDENTIFIES =
  'the configuration changes which record a request finds: restart, after waiting out ttl; all of the previous one stays in force'
const RESTART = 'the configuration needs a restart; all of the previous one stays in force'
const INVALID = 'the configuration is invalid; the previous one stays in force'
const SUCCESSFUL = 'idempotency_config_last_reload_successful'

function times(proxy: ChildProxy, message: string): number {
  return proxy.log.filter(({ msg }) => msg === message).length
}

function newest(proxy: ChildProxy, message: string): Record<string, unknown> | undefined {
  return proxy.log.findLast(({ msg }) => msg === message)
}

/** The log line of each time that the configuration was read again. */
function reads(proxy: ChildProxy): Record<string, unknown>[] {
  return proxy.log.filter(({ msg }) => [RELOADED, SAME, RESTART, IDENTIFIES, INVALID].includes(String(msg)))
}

/** Calls `act` and resolves with the next log line that says `message`. */
async function saysAfter(
  proxy: ChildProxy,
  message: string,
  act: () => void,
): Promise<Record<string, unknown>> {
  const before = times(proxy, message)
  act()
  await until(() => times(proxy, message) > before)
  return newest(proxy, message) as Record<string, unknown>
}

interface Served {
  readonly proxy: ChildProxy
  readonly file: string
  /** Writes the file and sends SIGHUP; resolves with the log line that says `message`. */
  reload(yaml: string, message?: string): Promise<Record<string, unknown>>
}

/** A process that serves `yaml` (with its listeners prepended) and reloads on SIGHUP. */
async function served(t: Test, yaml: string): Promise<Served> {
  const head = `listen: 127.0.0.1:0\n${adminYaml(t)}\n`
  const file = join(tempDir(t), 'proxy.yaml')
  writeFileSync(file, head + yaml)
  const proxy = await proxyProcess(file)
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return {
    proxy,
    file,
    async reload(next, message = RELOADED) {
      const before = reads(proxy).length
      writeFileSync(file, head + next)
      proxy.kill('SIGHUP')
      // One read for the signal and one for the watch, so that neither reaches into the next step.
      await until(() => reads(proxy).length >= before + 2)
      const line = reads(proxy)
        .slice(before)
        .find(({ msg }) => msg === message)
      if (line === undefined) throw new Error(JSON.stringify(reads(proxy).slice(before)))
      return line
    },
  }
}

function yamlOf(upstream: { readonly url: string }, rest: string, store = 'memory:'): string {
  return `service: pay\nupstream: { url: "${upstream.url}" }\nstore: { url: "${store}" }\n${rest}\n`
}

interface Answered {
  readonly key: string
  readonly status: number
  readonly body: string
  readonly replayed: boolean
}

/** One POST over the agent's connections; rejects where the connection breaks. */
function post(proxy: { readonly url: string }, agent: Agent, key: string): Promise<Answered> {
  return new Promise((resolve, reject) => {
    const sent = request(
      `${proxy.url}/pay`,
      { method: 'POST', agent, headers: { authorization: 'Bearer alice', 'idempotency-key': key } },
      (response) => {
        let body = ''
        response.setEncoding('utf8')
        response.on('data', (chunk: string) => {
          body += chunk
        })
        response.on('error', reject)
        response.on('end', () =>
          resolve({
            key,
            status: response.statusCode as number,
            body,
            replayed: response.headers['idempotent-replayed'] === 'true',
          }),
        )
      },
    )
    sent.on('error', reject)
    sent.end('{"amount":1}')
  })
}

for (const [store, reloads] of [
  ['redis', 100],
  ['sqlite', 20],
] as const) {
  void t.test(`O08 ${store}: ${reloads} reloads under load drop nothing and re-scope nothing`, async (t) => {
    const executed = new Map<string, number>()
    const upstream = await upstreamStub((seen, response) => {
      const key = valueOf(seen, 'idempotency-key')
      executed.set(key, (executed.get(key) ?? 0) + 1)
      setTimeout(() => response.writeHead(201).end(`done ${key}`), Math.random() * 20)
    })
    t.teardown(() => upstream[Symbol.asyncDispose]())
    const url = store === 'redis' ? redis.url : `sqlite:${join(tempDir(t), 'store.db')}`
    const yaml = (n: number): string =>
      [
        `listen: 127.0.0.1:0`,
        `admin: { listen: "127.0.0.1:0" }`,
        yamlOf(upstream, `limits: { inFlight: ${1000 + n}, waiters: ${100 + n} }`, url),
        `defaults: { ttl: ${24 + n}h }`,
        'routes:',
        `  - { name: pay, match: { path: /pay }, key: required, lease: ${30 + n}s, statusHeader: ${n % 2 === 0}, inFlight: ${n % 3 === 0 ? 'wait' : 'reject'} }`,
        // Routes come and go: their requests keep their records, and so do the others.
        ...(n % 2 === 0 ? ['  - { name: refunds, match: { path: /refunds } }'] : []),
      ].join('\n')
    const mount = new Mount(t, { 'proxy.yaml': yaml(0) })
    const proxy = await proxyProcess(mount.file('proxy.yaml'))
    t.teardown(() => proxy[Symbol.asyncDispose]())

    const agent = new Agent({ keepAlive: true, maxSockets: 32 })
    t.teardown(() => agent.destroy())
    const first = new Map<string, Answered>()
    const wrong: unknown[] = []
    let retries = 0
    const load = { ended: false }
    const client = async (): Promise<void> => {
      while (!load.ended) {
        const known = [...first.keys()]
        const again = known[Math.floor(Math.random() * known.length)]
        const retry = again !== undefined && Math.random() < 0.5
        const key = retry ? again : newKey()
        try {
          const answer = await post(proxy, agent, key)
          const before = first.get(key)
          if (retry) {
            retries++
            if (!answer.replayed || answer.body !== before?.body) wrong.push(answer)
          } else if (answer.status !== 201 || answer.replayed) wrong.push(answer)
          else first.set(key, answer)
        } catch (error) {
          wrong.push({ key, error: String(error) })
        }
      }
    }
    const clients = Array.from({ length: 16 }, client)
    await until(() => first.size > 50)
    const early = [...first.keys()]
    for (let n = 1; n <= reloads; n++) {
      await saysAfter(proxy, RELOADED, () => {
        mount.swap({ 'proxy.yaml': yaml(n) })
        // Most by a signal; some as the kubelet does it, found by the watch alone.
        if (n % 10 !== 0) proxy.kill('SIGHUP')
      })
    }
    load.ended = true
    await Promise.all(clients)
    t.strictSame(wrong, [], 'no request is dropped, refused or answered differently')
    t.ok(times(proxy, RELOADED) >= reloads, `${reloads} reloads, ${first.size} keys, ${retries} retries`)
    t.equal(await proxy.metric(SUCCESSFUL), 1)
    for (const key of early) {
      const retry = await post(proxy, agent, key)
      if (!retry.replayed || retry.body !== first.get(key)?.body)
        t.fail(`not replayed: ${JSON.stringify(retry)}`)
    }
    t.strictSame(
      [...executed.values()].filter((count) => count !== 1),
      [],
      'each key was executed once',
    )
    t.equal(executed.size, first.size)
    t.comment(`${first.size} keys, ${retries} retries`)
  })
}

void t.test('O08 a request in progress keeps the policy that it started with', async (t) => {
  const upstream = await heldUpstream(t)
  const yaml = (rest: string): string =>
    yamlOf(upstream, `routes: [{ name: pay, match: { path: /pay }, ${rest} }]`)
  const { proxy, reload } = await served(t, yaml('statusHeader: true, outcomes: { "503": store }'))
  const key = newKey()
  const running = send(proxy, key)
  await upstream.arrived(1)
  const passing = send(proxy, null, { method: 'GET', path: '/other', body: null })
  await upstream.arrived(2)
  await reload(yaml('statusHeader: false, key: required, keep: outcome'))
  upstream.finish(2)
  t.match(await passing, { status: 201, body: 'execution 2' }, 'so do pass-through requests')
  const retry = await send(proxy, key)
  t.strictSame(refusalOf(retry), [409, 'idempotency_key_in_progress'], 'the new policy finds its record')
  t.strictSame(
    refusalOf(await send(proxy, null)),
    [400, 'idempotency_key_missing'],
    'the next request gets the new policy',
  )
  upstream.finish(1)
  const first = await running
  t.match(first, { status: 201, body: 'execution 1' })
  t.equal(first.headers.get('idempotency-status'), 'executed')
  const replay = await send(proxy, key)
  t.match(
    replay,
    { status: 201, body: 'execution 1', replayed: true },
    'its response was kept, as it started without keep: outcome',
  )
  t.equal(replay.headers.get('idempotency-status'), null)
  const later = newKey()
  upstream.finish(3)
  t.equal((await send(proxy, later)).status, 201)
  t.equal((await send(proxy, later)).code, 'idempotency_response_unavailable')
  t.equal(upstream.seen.length, 3)
})

void t.test('changed limits take effect at once', async (t) => {
  const upstream = await heldUpstream(t)
  const yaml = (limits: string): string =>
    yamlOf(upstream, `limits: { ${limits} }\ndefaults: { inFlight: wait }`)
  const { proxy, reload } = await served(t, yaml('inFlight: 1, request: 100B, response: 1KiB'))
  const key = newKey()
  const running = send(proxy, key)
  await upstream.arrived(1)
  t.strictSame(refusalOf(await send(proxy, newKey(), { path: '/fast' })), [503, 'overloaded'])
  await reload(yaml('inFlight: 10, waiters: 1, request: 100B, response: 1KiB'))
  t.equal((await send(proxy, newKey(), { path: '/fast' })).status, 201)
  const waiting = send(proxy, key)
  await metricIs(proxy, 'idempotency_waiters', 1)
  t.equal((await send(proxy, key)).code, 'idempotency_key_in_progress', 'one may wait')
  await reload(yaml('inFlight: 10, waiters: 2, request: 100B, response: 1KiB'))
  const second = send(proxy, key)
  await metricIs(proxy, 'idempotency_waiters', 2)
  upstream.finish(1)
  for (const answer of await Promise.all([running, waiting, second])) t.equal(answer.status, 201)

  const body = JSON.stringify({ text: 'x'.repeat(400) })
  t.equal((await send(proxy, newKey(), { path: '/fast', body })).code, 'request_too_large')
  await reload(yaml('inFlight: 10, request: 1KiB, response: 1KiB'))
  t.equal((await send(proxy, newKey(), { path: '/fast', body })).status, 201)
  await reload(yaml('inFlight: 10, buffered: 1KiB, request: 1KiB, response: 1KiB'))
  const many = Array.from({ length: 6 }, () => send(proxy, newKey(), { path: '/held', body }))
  const refused = await Promise.any(
    many.map(async (one) => ((await one).code === 'overloaded' ? true : Promise.reject(new Error('served')))),
  )
  t.ok(refused, 'no room is left')
  for (let n = 1; n <= 20; n++) upstream.finish(n)
  await Promise.all(many)
})

void t.test(
  'an invalid file changes nothing, is logged as check prints it, and shows in a metric until a valid one comes',
  async (t) => {
    const upstream = await heldUpstream(t)
    const good = yamlOf(upstream, 'routes: [{ name: pay, match: { path: /fast }, key: required }]')
    const { proxy, file, reload } = await served(t, good)
    t.equal(await proxy.metric(SUCCESSFUL), 1)
    const { errors } = await reload(`${good}lmits: { inFlight: 1 }\ndefaults: { ttl: 1x }\n`, INVALID)
    t.match(errors, [
      `${file}:7:1: lmits: found the unknown property`,
      `${file}:8:18: defaults.ttl: found "1x"`,
    ])
    t.equal(await proxy.metric(SUCCESSFUL), 0)
    t.strictSame(refusalOf(await send(proxy, null, { path: '/fast' })), [400, 'idempotency_key_missing'])
    await reload('{{{', INVALID)
    t.equal(await proxy.metric(SUCCESSFUL), 0)
    await reload(good, SAME)
    t.equal(await proxy.metric(SUCCESSFUL), 1)
    t.equal(times(proxy, RELOADED), 0)
  },
)

void t.test('§10 a reload that needs a restart says exactly why, and changes nothing at all', async (t) => {
  const upstream = await heldUpstream(t)
  const head = `upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\n`
  const pay = '{ name: pay, match: { path: /fast }, key: required }'
  const { proxy, file, reload } = await served(t, `${head}routes: [${pay}]\n`)
  const key = newKey()
  t.equal((await send(proxy, key, { path: '/fast' })).status, 201)
  const inForce = (await ask(proxy, '/v1/config')).text

  const line = await reload(
    `upstream: { url: "http://127.0.0.1:9" }
service: payments
store: { url: "redis://:secret@127.0.0.1:1/0" }
limits: { inFlight: 1 }
routes: [{ name: pay, match: { path: /fast }, scope: { caller: "header:x-api-key" } }]
`,
    IDENTIFIES,
  )
  t.match(line, {
    level: 'error',
    restart: [
      `upstream.url: ${upstream.url} → http://127.0.0.1:9`,
      'store.url: memory: → redis://***@127.0.0.1:1/0',
    ],
    identifies: [
      'service: default → payments',
      'routes[pay].scope.caller: ["header:authorization"] → ["header:x-api-key"]',
    ],
  })
  t.notMatch(JSON.stringify(proxy.log), /secret@/)
  t.equal(await proxy.metric(SUCCESSFUL), 0)
  t.equal((await ask(proxy, '/v1/config')).text, inForce, 'not even limits')
  t.ok((await send(proxy, key, { path: '/fast' })).replayed)
  t.equal((await send(proxy, null, { path: '/fast' })).code, 'idempotency_key_missing')

  // The admin token's file is read again too: a changed token needs a restart.
  const token = /tokenFile: ([^ ,}]+)/.exec(readFileSync(file, 'utf8'))?.[1] as string
  writeFileSync(token, 'another-token-0123456789')
  t.match(await reload(`${head}routes: [${pay}]\n`, RESTART), {
    restart: ['admin.tokenFile: *** → *** (another value)'],
  })
  writeFileSync(token, 'right-token-0123456789')
  await reload(`${head}routes: [${pay}]\nlimits: { inFlight: 77 }\n`)
  t.equal(await proxy.metric(SUCCESSFUL), 1)
  t.match((await ask(proxy, '/v1/config')).json, { limits: { inFlight: 77 } }, 'what is in force is shown')

  await reload(`${head}routes: [${pay}, { name: more, match: { path: /fast/more } }]\n`)
  const later = newKey()
  t.equal((await send(proxy, later, { path: '/fast/more' })).status, 201)
  const body = { key: later, caller: { authorization: 'Bearer alice' }, route: 'more', method: 'POST' }
  t.match((await ask(proxy, '/v1/records/lookup', { method: 'POST', body })).json, {
    route: 'more',
    state: 'completed',
  })
})

void t.test(
  'a file that an editor replaces is reloaded without a signal, and its half-written states are not',
  async (t) => {
    const upstream = await heldUpstream(t)
    const head = `listen: 127.0.0.1:0\n${adminYaml(t)}\n`
    const dir = tempDir(t)
    const file = join(dir, 'proxy.yaml')
    const yaml = (n: number): string => head + yamlOf(upstream, `limits: { inFlight: ${n} }`)
    writeFileSync(file, yaml(1))
    const proxy = await proxyProcess(file)
    t.teardown(() => proxy[Symbol.asyncDispose]())
    const inFlight = async (): Promise<unknown> =>
      ((await ask(proxy, '/v1/config')).json['limits'] as Record<string, unknown>)['inFlight']
    for (const n of [2, 3]) {
      await saysAfter(proxy, RELOADED, () => {
        renameSync(file, `${file}~`)
        writeFileSync(join(dir, 'new'), yaml(n))
        renameSync(join(dir, 'new'), file)
      })
      t.equal(await inFlight(), n)
    }
    await saysAfter(proxy, RELOADED, () => {
      writeFileSync(file, '')
      writeFileSync(file, yaml(4))
    })
    t.equal(await inFlight(), 4)
    t.equal(times(proxy, INVALID), 0)
  },
)

void t.test('§10 log.level changes without a restart, log.format does not', async (t) => {
  const upstream = await heldUpstream(t)
  const yaml = (log: string): string => yamlOf(upstream, `log: { ${log} }`)
  const { proxy, file, reload } = await served(t, yaml('level: info'))
  const head = readFileSync(file, 'utf8').slice(0, -yaml('level: info').length)
  const changeTo = async (log: string, change: string): Promise<void> => {
    writeFileSync(file, head + yaml(log))
    proxy.kill('SIGHUP')
    await proxy.logged(({ msg, changes }) => msg === RELOADED && String(changes) === change)
  }
  const requests = (): unknown[] => proxy.log.filter(({ msg }) => msg === 'request')
  await changeTo('level: warn', 'log.level: info → warn')
  t.equal((await send(proxy, newKey(), { path: '/fast' })).status, 201)
  await changeTo('level: debug', 'log.level: warn → debug')
  t.strictSame(requests(), [], 'a quieter level is in force once the log has said so')
  t.equal((await send(proxy, newKey(), { path: '/fast' })).status, 201)
  await proxy.logged(({ msg }) => msg === 'request')
  t.equal(requests().length, 1)
  await changeTo('level: silent', 'log.level: debug → silent')
  await changeTo('level: info', 'log.level: silent → info')

  const refused = await reload(yaml('level: trace, format: json'), RESTART)
  t.match(refused, { restart: ['log.format: auto → json'] })
})

void t.test('a reload uses the environment and flags of the start', async (t) => {
  const upstream = await heldUpstream(t)
  const file = join(tempDir(t), 'proxy.yaml')
  const yaml = (rest: string): string =>
    `listen: 127.0.0.1:0\nadmin: { listen: "127.0.0.1:0" }\nupstream: { url: "http://127.0.0.1:1" }\n${rest}`
  writeFileSync(file, yaml(''))
  const proxy = await proxyProcess(file, ['--upstream', upstream.url, '--store', 'memory:'], { TTL: '48h' })
  t.teardown(() => proxy[Symbol.asyncDispose]())
  const line = await saysAfter(proxy, RELOADED, () => {
    writeFileSync(file, yaml('defaults: { ttl: "${TTL}" }\n'))
    proxy.kill('SIGHUP')
  })
  t.match(line['changes'], ['defaults.ttl: 24h → 48h', 'defaults.ttlFailed: 24h → 48h'])
  t.equal((await send(proxy, newKey(), { path: '/fast' })).status, 201)
})

void t.test('a reload turns shadow into enforce, which honours its records, and back', async (t) => {
  const upstream = await heldUpstream(t)
  const yaml = (mode: string): string =>
    yamlOf(upstream, `routes: [{ name: pay, match: { path: /fast }, mode: ${mode} }]`)
  const { proxy, reload } = await served(t, yaml('shadow'))
  const key = newKey()
  t.equal((await send(proxy, key, { path: '/fast' })).status, 201)
  await metricIs(proxy, 'idempotency_shadow_total{route="pay",verdict="first"}', 1)
  await reload(yaml('enforce'))
  t.match(await send(proxy, key, { path: '/fast' }), { replayed: true, body: 'execution 1' })
  const line = await reload(yaml('shadow'))
  t.strictSame(line['changes'], ['routes[pay].mode: enforce → shadow'])
  t.match(
    newest(proxy, 'Route `pay`: mode shadow, so a retry executes again.'),
    { level: 'warn' },
    'the warning is repeated',
  )
  t.equal((await send(proxy, key, { path: '/fast' })).replayed, false)
  t.match(await reload(yaml('off'), IDENTIFIES), { identifies: ['routes[pay].mode: shadow → off'] })
})

void t.test('after a reload the reconciler queries as the new configuration says', async (t) => {
  const upstream = await bank(t)
  const yaml = (reconcile: string): string =>
    yamlOf(upstream, `routes: [{ name: pay, match: { path: /pay }, lease: 1s${reconcile} }]`)
  const { proxy, reload } = await served(t, yaml(''))
  const key = newKey()
  const first = await send(proxy, key)
  t.equal(first.code, 'upstream_failed')
  t.equal((await send(proxy, key)).code, 'idempotency_outcome_unknown')
  await reload(
    yaml(
      `, reconcile: { request: { path: "/payments?record={record}" }, identity: none, completed: { status: 200 }, after: 1ms, every: 1s }`,
    ),
  )
  await until(() => upstream.queries.length > 0)
  t.match(upstream.queries[0]?.target, /^\/payments\?record=/)
})
