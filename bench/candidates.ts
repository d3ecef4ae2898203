import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { freePort } from '../test/support/redis.ts'
import { Child } from './child.ts'
import type { Cores } from './machine.ts'
import { findNginx, findNginxLua, nginxCommand } from './nginx.ts'

export interface World {
  /** A folder for everything that is written. */
  readonly folder: string
  /** The built JavaScript. */
  readonly dist: string
  readonly cores: Cores
  readonly upstreamPort: number
  readonly redisPort: number
}

export const CANDIDATES = [
  'proxy-redis',
  'proxy-sqlite',
  'proxy-memory',
  'unprotected',
  'http-proxy',
  'nginx',
  'nginx-lua',
  'node-idempotency',
] as const
export type CandidateName = (typeof CANDIDATES)[number]

export const TITLES: Readonly<Record<CandidateName, string>> = {
  'proxy-redis': '**this proxy**, Redis',
  'proxy-sqlite': '**this proxy**, SQLite (default)',
  'proxy-memory': '**this proxy**, memory',
  unprotected: 'its own unprotected, buffered POST',
  'http-proxy': 'plain @fastify/http-proxy',
  nginx: 'nginx',
  'nginx-lua': 'nginx + Lua + Redis',
  'node-idempotency': '@node-idempotency/core behind Fastify',
}

/** The command that serves on `port`; a string says why it cannot be had here. */
type Starter = (world: World, port: number) => { command: string[]; cwd: string } | string

const STARTERS: Readonly<Record<CandidateName, Starter>> = {
  'proxy-redis': (world, port) => proxy(world, port, `redis://127.0.0.1:${world.redisPort}`),
  'proxy-sqlite': (world, port) => proxy(world, port, `sqlite:./bench-${port}.db`),
  'proxy-memory': (world, port) => proxy(world, port, 'memory:'),
  unprotected: (world, port) => server(world, 'unprotected', port, world.upstreamPort, world.dist),
  'http-proxy': (world, port) => server(world, 'http-proxy', port, world.upstreamPort),
  nginx: (world, port) => nginx(world, port, findNginx(), null),
  'nginx-lua': (world, port) => nginx(world, port, findNginxLua(), world.redisPort),
  'node-idempotency': (world, port) =>
    server(world, 'node-idempotency', port, world.upstreamPort, world.redisPort),
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

/**
 * The proxy as the image starts it, defaults and all, but for a store timeout that a busy machine does not reach, which
 * changes nothing of what a request costs. Only the memory store, whose 64 MiB would be full of day-old
 * records after some seconds, has another route, which keeps its answers for three.
 */
function proxy(world: World, port: number, store: string) {
  const file = join(world.folder, `proxy-${port}.yaml`)
  const route = (name: string, path: string) => `{ name: ${name}, match: { methods: [POST], path: "${path}" }`
  const short = store === 'memory:'
  writeFileSync(
    file,
    `listen: 127.0.0.1:${port}
admin: { listen: "127.0.0.1:0" }
upstream: { url: "http://127.0.0.1:${world.upstreamPort}"${short ? ', timeout: 3s' : ''} }
service: bench
store: { url: "${store}", timeout: 5s }
log: { format: json }
routes:
  - ${route('payments', '/v1/payments')} }
  - ${route('large', '/v1/large')} }
  - ${route('json', '/v1/json')}, fingerprint: { body: json } }
${short ? `  - ${route('short', '/v1/short')}, ttl: 3s }` : ''}
`,
  )
  return { command: proxyCommand(world.dist, ['--config', file]), cwd: world.folder }
}

/** The image's entry point with the built JavaScript here in the place of the image's. */
export function proxyCommand(dist: string, args: readonly string[]): string[] {
  const dockerfile = readFileSync(new URL('../Dockerfile', import.meta.url), 'utf8')
  const [, entry] = [...dockerfile.matchAll(/^ENTRYPOINT (\[.*\])$/gm)].at(-1) ?? []
  if (entry === undefined) throw new Error('the Dockerfile has no ENTRYPOINT')
  const [node, ...rest] = JSON.parse(entry) as string[]
  if (node !== 'node') throw new Error(`the ENTRYPOINT begins with ${node}`)
  return [process.execPath, ...rest.map((word) => word.replace('/app/dist', dist)), ...args]
}

/** Starts a candidate; a string says why it is left out. */
export async function startCandidate(world: World, name: CandidateName): Promise<Child | string> {
  const port = await freePort()
  const how = STARTERS[name](world, port)
  return typeof how === 'string'
    ? how
    : await Child.spawn(port, [...world.cores.candidate, ...how.command], how.cwd)
}

/** The proxy on a store of its own, with these flags of Node besides those of the image. */
export async function startProxy(
  world: World,
  store: string,
  nodeFlags: readonly string[] = [],
): Promise<Child> {
  const port = await freePort()
  const { command, cwd } = proxy(world, port, store)
  const [node = '', ...rest] = command
  return await Child.spawn(port, [...world.cores.candidate, node, ...nodeFlags, ...rest], cwd)
}
