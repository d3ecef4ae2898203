import { randomBytes } from 'node:crypto'
import { existsSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { DatabaseSync } from 'node:sqlite'
import { Redis } from 'ioredis'
import t, { type Test } from 'tap'
import type { SealingKey } from '../../src/config/config.ts'
import type { RecordId } from '../../src/core/record.ts'
import { PAGE } from '../../src/store/moving/copying.ts'
import { openStore } from '../../src/store/open.ts'
import { sealingKeyOf } from '../../src/store/record/codec.ts'
import type { Store } from '../../src/store/register.ts'
import { bytesOf, HOUR, MINUTE, newId, newToken, PLAIN_STORE, SPANS } from '../store/fixtures.ts'
import { command, type Said } from '../support/commands.ts'
import { tempDir } from '../support/e2e.ts'
import { emptyRedis, freePort } from '../support/redis.ts'

t.setTimeout(300_000)

const redis = await emptyRedis(t)
const operator = new Redis(redis.port, '127.0.0.1').on('error', () => {})
t.teardown(() => operator.disconnect())
await operator.ping()
const OURS = ['--service', 'pay']

const sqlite = (t: Test): string => `sqlite:${tempDir(t)}/records.db`

async function opened(t: Test, url: string, service = 'pay', keys: SealingKey[] = []): Promise<Store> {
  const settings = { ...PLAIN_STORE, url, timeout: 10_000, encryption: { keys } }
  const store = await openStore({ service, store: settings }, { onEvent() {}, onBreaker() {} })
  t.teardown(() => store.close())
  return store
}

/** A store with completed records: another database of the Redis, or a SQLite file, which lists them by id. */
async function filled(
  t: Test,
  count: number,
  url = `${redis.url}/1`,
): Promise<{ url: string; store: Store; ids: RecordId[] }> {
  const store = await opened(t, url)
  const ids = Array.from({ length: count }, newId)
  await Promise.all(ids.map(async (id) => store.put(id, bytesOf('completed', newToken()), SPANS)))
  return { url, store, ids }
}

async function idsIn(store: Store): Promise<Set<RecordId>> {
  const ids = new Set<RecordId>()
  let cursor: string | null = null
  do {
    const page = await store.list('all', cursor, 1000)
    for (const id of page.ids) ids.add(id)
    cursor = page.next
  } while (cursor !== null)
  return ids
}

function counts(out: string): Record<string, number | string | null> {
  return JSON.parse(out) as Record<string, number | string | null>
}

void t.test('bad arguments are refused, and no file is created', async (t) => {
  const dir = tempDir(t)
  const config = (name: string, more: string): string => {
    writeFileSync(join(dir, name), `upstream: { url: "http://127.0.0.1:1" }\n${more}\n`)
    return join(dir, name)
  }
  const secret = join(dir, 'secret')
  writeFileSync(secret, 'x'.repeat(64))
  const pay = config('pay.yaml', `service: pay\nstore: { url: "${redis.url}" }`)
  const buy = config('buy.yaml', `service: buy\nstore: { url: "sqlite:${dir}/buy.db" }`)
  const keyed = config(
    'keyed.yaml',
    `service: pay\nstore: { url: "sqlite:${dir}/k.db", secretFile: ${secret} }`,
  )
  const memory = config('memory.yaml', 'service: pay\nstore: { url: "memory:" }')
  const file = `sqlite:${dir}/none.db`
  const twin = redis.url.replace('127.0.0.1', 'localhost')
  const cases: [string, RegExp][] = [
    ['', /copy needs --from STORE and --to STORE/],
    [`--from ${file}`, /copy needs --from STORE and --to STORE/],
    [
      `--from ${file} --to ${redis.url}`,
      /--service NAME is required: several services may share these stores/,
    ],
    [
      `--from ${redis.url} --to ${file}`,
      /--service NAME is required: several services may share these stores/,
    ],
    [
      `--from ${pay} --to ${buy}`,
      /found the services "pay" and "buy"; allowed: one, since every record id depends/,
    ],
    [`--from ${pay} --to ${file} --service buy`, /found the services "buy" and "pay"; allowed: one/],
    [
      `--from ${pay} --to ${keyed}`,
      /found two secrets \(store.secretFile\); allowed: one, since every record id/,
    ],
    [
      `--from ${memory} --to ${pay}`,
      /found memory:, which only its own process can see; allowed: any other store/,
    ],
    [`--from ${file} --to memory:`, /found memory:, which only its own process can see/],
    [`--from ${file} --to ${pay} --rate fast`, /--rate: found "fast"; allowed: .*per s, m, h or d/],
    [
      `--from ${file} --to ${pay} --cursor 12`,
      /--cursor: found "12"; allowed: the record id that an earlier/,
    ],
    [`--from ${file} --to ${pay} --rat x`, /unknown option --rat; did you mean --rate\?/],
    [`x --from ${file} --to ${pay}`, /copy takes no argument, found 1: x/],
    [`--from ${redis.url} --to ${twin} ${OURS.join(' ')}`, / are the same\n/],
  ]
  for (const [words, says] of cases) {
    const { code, out, err } = await command(['copy', ...words.split(' ').filter(Boolean)])
    t.strictSame([code, out], [2, ''], words)
    t.match(err, says)
  }
  const none = await command(['copy', '--from', file, '--to', pay])
  t.match(none, { code: 1, out: '', err: /there is no file at .*none\.db/ })
  const bad = await command(['copy', '--from', join(dir, 'none.yaml'), '--to', pay])
  t.match(bad, { code: 1, out: '', err: /none\.yaml/ })
  t.notOk(existsSync(join(dir, 'none.db')))
})

void t.test('an error names the store that cannot be used, without its password', async (t) => {
  const { url } = await filled(t, 3)
  const port = await freePort()
  const down = await command(['copy', '--from', url, '--to', `redis://user:hush@127.0.0.1:${port}`, ...OURS])
  t.match(down, { code: 1, out: '', err: /: the store redis:\/\/\*\*\*@127.0.0.1:\d+: .*ECONNREFUSED/ })
  t.notMatch(down.err, /hush/)
  const later = join(tempDir(t), 'later.db')
  const db = new DatabaseSync(later)
  db.exec('CREATE TABLE records (id TEXT); PRAGMA user_version = 99')
  db.close()
  t.match(await command(['copy', '--from', url, '--to', `sqlite:${later}`, ...OURS]), {
    code: 1,
    out: '',
    err: /later\.db: it has schema version 99, of a later release; this one reads \d/,
  })
})

void t.test('copy copies all records of one service, and a second run changes nothing', async (t) => {
  const { url, store, ids } = await filled(t, 60)
  const ways = ['--from', url, '--to', redis.url, ...OURS]
  const other = await opened(t, url, 'buy')
  await other.put(newId(), bytesOf('completed', newToken()), SPANS)

  const dry = await command(['copy', ...ways, '--dry-run'])
  t.match(dry, { code: 0, out: '60  to copy\nnothing was written: this was a dry run\n' })
  t.equal(await redis.command('DBSIZE'), 0)
  t.match(await command(['copy', ...ways]), {
    code: 0,
    out: '60  copied\n',
    err: /^copying from the store redis:/,
  })
  const target = await opened(t, redis.url)
  t.strictSame(await idsIn(target), new Set(ids), 'only the records of the service')
  const before = await Promise.all(ids.map(async (id) => (await target.get(id)).bytes?.toString('hex')))
  t.match(await command(['copy', ...ways]), { code: 0, out: /^0 +copied\n60 +already there\n$/ })
  const after = await Promise.all(ids.map(async (id) => (await target.get(id)).bytes?.toString('hex')))
  t.strictSame(after, before)

  const [first = newId(), second = newId()] = ids
  for (const id of [first, second]) {
    await forget(target, id)
  }
  await target.put(first, bytesOf('completed', newToken()), SPANS)
  const more = await command(['copy', ...ways, '--json'])
  t.equal(more.code, 1)
  t.match(counts(more.out), { copied: 1, there: 58, different: 1, next: null })
  t.match(more.err, `different there, left unchanged: ${first}\n`)
  const gone = await store.get(second)
  t.ok(gone.bytes !== null, 'nothing is removed from the source')
})

void t.test('sealed records are copied sealed, and only to a target with their key', async (t) => {
  const dir = tempDir(t)
  const key = (id: string) => ({ id, key: randomBytes(32), file: join(dir, id) })
  const [first, second] = [key('k1'), key('k2')]
  for (const { file, key: bytes } of [first, second]) writeFileSync(file, bytes)
  const config = (name: string, url: string, keys: readonly { id: string; file: string }[]): string => {
    const listed = keys.map(({ id, file }) => `{ id: ${id}, file: "${file}" }`).join(', ')
    const encryption = keys.length === 0 ? '' : `, encryption: { keys: [${listed}] }`
    const file = join(dir, `${name}.yaml`)
    const store = `{ url: "${url}", compression: gzip${encryption} }`
    writeFileSync(file, `service: pay\nupstream: { url: "http://127.0.0.1:1" }\nstore: ${store}\n`)
    return file
  }
  const url = `sqlite:${dir}/sealed.db`
  const source = await opened(t, url, 'pay', [first])
  const id = newId()
  await source.put(id, bytesOf('completed', newToken()), SPANS)
  await source.history.append(id, [{ tag: 'a:b', count: 1, firstAgo: 0, lastAgo: 0, text: '{"x":1}' }])
  const from = config('from', url, [first])
  for (const [name, keys] of [
    ['none', []],
    ['second', [second]],
    ['another', [{ ...first, file: second.file }]],
  ] as const) {
    const said = await command(['copy', '--from', from, '--to', config(name, redis.url, keys)])
    t.match(said, { code: 2, err: /the key "k1" of --from is not in --to \(store.encryption.keys\)/ }, name)
  }
  const to = config('to', redis.url, [second, first])
  t.match(await command(['copy', '--from', from, '--to', to]), { code: 0, out: '1  copied\n' })
  const [plain, sealed, target] = [
    await opened(t, url),
    await opened(t, redis.url),
    await opened(t, redis.url, 'pay', [second, first]),
  ]
  const rest = async (store: Store) => (await store.get(id)).bytes?.subarray(56)
  t.strictSame(await rest(sealed), await rest(plain), 'not unsealed on the way')
  t.equal(sealingKeyOf((await sealed.get(id)).bytes ?? Buffer.alloc(0)), 'k1')
  t.strictSame(await rest(target), await rest(source))
  t.match(await target.history.read(id), [{ text: '{"x":1}' }])
  t.match(await command(['copy', '--from', from, '--to', to]), { code: 0, out: /1 +already there\n$/ })
})

void t.test('a dry run creates no file, and copy fails for a service that has no records', async (t) => {
  const { url } = await filled(t, 2)
  const target = join(tempDir(t), 'new.db')
  const ways = ['--from', url, '--to', `sqlite:${target}`, ...OURS]
  t.match(await command(['copy', ...ways, '--dry-run']), { code: 0, out: /^2 +to copy\nnothing was written/ })
  t.notOk(existsSync(target))
  t.match(await command(['copy', ...ways]), { code: 0, out: '2  copied\n' })
  t.match(await command(['copy', '--from', url, '--to', redis.url, '--service', 'payments']), {
    code: 1,
    out: '0  copied\n',
    err: /the store redis:.* has no record of the service "payments"; is that its name\?/,
  })
})

void t.test('a terminal gets a progress bar', async (t) => {
  const { url } = await filled(t, 20)
  const ways = ['--from', url, '--to', redis.url, ...OURS]
  const { code, out, err } = await command(['copy', ...ways], undefined, {}, true)
  t.strictSame([code, out], [0, '20  copied\n'])
  t.ok(err.endsWith(`\r[${'#'.repeat(30)}] 100 %  20 records\x1b[K\n`))
})

void t.test('copy refuses to start while a request is in progress, except --completed-only', async (t) => {
  const { url, store } = await filled(t, 3)
  const ways = ['--from', url, '--to', redis.url, ...OURS]
  const running = newId()
  const token = newToken()
  await store.put(running, bytesOf('in_progress', token), SPANS)
  await store.put(newId(), bytesOf('unknown', newToken()), SPANS)
  await store.put(newId(), bytesOf('failed_retryable', newToken()), SPANS)
  const refused = await command(['copy', ...ways])
  t.strictSame([refused.code, refused.out], [1, ''])
  t.match(
    refused.err,
    new RegExp(
      `: a request is in progress \\(record ${running}, for \\d+[mh] more if its proxy was killed\\)\\. Stop `,
    ),
  )
  t.equal(await redis.command('DBSIZE'), 0)
  t.match(await command(['copy', ...ways, '--completed-only']), {
    code: 0,
    out: /^3 +copied\n3 +skipped, not completed\n$/,
  })
  const lapsed = { dueIn: -MINUTE, dropIn: HOUR }
  await store.swap(running, { token, states: ['in_progress'] }, bytesOf('in_progress', token), lapsed, false)
  const rest = await command(['copy', ...ways])
  t.match(rest, { code: 0, out: /^3 +copied\n3 +already there\n$/ })
})

/** Runs copy; `act` runs at the moment at which it has come to the record `mark`, which is another one there. */
async function interrupted(
  ways: readonly string[],
  to: Store,
  mark: RecordId,
  act: () => unknown,
): Promise<Said> {
  await to.put(mark, bytesOf('completed', newToken()), SPANS)
  let acted = 0
  let acting: unknown
  const said = await command(['copy', ...ways, '--json'], undefined, {}, false, (text) => {
    if (text.includes(mark) && acted++ === 0) acting = act()
  })
  // What has been sent late must not meet the next step.
  await acting
  if (acted !== 1 || said.code !== 1) throw new Error(`${acted} times, exit ${said.code}: ${said.err}`)
  return said
}

async function forget(store: Store, id: RecordId): Promise<void> {
  await store.remove(id, (await store.get(id)).bytes?.readUIntBE(4, 6) ?? 0)
}

/** Redis does this before it answers what copy asks next. */
async function firstOfAll(...commands: readonly [name: string, ...args: string[]][]): Promise<void> {
  redis.pause()
  const done = Promise.all(commands.map(async ([name, ...args]) => operator.call(name, args)))
  for (let turn = 0; turn < 3; turn++) await new Promise(setImmediate)
  redis.resume()
  await done
}

void t.test('copy to a full target, or one that SIGINT ends, says where to continue', async (t) => {
  const { url, ids } = await filled(t, PAGE + 200, sqlite(t))
  const ways = ['--from', url, '--to', redis.url, ...OURS]
  const mark = ids.toSorted()[PAGE + 20] as RecordId
  for (const [why, act] of [
    [/: the store redis:\/\/127.0.0.1:\d+\S*: .*OOM/, () => firstOfAll(['CONFIG', 'SET', 'maxmemory', '1'])],
    [/: interrupted/, () => process.emit('SIGINT')],
  ] as const) {
    await redis.command('FLUSHALL')
    const target = await opened(t, redis.url)
    const { out, err } = await interrupted(ways, target, mark, act)
    t.match(err, why)
    const { next } = counts(out)
    t.equal(next, ids.toSorted()[PAGE - 1], 'where the last complete page ended')
    t.match(err, new RegExp(`; run it again; or only the rest, with --cursor ${next}\\n$`))
    if (err.includes('OOM'))
      t.match(
        await command(['copy', ...ways]),
        { code: 1, out: '', err: /OOM/ },
        'a new run does not start either',
      )
    await redis.command('CONFIG', 'SET', 'maxmemory', '0')
    await forget(target, mark)
    t.match(await command(['copy', ...ways, '--cursor', `${next}`]), { code: 0 })
    t.strictSame(await idsIn(target), new Set(ids))
  }
})

void t.test('after its target or its source went away, copy has to start from the beginning', async (t) => {
  const { url, ids } = await filled(t, PAGE + 200, sqlite(t))
  const there = ['--from', url, '--to', redis.url, ...OURS]
  const mark = ids.toSorted()[PAGE + 20] as RecordId
  const again = { code: 1, err: /; run it again\n$/ }
  for (const act of [
    () => redis.kill(),
    () => firstOfAll(['CLIENT', 'KILL', 'TYPE', 'normal'], ['FLUSHALL']),
  ]) {
    const lost = await interrupted(there, await opened(t, redis.url), mark, act)
    t.match(lost, again)
    t.equal(counts(lost.out).next, null)
    await redis.start()
    // It connects again in its own time, and what it sends before that is not the first of all.
    await operator.ping()
    await redis.command('FLUSHALL')
  }
  t.match(await command(['copy', ...there]), { code: 0 })

  const file = sqlite(t)
  const back = ['--from', redis.url, '--to', file, ...OURS]
  const [first] = (await (await opened(t, redis.url)).list('all', null, PAGE)).ids
  const disconnect = () => firstOfAll(['CLIENT', 'KILL', 'TYPE', 'normal'])
  const target = await opened(t, file)
  const lost = await interrupted(back, target, first as RecordId, disconnect)
  await forget(target, first as RecordId)
  t.match(lost, again)
  t.equal(counts(lost.out).next, null)
  t.match(await command(['copy', ...back]), { code: 0, out: /already there\n$/ })
  t.strictSame(await idsIn(target), new Set(ids))
})

void t.test('copy fails if the source is written to meanwhile', async (t) => {
  const { url, store, ids } = await filled(t, 40)
  const [mark, last] = (await store.list('all', null, PAGE)).ids as [RecordId, RecordId]
  t.equal(ids.length, 40)
  // A proxy that still runs: it executes one of them again, once it has expired, and another key.
  const version = (await store.get(last)).bytes?.readUIntBE(4, 6) ?? 0
  const said = await interrupted(
    ['--from', url, '--to', redis.url, ...OURS],
    await opened(t, redis.url),
    mark,
    () => {
      void store.swap(last, { version }, bytesOf('completed', newToken()), SPANS, false)
      void store.put(newId(), bytesOf('in_progress', newToken()), SPANS)
    },
  )
  t.match(said.err, /the store redis:.* was written to meanwhile: stop its proxies; run it again\n$/)
})
