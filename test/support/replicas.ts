import { Redis } from 'ioredis'
import root, { type Test } from 'tap'
import { IDENTIFICATION_MARK } from '../../src/store/marks.ts'
import { configFile, type Gate, gate, type Reply, sqliteSnapshot, tempDir, until } from './e2e.ts'
import { type ChildProxy, proxyInProcess, proxyProcess, type TestProxy } from './proxy.ts'
import { SHARED, type SharedKind, type SharedServer, sharedServer } from './shared.ts'
import { type Seen, type UpstreamStub, upstreamStub } from './upstream.ts'

export const STORES = ['memory', 'sqlite', 'redis'] as const
export type StoreKind = (typeof STORES)[number] | 'postgres'

/** A store of its own for the test; for Redis, the given server. */
export function storeUrl(t: Test, kind: (typeof STORES)[number], redis: { readonly url: string }): string {
  const sqlite = `sqlite:${tempDir(t)}/store.db`
  return { memory: 'memory:', sqlite, redis: redis.url }[kind]
}

/** Where tests run whose subject lies above the store: on SQLite, or wherever `STORES` says (scripts/test.ts). */
export const KINDS = (process.env['STORES']?.split(',') ?? ['sqlite']) as StoreKind[]

/** The same for tests of several processes that share a store. */
export const SHARED_KINDS = KINDS.filter((kind): kind is SharedKind => SHARED.some((one) => one === kind))

const servers = new Map<SharedKind, Promise<SharedServer>>()

/** The server of this kind for the whole file, started when it is first needed, and empty. */
export async function emptyServer(kind: SharedKind): Promise<SharedServer> {
  const starting = servers.get(kind) ?? sharedServer(root, kind)
  servers.set(kind, starting)
  const server = await starting
  await server.clear()
  return server
}

/** The URL of an empty store. */
export async function emptyStore(t: Test, kind: StoreKind): Promise<string> {
  if (kind === 'memory') return 'memory:'
  if (kind === 'sqlite') return `sqlite:${tempDir(t)}/store.db`
  return (await emptyServer(kind)).url
}

/** Every record with its expiry; null for a store that cannot be read from outside. */
export async function recordsIn(url: string): Promise<string[] | null> {
  if (url === 'memory:') return null
  if (url.startsWith('sqlite:')) return sqliteSnapshot(url.slice('sqlite:'.length))
  const client = new Redis(url)
  try {
    const all = await client.keys('*:r:*')
    const names = all.filter((name) => !name.endsWith(IDENTIFICATION_MARK)).sort()
    return await Promise.all(
      names.map(
        async (name) =>
          `${name} ${(await client.getBuffer(name))?.toString('hex')} ${await client.pexpiretime(name)}`,
      ),
    )
  } finally {
    client.disconnect()
  }
}

/** Replicas in this process; they end with the test. */
export async function replicas(t: Test, count: number, yaml: string): Promise<TestProxy[]> {
  const started = await Promise.all(Array.from({ length: count }, () => proxyInProcess(yaml)))
  for (const one of started) t.teardown(() => one[Symbol.asyncDispose]())
  return started
}

/** Replicas as separate processes, killed at the end of the test. */
export async function processes(t: Test, count: number, yaml: string): Promise<ChildProxy[]> {
  const file = configFile(tempDir(t), yaml)
  const started = await Promise.all(Array.from({ length: count }, () => proxyProcess(file)))
  for (const one of started) t.teardown(() => one[Symbol.asyncDispose]())
  return started
}

/** Response of the upstream to one execution; a 201 by default. */
export interface Execution {
  readonly status?: number
  readonly headers?: Readonly<Record<string, string>>
  readonly body?: string
  /** The connection breaks instead. */
  readonly cut?: boolean
}

export interface HeldUpstream extends UpstreamStub {
  /** Lets the n-th execution (from 1) finish. */
  finish(n: number): void
}

/** An upstream that holds each request until told to finish it, but answers `/fast…` at once. */
export async function heldUpstream(
  t: Test,
  answer: (n: number, seen: Seen) => Execution = () => ({}),
): Promise<HeldUpstream> {
  const gates = new Map<number, Gate>()
  const gateOf = (n: number): Gate => {
    const found = gates.get(n) ?? gate()
    gates.set(n, found)
    return found
  }
  let executions = 0
  const stub = await upstreamStub(async (seen, response) => {
    const n = ++executions
    if (!seen.target.includes('/fast')) await gateOf(n).opened
    const { status = 201, headers = {}, body = `execution ${n}`, cut = false } = answer(n, seen)
    if (cut) response.destroy()
    else
      response
        .writeHead(status, { 'Content-Type': 'text/plain', 'X-Execution': String(n), ...headers })
        .end(body)
  })
  t.teardown(() => stub[Symbol.asyncDispose]())
  return { ...stub, finish: (n) => gateOf(n).open() }
}

/** An upstream whose every response is different. */
export async function countingUpstream(t: Test): Promise<UpstreamStub> {
  let n = 0
  const stub = await upstreamStub((_seen, response) => {
    response.writeHead(201, { 'X-Execution': String(++n) }).end(`execution ${n}`)
  })
  t.teardown(() => stub[Symbol.asyncDispose]())
  return stub
}

/** Resolves when these replicas together hold that many duplicates. */
export async function waitersAre(proxies: readonly TestProxy[], count: number): Promise<void> {
  await until(async () => {
    const held = await Promise.all(proxies.map((proxy) => proxy.metric('idempotency_waiters')))
    return held.reduce((sum, one) => sum + one, 0) === count
  })
}

/** The part of a response that replays must repeat: everything but the marker and the connection headers. */
export function essenceOf({ status, headers, body }: Reply): unknown {
  const own = ['idempotent-replayed', 'connection', 'keep-alive']
  return { status, headers: [...headers].filter(([name]) => !own.includes(name)), body }
}

/** Status and `code` of the proxy's own responses. */
export function refusalOf({ status, code }: Reply): [number, string | null] {
  return [status, code]
}
