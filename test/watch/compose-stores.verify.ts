import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import t, { type Test } from 'tap'
import { parse } from 'yaml'
import { load } from '../config/support.ts'
import { newKey, send, tempDir, until } from '../support/e2e.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { freePort, RedisServer } from '../support/redis.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(120_000)

const ROOT = fileURLToPath(new URL('../../', import.meta.url))
const NAMES = ['sentinel', 'cluster', 'postgres'] as const
/** Null: docker-compose.yml alone. */
type Name = (typeof NAMES)[number] | null

interface Service {
  readonly image: string
  readonly command?: readonly string[]
  readonly mem_limit?: string
  readonly ports?: readonly string[]
  readonly volumes?: readonly string[]
  readonly environment?: Readonly<Record<string, string>>
  readonly depends_on?: Readonly<Record<string, { readonly condition: string }>>
  readonly configs?: readonly { readonly source: string; readonly target: string }[]
  readonly healthcheck?: { readonly test?: readonly string[] }
  readonly networks?: { readonly default: { readonly ipv4_address: string } }
}
interface Compose {
  readonly services: Readonly<Record<string, Service>>
  readonly configs: Readonly<Record<string, { readonly file: string }>>
  readonly volumes: Readonly<Record<string, null>>
}

class Override {
  readonly value: unknown
  constructor(value: unknown) {
    this.value = value
  }
}

/** Merged over docker-compose.yml as Compose does it: commands are replaced, other lists grow. */
function merged(name: Name): Compose {
  const read = (file: string): unknown =>
    parse(readFileSync(join(ROOT, file), 'utf8'), {
      merge: true,
      customTags: [
        { tag: '!reset', resolve: () => new Override(undefined) },
        {
          tag: '!override',
          collection: 'map',
          resolve: (node) => new Override((node as never as { toJSON(): unknown }).toJSON()),
        },
      ],
    })
  const base = read('docker-compose.yml')
  return (name === null ? base : merge(base, read(`examples/compose/${name}.yaml`))) as Compose
}

const REPLACED = new Set(['command', 'entrypoint', 'test'])

function merge(base: unknown, over: unknown, name = ''): unknown {
  if (over instanceof Override) return over.value
  if (Array.isArray(base) && Array.isArray(over))
    return REPLACED.has(name) ? over : [...new Set([...base, ...over] as unknown[])]
  if (!isMap(base) || !isMap(over)) return over ?? base ?? null
  const entries = [...new Set([...Object.keys(base), ...Object.keys(over)])].map(
    (key) => [key, key in over ? merge(base[key], over[key], key) : base[key]] as const,
  )
  return Object.fromEntries(entries.filter(([, value]) => value !== undefined))
}

