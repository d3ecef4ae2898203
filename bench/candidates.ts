import { randomBytes } from 'node:crypto'
import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { makeCertificate } from '../test/support/certificates.ts'
import { NO_POSTGRES } from '../test/support/postgres.ts'
import { freePort } from '../test/support/redis.ts'
import { Child } from './child.ts'
import type { Protocol } from './load.ts'
import type { Cores } from './machine.ts'
import { findNginx, findNginxLua, nginxCommand } from './nginx.ts'
import { STORE_CANDIDATES, type StoreAt, type StoreCandidate } from './stores.ts'

export interface World {
  /** Folder for all output. */
  readonly folder: string
  /** The built JavaScript. */
  readonly dist: string
  readonly cores: Cores
  readonly upstreamPort: number
  readonly redisPort: number
  /** Null: not available, or no candidate needs it. */
  readonly postgres: { readonly url: string } | null
  /** The requested ones. */
  readonly stores: ReadonlyMap<StoreCandidate, StoreAt | string>
}

/** The default candidates. */
export const CANDIDATES = [
  'proxy-redis',
  'proxy-sealed',
  'proxy-sqlite',
  'proxy-memory',
  'proxy-postgres',
  'proxy-tls',
  'proxy-http2',
  'proxy-grpc',
  'unprotected',
  'http-proxy',
  'nginx',
  'nginx-lua',
  'node-idempotency',
] as const
/** A stock part in place of ours; only if asked for. */
export const PARTS = ['unprotected-node'] as const
export type CandidateName = (typeof CANDIDATES)[number] | StoreCandidate | (typeof PARTS)[number]

export const TITLES: Readonly<Record<CandidateName, string>> = {
  'proxy-redis': '**this proxy**, Redis',
  'proxy-sealed': '**this proxy**, Redis, encrypted',
  'proxy-sqlite': '**this proxy**, SQLite (default)',
  'proxy-memory': '**this proxy**, memory',
  'proxy-postgres': '**this proxy**, PostgreSQL',
  'proxy-tls': '**this proxy**, Redis, clients over TLS',
  'proxy-http2': '**this proxy**, Redis, clients over HTTP/2',
  'proxy-grpc': '**this proxy**, Redis, gRPC',
  'proxy-sentinel': '**this proxy**, Redis under three Sentinels',
  'proxy-cluster': '**this proxy**, Redis Cluster of three masters',
  'proxy-wait': '**this proxy**, Redis with `store.wait: { replicas: 1 }`',
  'proxy-dynalite': '**this proxy**, DynamoDB (the emulator dynalite)',
  'proxy-tiered': '**this proxy**, PostgreSQL behind Redis (`tiered:`)',
  unprotected: 'its own unprotected, buffered POST',
  'unprotected-node': 'the same with undici’s own pool',
  'http-proxy': 'plain @fastify/http-proxy',
  nginx: 'nginx',
  'nginx-lua': 'nginx + Lua + Redis',
  'node-idempotency': '@node-idempotency/core behind Fastify',
}

const PROTOCOLS: Partial<Record<CandidateName, Protocol>> = {
  'proxy-tls': 'tls',
  'proxy-http2': 'http2',
  'proxy-grpc': 'grpc',
}

/** What its clients speak. */
export function protocolOf(candidate: CandidateName): Protocol {
  return PROTOCOLS[candidate] ?? 'http1'
}

interface Command {
  readonly command: readonly string[]
  readonly cwd: string
}
/** The command that serves on `port`; a string says why it is unavailable here. */
type Starter = (world: World, port: number) => Command | string

const STARTERS: Readonly<Record<CandidateName, Starter>> = {
  'proxy-redis': (world, port) => proxy(world, port, redisOf(world)),
  'proxy-sealed': (world, port) => {
    const file = join(world.folder, `key-${port}`)
    writeFileSync(file, randomBytes(32).toString('hex'))
    return proxy(world, port, redisOf(world), {
      store: `, encryption: { keys: [{ id: bench, file: "${file}" }] }`,
    })
  },
  'proxy-tls': (world, port) => proxy(world, port, redisOf(world), { listen: certificateIn(world, port) }),
  'proxy-http2': (world, port) => proxy(world, port, redisOf(world), { listen: ', http2: true' }),
  'proxy-grpc': (world, port) =>
    proxy(world, port, redisOf(world), { listen: ', http2: true', upstream: ', http2: true' }),
  'proxy-sqlite': (world, port) => proxy(world, port, `sqlite:./bench-${port}.db`),
  'proxy-memory': (world, port) => proxy(world, port, 'memory:'),
  'proxy-postgres': (world, port) =>
    world.postgres === null ? String(NO_POSTGRES) : proxy(world, port, world.postgres.url),
  ...(Object.fromEntries(
    STORE_CANDIDATES.map((name) => [name, (world: World, port: number) => proxyOn(world, port, name)]),
  ) as Record<StoreCandidate, Starter>),
  unprotected: (world, port) => server(world, 'unprotected', port, world.upstreamPort),
  'unprotected-node': (world, port) => server(world, 'unprotected', port, world.upstreamPort, 'node'),
  'http-proxy': (world, port) => server(world, 'http-proxy', port, world.upstreamPort),
  nginx: (world, port) => nginx(world, port, findNginx(), null),
  'nginx-lua': (world, port) => nginx(world, port, findNginxLua(), world.redisPort),
  'node-idempotency': (world, port) =>
    server(world, 'node-idempotency', port, world.upstreamPort, world.redisPort),
}

