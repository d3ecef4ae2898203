import { DatabaseSync } from 'node:sqlite'
import { Redis } from 'ioredis'
import type { Test } from 'tap'
import { configFile, type Gate, gate, type Reply, tempDir, until } from './e2e.ts'
import { type ChildProxy, proxyInProcess, proxyProcess, type TestProxy } from './proxy.ts'
import type { RedisServer } from './redis.ts'
import { type Seen, type UpstreamStub, upstreamStub } from './upstream.ts'

export const STORES = ['memory', 'sqlite', 'redis'] as const

/** A store of its own for the test; that of `redis` is the whole server. */
export function storeUrl(t: Test, kind: (typeof STORES)[number], redis: RedisServer): string {
  return { memory: 'memory:', sqlite: `sqlite:${tempDir(t)}/store.db`, redis: redis.url }[kind]
}

/** Every record there is, with its expiry; null where nobody outside sees it. */
export async function recordsIn(url: string): Promise<string[] | null> {
  if (url === 'memory:') return null
  if (url.startsWith('sqlite:')) {
    const db = new DatabaseSync(url.slice('sqlite:'.length), { readOnly: true })
    try {
      const rows = db.prepare('SELECT id, due, drop_at, hex(bytes) AS bytes FROM records ORDER BY id').all()
      return rows.map((row) => Object.values(row).join(' '))
    } finally {
      db.close()
    }
  }
  const client = new Redis(url)
  try {
    const names = (await client.keys('*:r:*')).sort()
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

/** Replicas in this process, ended with the test. */
export async function replicas(t: Test, count: number, yaml: string): Promise<TestProxy[]> {
  const started = await Promise.all(Array.from({ length: count }, () => proxyInProcess(yaml)))
  for (const one of started) t.teardown(() => one[Symbol.asyncDispose]())
  return started
}

/** Replicas as processes of their own, killed with the test. */
export async function processes(t: Test, count: number, yaml: string): Promise<ChildProxy[]> {
  const file = configFile(tempDir(t), yaml)
  const started = await Promise.all(Array.from({ length: count }, () => proxyProcess(file)))
  for (const one of started) t.teardown(() => one[Symbol.asyncDispose]())
  return started
}

/** What the upstream answers to one execution; by default a 201. */
export interface Execution {
  readonly status?: number
  readonly headers?: Readonly<Record<string, string>>
  readonly body?: string
}

export interface HeldUpstream extends UpstreamStub {
  /** Lets the n-th execution (from 1) answer. */
  finish(n: number): void
}

/** An upstream that holds each request until it is told to finish it; `/fast…` it answers at once. */
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
    const { status = 201, headers = {}, body = `execution ${n}` } = answer(n, seen)
    response
      .writeHead(status, { 'Content-Type': 'text/plain', 'X-Execution': String(n), ...headers })
      .end(body)
  })
  t.teardown(() => stub[Symbol.asyncDispose]())
  return { ...stub, finish: (n) => gateOf(n).open() }
}

/** Resolves when so many duplicates are held, on all of these replicas together. */
export async function waitersAre(proxies: readonly TestProxy[], count: number): Promise<void> {
  await until(async () => {
    const held = await Promise.all(proxies.map((proxy) => proxy.metric('idempotency_waiters')))
    return held.reduce((sum, one) => sum + one, 0) === count
  })
}

/** What must be equal in a first answer and its replays: everything but the marker and the connection's own lines. */
export function essenceOf({ status, headers, body }: Reply): unknown {
  const own = ['idempotent-replayed', 'connection', 'keep-alive']
  return { status, headers: [...headers].filter(([name]) => !own.includes(name)), body }
}

/** Status and code, of the proxy's own answers. */
export function refusalOf({ status, code }: Reply): [number, string | null] {
  return [status, code]
}