function isMap(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

function storeUrl({ services }: Compose): string {
  return services['proxy']?.environment?.['STORE_URL'] as string
}

/** The arguments of the service's `redis-server`, at the addresses of the test. */
function redisArgs({ services }: Compose, name: string, at: (text: string) => string): string[] {
  const [program, ...args] = services[name]?.command ?? []
  if (program !== 'redis-server') throw new Error(`${name} runs ${program}`)
  return at(args.join('\0')).split('\0')
}

for (const name of [null, ...NAMES])
  t.test(`${name ?? 'alone'}: containers have what they need, within limits, on loopback`, async (t) => {
    const compose = merged(name)
    for (const [
      service,
      { mem_limit, ports = [], depends_on = {}, volumes = [], configs = [], ...one },
    ] of Object.entries(compose.services)) {
      t.match(mem_limit, /^\d+m$/, service)
      for (const port of ports) t.match(port, /^127\.0\.0\.1:/, service)
      for (const [needed, { condition }] of Object.entries(depends_on)) {
        t.ok(compose.services[needed], `${service} depends on ${needed}`)
        if (condition === 'service_healthy' && needed !== 'payments')
          t.ok(compose.services[needed]?.healthcheck?.test, needed)
      }
      for (const volume of volumes) t.ok((volume.split(':')[0] as string) in compose.volumes, volume)
      for (const { source } of configs) t.ok(compose.configs[source], source)
      t.notMatch(one.healthcheck?.test ?? [], /\bnode\b/)
      const { command = [] } = one
      if (command[0] !== 'redis-server') continue
      const value = (flag: string) => command[command.indexOf(flag) + 1]
      t.equal(value('--appendonly'), 'yes', service)
      t.equal(value('--maxmemory-policy'), 'noeviction', service)
      t.ok(
        Number.parseInt(mem_limit as string) >= 2 * Number.parseInt(value('--maxmemory') as string),
        service,
      )
      t.ok(
        volumes.some((volume) => volume.endsWith(':/data')),
        `${service} keeps its records`,
      )
    }
    for (const { file } of Object.values(compose.configs)) t.ok(readFileSync(join(ROOT, file)))
    const token = join(tempDir(t), 'token')
    writeFileSync(token, 'a-token-of-this-test')
    const env = { ...compose.services['proxy']?.environment, ADMIN_TOKEN_FILE: token }
    const text = readFileSync(join(ROOT, 'examples/compose/proxy.yaml'), 'utf8')
    t.equal(load(text, { env }).store.url, storeUrl(compose))
  })

void t.test('postgres: the proxy has user, password and database of the server, and no Redis', async (t) => {
  const compose = merged('postgres')
  const { username, password, pathname, hostname } = new URL(storeUrl(compose))
  t.match(compose.services[hostname]?.environment, {
    POSTGRES_USER: username,
    POSTGRES_PASSWORD: password,
    POSTGRES_DB: pathname.slice(1),
  })
  t.same(
    Object.keys(compose.services).filter((name) => name.startsWith('redis')),
    [],
  )
  t.notOk(compose.services['proxy']?.depends_on?.['redis'])
})

async function proxyOn(t: Test, url: string) {
  const upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end('paid'))
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyInProcess(
    `service: payments\nupstream: { url: "${upstream.url}" }\nstore: { url: "${url}", grace: 2s }\n`,
  )
  t.teardown(() => proxy.drain())
  /** Retries a new key until it is executed. */
  const paid = async (): Promise<string> => {
    const key = newKey()
    await until(async () => (await send(proxy, key)).status === 201)
    return key
  }
  return { paid, replayed: async (key: string) => (await send(proxy, key)).replayed, upstream }
}

void t.test('sentinel: the commands make a group that replaces a dead master', async (t) => {
  const compose = merged('sentinel')
  const names = ['redis', 'redis-2', 'redis-3']
  const ports = new Map(await Promise.all(names.map(async (name) => [name, await freePort()] as const)))
  // Longest names first: one name begins another.
  const at = (text: string): string =>
    [...names]
      .reverse()
      .reduce(
        (changed, name) =>
          changed
            .replaceAll(new RegExp(`(?<![\\w-])${name}(\\0| )6379`, 'g'), `127.0.0.1$1${ports.get(name)}`)
            .replaceAll(new RegExp(`(?<=announce-ip\\0)${name}(?!-)`, 'g'), '127.0.0.1'),
        text,
      )
  const servers: RedisServer[] = []
  for (const name of names) {
    const args = [...redisArgs(compose, name, at), '--repl-diskless-sync-delay', '0']
    const server = await RedisServer.start({ args, port: ports.get(name) as number })
    t.teardown(() => server[Symbol.asyncDispose]())
    servers.push(server)
  }
  const sentinels: RedisServer[] = []
  for (const name of ['sentinel-1', 'sentinel-2', 'sentinel-3']) {
    const { configs = [], command = [] } = compose.services[name] as Service
    t.equal(configs[0]?.target, '/etc/redis/sentinel.conf')
    t.match(
      command.at(-1),
      /cp \/etc\/redis\/sentinel.conf sentinel.conf\nexec redis-server sentinel.conf --sentinel\n$/,
    )
    const file = compose.configs[configs[0]?.source as string]?.file as string
    const lines = at(readFileSync(join(ROOT, file), 'utf8'))
      .split('\n')
      .filter((line) => line !== '' && !line.startsWith('#'))
    const sentinel = await RedisServer.start({ sentinel: lines })
    t.teardown(() => sentinel[Symbol.asyncDispose]())
    sentinels.push(sentinel)
  }
  for (const one of sentinels)
    for (const what of ['replicas', 'sentinels'])
      await until(async () => ((await one.command('SENTINEL', what, 'payments')) as unknown[]).length === 2)
  const url = storeUrl(compose).replaceAll(
    /sentinel-(\d):26379/g,
    (_all, n: string) => `127.0.0.1:${sentinels[Number(n) - 1]?.port}`,
  )
  const { paid, replayed, upstream } = await proxyOn(t, url)
  const before = await paid()
  await servers[0]?.kill()
  const after = await paid()
  for (const key of [before, after]) t.ok(await replayed(key))
  t.equal(upstream.seen.length, 2)
})

