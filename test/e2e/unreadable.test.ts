import { randomBytes } from 'node:crypto'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { DatabaseSync } from 'node:sqlite'
import { Redis } from 'ioredis'
import t, { type Test } from 'tap'
import { PREFIX } from '../../src/store/codec.ts'
import { adminYaml, ask, linesOf } from '../support/admin.ts'
import { command } from '../support/commands.ts'
import { gate, newKey, send, tempDir } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { emptyRedis } from '../support/redis.ts'
import { emptyStore, KINDS } from '../support/replicas.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(120_000)

const redis = await emptyRedis(t)

/** Overwrites what the store holds under an id; with SQLite, while no proxy has the file open. */
async function overwrite(url: string, id: string, change: (bytes: Buffer) => Buffer): Promise<void> {
  if (url.startsWith('sqlite:')) {
    using db = new DatabaseSync(url.slice('sqlite:'.length))
    const row = db.prepare('SELECT bytes FROM records WHERE id = ?').get(id) as { bytes: Uint8Array }
    db.prepare('UPDATE records SET bytes = ? WHERE id = ?').run(change(Buffer.from(row.bytes)), id)
    return
  }
  const client = new Redis(url)
  const [name = ''] = await client.keys(`*:r:${id}`)
  await client.set(name, change((await client.getBuffer(name)) as Buffer), 'KEEPTTL')
  client.disconnect()
}

function byteAt(at: number, value: (before: number) => number) {
  return (bytes: Buffer): Buffer => {
    const changed = Buffer.from(bytes)
    const place = at < 0 ? changed.length + at : at
    changed[place] = value(changed[place] as number)
    return changed
  }
}

/** `change`: null where another key is enough. `why`: what the refusal says, with the state in the first bytes. */
const DAMAGES: Readonly<
  Record<string, { change: ((bytes: Buffer) => Buffer) | null; keys?: [string, string]; why: RegExp }>
> = {
  'that is no record at all': {
    change: () => Buffer.from('something else'),
    why: /does not begin with "IP"/,
  },
  'cut off': { change: (bytes) => bytes.subarray(0, 90), why: /cut off.*first bytes say completed/ },
  'of a later format': {
    change: byteAt(PREFIX.schema, () => 2),
    why: /has schema version 2; this version reads 1.*first bytes say completed/,
  },
  'sealed with a key that is gone': {
    change: null,
    keys: ['one', 'two'],
    why: /sealed with the key one; store\.encryption\.keys does not have it.*first bytes say completed/,
  },
  'altered since it was sealed': {
    change: byteAt(-1, (before) => before ^ 1),
    keys: ['one', 'one'],
    why: /does not open with the key one.*first bytes say completed/,
  },
}