function proxyOn(world: World, port: number, name: StoreCandidate): Command | string {
  const at = world.stores.get(name) ?? 'it was not requested'
  if (typeof at === 'string') return at
  return proxy(world, port, at.url, { store: at.more === undefined ? '' : `, ${at.more}` })
}

function redisOf({ redisPort }: World): string {
  return `redis://127.0.0.1:${redisPort}`
}

function certificateIn({ folder }: World, port: number): string {
  const [key, cert] = [join(folder, `key-${port}.pem`), join(folder, `cert-${port}.pem`)]
  makeCertificate('IP:127.0.0.1', key, cert)
  return `, tls: { cert: "${cert}", key: "${key}" }`
}

function server(world: World, name: string, ...args: (string | number)[]) {
  const file = fileURLToPath(new URL(`servers/${name}.ts`, import.meta.url))
  return { command: [process.execPath, file, ...args.map(String)], cwd: world.folder }
}

function nginx(world: World, port: number, found: ReturnType<typeof findNginx>, redisPort: number | null) {
  if (typeof found === 'string') return found
  const folder = join(world.folder, `nginx-${port}`)
  const { upstreamPort } = world
  return { command: nginxCommand({ ...found, folder, port, upstreamPort, redisPort }), cwd: world.folder }
}

/** What a candidate's configuration has besides: members of the mappings of those names. */
interface More {
  readonly listen?: string
  readonly upstream?: string
  readonly store?: string
  readonly workers?: number
}

/**
 * The proxy as the image starts it, with all defaults except a store timeout that a busy machine does not reach; this does not
 * change the cost of a request. Only the memory store, whose 64 MiB would fill up within seconds, has another route, which keeps
 * its answers for three seconds.
 */
function proxy(world: World, port: number, store: string, more: More = {}) {
  const { listen = '', upstream = '', workers = 1 } = more
  const file = join(world.folder, `proxy-${port}.yaml`)
  const route = (name: string, path: string) => `{ name: ${name}, match: { methods: [POST], path: "${path}" }`
  const short = store === 'memory:'
  writeFileSync(
    file,
    `listen: { address: "127.0.0.1:${port}"${listen} }
admin: { listen: "127.0.0.1:0" }
upstream: { url: "http://127.0.0.1:${world.upstreamPort}"${short ? ', timeout: 3s' : ''}${upstream} }
service: bench
workers: ${workers}
store: { url: "${store}", timeout: 5s${more.store ?? ''} }
log: { format: json }
routes:
  - ${route('payments', '/v1/payments')} }
  - ${route('large', '/v1/large')} }
  - ${route('json', '/v1/json')}, fingerprint: { body: json } }
  - ${route('keyed', '/v1/keyed')}, key: { from: ["json:/id"] } }
  - ${route('form', '/v1/form')}, key: { from: ["form:id"] } }
  - { name: grpc, match: { grpc: bench.Payments/Create } }
${short ? `  - ${route('short', '/v1/short')}, ttl: 3s }` : ''}
`,
  )
  return { command: proxyCommand(world.dist, ['--config', file]), cwd: world.folder }
}

/** The image's entry point, with the JavaScript built here. */
export function proxyCommand(dist: string, args: readonly string[]): string[] {
  const dockerfile = readFileSync(new URL('../Dockerfile', import.meta.url), 'utf8')
  const [, entry] = [...dockerfile.matchAll(/^ENTRYPOINT (\[.*\])$/gm)].at(-1) ?? []
  if (entry === undefined) throw new Error('the Dockerfile has no ENTRYPOINT')
  const [node, ...rest] = JSON.parse(entry) as string[]
  if (node !== 'node') throw new Error(`the ENTRYPOINT begins with ${node}`)
  return [process.execPath, ...rest.map((word) => word.replace('/app/dist', dist)), ...args]
}

/** Starts a candidate, with additional Node flags; a string says why it is left out. */
export async function startCandidate(
  world: World,
  name: CandidateName,
  nodeFlags: readonly string[] = [],
): Promise<Child | string> {
  const port = await freePort()
  const how = STARTERS[name](world, port)
  return typeof how === 'string' ? how : await spawn(world, port, how, nodeFlags)
}

/** The proxy on a store of its own, with Node flags in addition to the image's. Several workers have as many cores. */
export async function startProxy(
  world: World,
  store: string,
  nodeFlags: readonly string[] = [],
  { workers = 1 }: { readonly workers?: number } = {},
): Promise<Child> {
  const port = await freePort()
  const cores = { ...world.cores, candidate: world.cores.several(workers) }
  return await spawn({ ...world, cores }, port, proxy(world, port, store, { workers }), nodeFlags)
}

function spawn(world: World, port: number, how: Command, nodeFlags: readonly string[]): Promise<Child> {
  const [program = '', ...args] = how.command
  const flags = program === process.execPath ? nodeFlags : []
  return Child.spawn(port, [...world.cores.candidate, program, ...flags, ...args], how.cwd)
}