void t.test('cluster: the commands assign the slots once, and a replica takes over', async (t) => {
  const compose = merged('cluster')
  const nodes = Object.entries(compose.services).filter(([, { command }]) =>
    command?.includes('--cluster-enabled'),
  )
  t.equal(nodes.length, 6)
  const ports = new Map<string, number>()
  const servers: RedisServer[] = []
  for (const [name, { networks }] of nodes) {
    const [port, bus] = [await freePort(), await freePort()]
    ports.set(networks?.default.ipv4_address as string, port)
    const args = [
      ...redisArgs(compose, name, (text) => text),
      '--cluster-port',
      String(bus),
      '--repl-diskless-sync-delay',
      '0',
    ]
    const server = await RedisServer.start({ args, port })
    t.teardown(() => server[Symbol.asyncDispose]())
    servers.push(server)
  }
  const at = (text: string): string =>
    text.replaceAll(/(172\.29\.0\.\d+):6379/g, (_all, address: string) => `127.0.0.1:${ports.get(address)}`)
  const [shell = '', flags = '', script = ''] = compose.services['cluster']?.command ?? []
  const run = async () => {
    const child = spawn(shell, [flags, at(script.replaceAll('$$', '$'))], {
      stdio: ['ignore', 'pipe', 'pipe'],
    })
    let out = ''
    for (const stream of [child.stdout, child.stderr])
      stream.on('data', (text: Buffer) => void (out += text.toString()))
    const [code] = (await once(child, 'close')) as [number]
    t.equal(code, 0, out)
    return out
  }
  t.match(await run(), /All 16384 slots covered/)
  t.notMatch(await run(), /slots/, 'a second start leaves it as it is')
  const { paid, replayed, upstream } = await proxyOn(t, at(storeUrl(compose)))
  const keys = await Promise.all(Array.from({ length: 8 }, paid))
  // A replica that has never had its master's data does not take over.
  await until(async () => {
    const told = await Promise.all(servers.map(async (server) => server.command('INFO', 'replication')))
    return told.filter((info) => /role:slave[^]*master_link_status:up/.test(String(info))).length === 3
  })
  await servers[0]?.kill()
  for (const key of keys) await until(async () => replayed(key))
  const later = await Promise.all(Array.from({ length: 8 }, paid))
  for (const key of later) t.ok(await replayed(key))
  t.equal(upstream.seen.length, 16)
})

const COMPOSE = spawnSync('docker', ['compose', 'version']).status === 0
const SKIP = { skip: COMPOSE ? false : 'docker compose is not installed' }
for (const name of [null, ...NAMES])
  void t.test(`docker compose accepts ${name ?? 'docker-compose'}.yaml`, SKIP, async (t) => {
    const files = ['docker-compose.yml', ...(name === null ? [] : [`examples/compose/${name}.yaml`])]
    const words = ['compose', ...files.flatMap((file) => ['-f', file]), 'config', '--quiet']
    const { status, stderr } = spawnSync('docker', words, { cwd: ROOT, encoding: 'utf8' })
    t.same([status, stderr], [0, ''])
  })