async function world(t: Test, url: string) {
  const { opened, open } = gate()
  t.teardown(open)
  const upstream = await upstreamStub(async ({ target }, response) => {
    if (target === '/gated') await opened
    response.writeHead(201).end('{}')
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const dir = tempDir(t)
  const admin = adminYaml(t)
  const audit = join(dir, 'audit.log')
  const yamlWith = (key?: string): string => {
    const file = join(dir, `key-${key}`)
    if (key !== undefined) writeFileSync(file, randomBytes(32), { flag: 'a' })
    const sealed = key === undefined ? '' : `, encryption: { keys: [{ id: ${key}, file: "${file}" }] }`
    return `upstream: { url: "${upstream.url}" }\nservice: test\nstore: { url: "${url}"${sealed} }\naudit: { file: "${audit}" }\ndefaults: { lease: 2s }\n`
  }
  const yamls = new Map<string | undefined, string>()
  const yamlOf = (key?: string): string => {
    if (!yamls.has(key)) yamls.set(key, yamlWith(key))
    return yamls.get(key) as string
  }
  return {
    upstream,
    finish: open,
    audited: () => linesOf(audit).map(({ what, record, before }) => ({ what, record, before })),
    start: async (key?: string): Promise<TestProxy> => {
      const proxy = await proxyInProcess(`${admin}\n${yamlOf(key)}`)
      t.teardown(() => proxy.drain())
      return proxy
    },
    config: (key?: string): readonly string[] => {
      const file = join(dir, `proxy-${key}.yaml`)
      writeFileSync(file, yamlOf(key))
      return ['--config', file]
    },
  }
}

async function idOf(proxy: TestProxy): Promise<string> {
  const { json } = await ask(proxy, '/v1/records')
  return (json['records'] as { id: string }[])[0]?.id as string
}

const remove = (proxy: TestProxy, id: string, tag?: string) =>
  ask(proxy, `/v1/records/${id}`, {
    method: 'DELETE',
    headers: tag === undefined ? {} : { 'if-match': tag },
    body: { reason: 'nobody can read it', by: 'ann' },
  })

for (const kind of KINDS)
  for (const [what, { change, keys, why }] of Object.entries(DAMAGES))
    void t.test(`O04 ${kind}: an operator can delete a record ${what}, and nothing else goes`, async (t) => {
      const url = await emptyStore(t, kind)
      const { upstream, start, config, audited } = await world(t, url)
      const first = await start(keys?.[0])
      const [key, other] = [newKey(), newKey()]
      t.equal((await send(first, key)).status, 201)
      const id = await idOf(first)
      await first.drain()
      if (change !== null) await overwrite(url, id, change)
      const proxy = await start(keys?.[1])
      t.equal((await send(proxy, other)).status, 201)

      t.equal((await send(proxy, key)).code, 'idempotency_store_unavailable')
      const shown = await ask(proxy, `/v1/records/${id}`)
      const tag = shown.headers.get('etag') as string
      t.match(shown.json, { status: 500, code: 'record_unreadable', instance: id, detail: why })
      t.equal(tag, JSON.stringify(String(shown.json['version'])))

      t.equal((await remove(proxy, id)).code, 'version_required')
      const stale = await remove(proxy, id, '"1795242705346"')
      t.match(stale.json, { status: 412, code: 'version_mismatch', version: shown.json['version'] })
      t.equal((await send(proxy, key)).code, 'idempotency_store_unavailable', 'it is still there')
      t.equal(upstream.seen.length, 2)

      // Two operators at once.
      const both = await Promise.all([remove(proxy, id, tag), remove(proxy, id, tag)])
      t.same(
        both.map(({ status }) => status).toSorted((a, b) => a - b),
        [204, 404],
      )
      t.match(audited().filter(({ what }) => what === 'delete')[0], {
        record: id,
        before: { version: shown.json['version'], unreadable: /\S/ },
      })
      t.match(await send(proxy, key), { status: 201, replayed: false })
      t.match(await send(proxy, key), { status: 201, replayed: true })
      t.match(await send(proxy, other), { status: 201, replayed: true }, 'the other record is still there')
      t.equal(upstream.seen.length, 3)

      // The record there now is not the one that was shown.
      t.equal((await remove(proxy, id, tag)).code, 'version_mismatch')
      t.match(await command(['doctor', ...config(keys?.[1])]), { out: /2 records checked/ })
    })

for (const kind of KINDS)
  void t.test(`O04 ${kind}: the delete command shows what it can read, asks, and deletes`, async (t) => {
    const url = await emptyStore(t, kind)
    const { upstream, start, config, audited } = await world(t, url)
    const first = await start('one')
    const key = newKey()
    await send(first, key)
    const id = await idOf(first)
    await first.drain()
    const run = async (answers: string[] | undefined, ...words: string[]) =>
      command(['delete', id, '--reason', 'the key is lost', ...words, ...config('two')], answers)
    const refused = await run(['no'])
    t.match(refused, { code: 1, out: '', err: /not confirmed: nothing was changed\n$/ })
    t.match(
      refused.err,
      /^unreadable: .*sealed with the key one.*first bytes say completed; it is at version \d+\nIt does not show whether/,
    )
    t.match(await run(undefined), { code: 2, err: /no terminal to confirm at/ })
    t.match(await run(['yes'], '--version', '1'), {
      code: 1,
      err: /version_mismatch: it is now at version \d+/,
    })
    t.match(await run(['yes']), { code: 0, out: `${id} is deleted. A retry with its key is executed.\n` })
    t.match(await run(undefined, '--yes'), { code: 1, err: /record_not_found/ })
    t.same(
      audited().map(({ what }) => what),
      ['delete'],
    )
    const proxy = await start('two')
    t.match(await send(proxy, key), { status: 201, replayed: false })
    t.equal(upstream.seen.length, 2)

    // A readable record.
    const readable = await run(['yes'])
    t.match(readable, { code: 0, err: /^POST \/\S*, route default, of .*\ncompleted\nIt WAS executed/ })
    t.match(await send(proxy, key), { replayed: false })
  })

void t.test('O04 redis: a replica with another key refuses to delete a running record', async (t) => {
  const { upstream, start, finish } = await world(t, redis.url)
  const [owner, other] = [await start('one'), await start('two')]
  const key = newKey()
  const running = send(owner, key, { path: '/gated' })
  while (upstream.seen.length === 0) await new Promise(setImmediate)
  const id = await idOf(owner)
  const shown = await ask(other, `/v1/records/${id}`)
  t.match(shown.json, { code: 'record_unreadable', detail: /first bytes say in_progress/ })
  const refused = await remove(other, id, shown.headers.get('etag') as string)
  // The lease may just have been renewed.
  t.ok(['still_running', 'version_mismatch'].includes(refused.code as string), refused.code as string)
  t.ok((await idOf(owner)) === id, 'it is still there, for its owner')
  finish()
  t.equal((await running).status, 201)
  t.equal((await send(other, key, { path: '/gated' })).code, 'idempotency_store_unavailable')
  t.equal(upstream.seen.length, 1)
})

void t.test('O04 a Redis list in place of a record has no version and is not deleted', async (t) => {
  const { start } = await world(t, redis.url)
  const proxy = await start()
  const key = newKey()
  await send(proxy, key)
  const id = await idOf(proxy)
  const [name = ''] = (await redis.command('KEYS', `*:r:${id}`)) as string[]
  await redis.command('DEL', name)
  await redis.command('RPUSH', name, 'a list')
  const shown = await ask(proxy, `/v1/records/${id}`)
  t.match(shown.json, { code: 'record_unreadable', version: undefined })
  t.equal((await remove(proxy, id, '"1"')).code, 'record_unreadable')
  t.equal(await redis.command('TYPE', name), 'list')
})
