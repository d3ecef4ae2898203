import { randomUUID } from 'node:crypto'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { DatabaseSync } from 'node:sqlite'
import { setTimeout as wait } from 'node:timers/promises'
import { Redis } from 'ioredis'
import type { Test } from 'tap'
import { IDENTIFICATION_MARK, UPSTREAM_MARK } from '../../src/store/marks.ts'
import { Journal } from '../../src/store/sqlite/journal.ts'
import type { RedisServer } from './redis.ts'
import { headed } from './service.ts'

/** An answer as a client of the proxy sees it. */
export interface Reply {
  readonly status: number
  readonly headers: Headers
  readonly body: string
  /** `code` of the proxy's own responses. */
  readonly code: string | null
  readonly replayed: boolean
}

export interface Ask {
  readonly method?: string
  readonly path?: string
  readonly body?: string | Buffer<ArrayBuffer> | null
  readonly headers?: Readonly<Record<string, string>>
}

/** Sends one POST with a key; the default is always the same request. */
export async function send(
  proxy: { readonly url: string },
  key: string | null,
  ask: Ask = {},
): Promise<Reply> {
  const { method = 'POST', path = '/pay', body = '{"amount":1}', headers = {} } = ask
  const response = await fetch(`${proxy.url}${path}`, {
    method,
    redirect: 'manual',
    headers: {
      authorization: 'Bearer alice',
      ...(body === null ? {} : { 'content-type': 'application/json' }),
      ...(key === null ? {} : { 'idempotency-key': key }),
      ...headers,
    },
    body,
  })
  const text = await response.text()
  const own = response.headers.get('content-type') === 'application/problem+json'
  return {
    status: response.status,
    headers: response.headers,
    body: text,
    code: own ? (JSON.parse(text) as { code: string }).code : null,
    replayed: response.headers.get('idempotent-replayed') === 'true',
  }
}

/** A key that every profile accepts. */
export function newKey(): string {
  return randomUUID()
}

export function tempDir(t: Test): string {
  const dir = mkdtempSync(join(tmpdir(), 'proxy-'))
  t.teardown(() => rmSync(dir, { recursive: true, force: true }))
  return dir
}

let files = 0

/** Writes a configuration file for a process. */
export function configFile(dir: string, yaml: string): string {
  const file = join(dir, `config-${++files}.yaml`)
  writeFileSync(file, headed(yaml))
  return file
}

/** Polls until the condition holds, for states that no event announces; less and less often, as asking costs more than waiting. */
export async function until(condition: () => boolean | Promise<boolean>): Promise<void> {
  for (let pause = 5; !(await condition()); pause = Math.min(pause * 2, 100)) await wait(pause)
}

export interface Gate {
  readonly opened: Promise<void>
  open(): void
}

/** A gate that the test opens. */
export function gate(): Gate {
  const { promise, resolve } = Promise.withResolvers<void>()
  return { opened: promise, open: resolve }
}

/** Everything in the database except histories, which arrive late, and the mark of live replicas: the bytes and expiry of every record, and every index. */
export async function redisSnapshot(server: RedisServer): Promise<Map<string, string>> {
  const client = new Redis(server.port, '127.0.0.1')
  try {
    const found = new Map<string, string>()
    for (const key of (await client.keys('*')).sort()) {
      if (key.includes(':h:') || key.endsWith(IDENTIFICATION_MARK)) continue
      const value = key.includes(':r:')
        ? `${(await client.getBuffer(key))?.toString('latin1')} ${await client.pexpiretime(key)}`
        : (await client.zrange(key, 0, '-1', 'WITHSCORES')).join(' ')
      found.set(key, value)
    }
    return found
  } finally {
    client.disconnect()
  }
}

/** The only record of the database. */
export async function onlyRecord(
  server: RedisServer,
): Promise<{ readonly key: string; readonly bytes: Buffer }> {
  const client = new Redis(server.port, '127.0.0.1')
  try {
    const all = await client.keys('idempotency:*:r:*')
    const keys = all.filter((key) => !key.endsWith(IDENTIFICATION_MARK))
    if (keys.length !== 1) throw new Error(`${keys.length} records where one was expected`)
    const key = keys[0] as string
    return { key, bytes: (await client.getBuffer(key)) as Buffer }
  } finally {
    client.disconnect()
  }
}

/** Every record of an embedded store, by id. */
export function sqliteSnapshot(file: string): string[] {
  const db = new DatabaseSync(file, { readOnly: true })
  try {
    const found = new Map<string, string>()
    for (const { id, bytes } of db.prepare('SELECT id, hex(bytes) AS bytes FROM records').all())
      found.set(id as string, bytes as string)
    for (const { service } of db.prepare('SELECT DISTINCT service FROM journal').all()) {
      const journal = new Journal(db, service as string)
      journal.refresh()
      for (const [id, bytes] of journal.records()) found.set(id, bytes.toString('hex').toUpperCase())
    }
    found.delete(UPSTREAM_MARK)
    return [...found].map(([id, bytes]) => `${id} ${bytes}`).toSorted()
  } finally {
    db.close()
  }
}

/** Fourth byte of a stored record (docs/record-format.md). */
export const STATE = { in_progress: 1, completed: 2, failed_retryable: 3, unknown: 4 } as const

export function stateOf(bytes: Buffer): number {
  return bytes[3] as number
}
