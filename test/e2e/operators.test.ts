import { randomBytes } from 'node:crypto'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { type RecordId } from '../../src/core/record.ts'
import { outcomeDraft } from '../../src/core/settle.ts'
import { openStore } from '../../src/store/open.ts'
import { orThrow, Records } from '../../src/store/records.ts'
import { jwksServer, pair, token } from '../credentials/support.ts'
import { draft, HOUR, newToken, PLAIN_STORE, response } from '../store/fixtures.ts'
import { adminYaml, ask, fullOf, linesOf, recordOf } from '../support/admin.ts'
import { command } from '../support/commands.ts'
import { type Ask, gate, newKey, send, tempDir } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { emptyRedis } from '../support/redis.ts'
import { emptyStore, KINDS, type StoreKind } from '../support/replicas.ts'
import { SERVICE } from '../support/service.ts'
import { upstreamStub, valueOf } from '../support/upstream.ts'

t.setTimeout(600_000)

const COMPLETED = { outcome: 'completed', response: { status: 200, body: 'by hand' } } as const
const RETRYABLE = { outcome: 'retryable' } as const

/** An operator's decision and the owner's late completion at the same moment, on one store. */
async function race(t: Test, kind: StoreKind): Promise<void> {
  const url = await emptyStore(t, kind)
  const audit = join(tempDir(t), 'audit.log')
  await using proxy = await proxyInProcess(`${adminYaml(t)}
audit: { file: ${audit} }
upstream: { url: "http://127.0.0.1:9" }
store: { url: "${url}" }`)
  const store = { ...PLAIN_STORE, url }
  const service = kind === 'sqlite' ? 'default' : SERVICE
  const register = await openStore({ service, store }, { onEvent: () => {}, onBreaker: () => {} })
  t.teardown(() => register.close())
  const records = new Records(register)
  const won = { operator: 0, owner: 0 }
  for (let n = 0; n < 60; n++) {
    const token = newToken()
    const id = newToken().toString('hex').padEnd(43, 'A') as RecordId
    const body = n % 2 === 0 ? COMPLETED : RETRYABLE
    const claimed = draft('in_progress', token)
    const claim = await records.claim(id, claimed, { dueIn: 0, dropIn: HOUR })
    if (claim.kind !== 'claimed') throw new Error('claimed before')
    const headers = { 'if-match': `"${claim.stamp.version}"` }
    const attempt = { token, attempts: 1, fence: claim.stamp.fence }
    const own = outcomeDraft(claimed, attempt, { kind: 'completed', result: response() }, 0)
    const resolve = () => ask(proxy, `/v1/records/${id}/resolve`, { method: 'POST', headers, body })
    const late = () =>
      new Promise((next) => setTimeout(next, n % 5)).then(() =>
        records.settle(id, own, { dueIn: HOUR, dropIn: HOUR }),
      )
    const [reply, settled] = await Promise.all([resolve(), late()])
    const { status } = reply
    const { state } = recordOf(await ask(proxy, `/v1/records/${id}`))
    t.equal(state, 'completed', 'one of them stands')
    const { body: kept } = await stored(records, id)
    if (reply.status === 200 && body.outcome === 'completed') {
      t.equal(settled.kind, 'refused')
      t.equal(kept, 'by hand')
      won.operator++
    } else {
      t.ok([200, 409, 412].includes(status), String(status))
      const why = 'a late proof beats "not executed", and a decision after it is refused'
      t.equal(settled.kind, 'written', why)
      t.not(kept, 'by hand')
      won.owner++
    }
  }
  t.comment(`${kind}: operator ${won.operator}, owner ${won.owner}`)
  t.ok(linesOf(audit).length > 0)
}

async function stored(records: Records, id: RecordId): Promise<{ body: string | null }> {
  const { record } = orThrow(await records.get(id))
  const kept = record?.state === 'completed' && record.result.kept
  return { body: kept ? record.result.response.body.toString() : null }
}

for (const kind of KINDS.filter((one) => one !== 'memory'))
  void t.test(`O04 ${kind}: an operator and a late completion race: one winner`, (t) => race(t, kind))

const redis = await emptyRedis(t)

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

for (const kind of KINDS.filter((one) => one === 'sqlite' || one === 'redis'))
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
    t.match(await run(undefined), { code: 2, err: /no terminal for the confirmation/ })
    const stale = await run(['yes'], '--version', '1')
    t.match(stale, { code: 1, err: /version_mismatch: it is now at version \d+/ })
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

void t.test('a lookup finds the record of every kind of key and caller, and nobody else’s', async (t) => {
  await using upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end())
  const own = await pair('ES256')
  await using jwks = await jwksServer(own)
  const secret = join(tempDir(t), 'secret')
  writeFileSync(secret, 'sixteen bytes or more')
  await using proxy = await proxyInProcess(
    `${adminYaml(t)}
upstream: { url: "${upstream.url}" }
store: { url: "memory:", secretFile: ${secret} }
routes:
  - { name: header, match: { path: /header } }
  - { name: strict, match: { path: /strict }, key: { syntax: strict } }
  - { name: tenants, match: { path: "/tenants/:id" }, scope: { caller: ["header:X-Tenant", "cookie:sid"], path: route } }
  - { name: tokens, match: { path: /tokens }, scope: { caller: ["jwt:sub", "jwt:level"], jwt: { jwks: "${jwks.url}" } } }
  - { name: events, match: { path: /events }, key: { from: ["header:ce-id", "json:/id"] }, scope: { caller: none } }
  - { name: pointed, match: { path: /pointed, methods: [PUT] }, key: { from: ["json:/id"] }, scope: { caller: none } }
  - { name: structured, match: { path: /structured }, key: { from: ["json:/id"] }, scope: { caller: none } }
  - { name: fields, match: { path: /fields }, key: { from: ["form:k", "query:k"] }, scope: { caller: none } }
  - { name: exact, match: { path: "/exact/", exact: true }, scope: { caller: none } }
  - { name: derived, match: { path: /derived }, key: { derive: { json: [/a] }, forward: X-Key }, scope: { caller: none } }
  - { name: watched, match: { path: /watched }, mode: shadow, scope: { caller: none } }
  - { name: open, match: { path: /open }, key: ignored }`,
  )
  const bearer = await token(own, { sub: 'ann', level: 3, exp: Math.floor(Date.now() / 1000) + 3600 })
  const json = { 'content-type': 'application/json' }
  const awkward = 'a\\"b, {c}:d/*'
  const quoted = `"${awkward.replace(/[\\"]/g, '\\$&')}"`
  const cloud = { 'content-type': 'application/cloudevents+json' }
  const form = { 'content-type': 'application/x-www-form-urlencoded' }
  const alice = { authorization: 'Bearer alice' }
  const bank = { 'ce-source': '/bank' }
  const POST = { method: 'POST' }
  /** What a client sends, and what an operator knows about it. */
  // biome-ignore format: a table
  const cases: readonly (readonly [route: string, key: string | null, sent: Ask, lookup: Record<string, unknown>])[] = [
    ['header', 'plain-key', { path: '/header?x=1' },
      { key: 'plain-key', ...POST, path: '/header', caller: { Authorization: 'Bearer alice' } }],
    ['header', quoted, { path: '/header' },
      { key: awkward, ...POST, path: '//header/.', caller: { authorization: ['Bearer alice'] } }],
    ['strict', '"in quotes"', { path: '/strict' }, { key: 'in quotes', ...POST, path: '/strict', caller: alice }],
    ['tenants', 'k', { path: '/tenants/7', headers: { 'x-tenant': 't1', cookie: 'a=b; sid=s1' } },
      { key: 'k', ...POST, path: '/tenants/8', caller: { 'X-Tenant': 't1', Cookie: 'sid=s1' } }],
    ['tokens', 'k', { path: '/tokens', headers: { authorization: `Bearer ${bearer}` } },
      { key: 'k', ...POST, path: '/tokens', caller: { sub: 'ann', level: 3 } }],
    ['events', null, { path: '/events', headers: { 'ce-id': 'e1', ...bank } },
      { key: 'e1', ...POST, path: '/events', caller: bank }],
    ['events', null, { path: '/events', headers: { 'ce-id': 'e2' } }, { key: 'e2', route: 'events', ...POST }],
    ['events', null, { path: '/events', body: '{"id":"e3"}', headers: json },
      { key: 'e3', route: 'events', ...POST }],
    ['events', null, { path: '/events', body: '{"id":"e4","source":"/bank"}', headers: cloud },
      { key: 'e4', route: 'events', ...POST, caller: bank }],
    ['structured', null, { path: '/structured', body: '{"id":"e5","source":"/bank"}', headers: cloud },
      { key: 'e5', route: 'structured', ...POST, caller: bank }],
    ['structured', null, { path: '/structured', body: '{"id":"e6"}', headers: cloud },
      { key: 'e6', route: 'structured', ...POST }],
    ['fields', null, { path: '/fields?k=q1' }, { key: 'q1', route: 'fields', ...POST }],
    ['fields', null, { path: '/fields', body: 'k=f1', headers: form }, { key: 'f1', route: 'fields', ...POST }],
    ['pointed', null, { path: '/pointed', method: 'PUT', body: '{"id":42}', headers: json },
      { key: '42', route: 'pointed' }],
    ['exact', 'k', { path: '/exact/' }, { key: 'k', route: 'exact', ...POST }],
    ['default', 'k', { path: '/elsewhere', method: 'PATCH' },
      { key: 'k', route: 'default', method: 'PATCH', path: '/elsewhere', caller: alice }],
  ]
  const look = (body: object) => ask(proxy, '/v1/records/lookup', { method: 'POST', body })
  const known = new Set<string>()
  for (const [route, key, sent, lookup] of cases) {
    const title = JSON.stringify(lookup)
    t.equal((await look(lookup)).code, 'record_not_found', `${title}: not yet`)
    t.equal((await send(proxy, key, sent)).status, 201, title)
    const { json: page } = await ask(proxy, `/v1/records?route=${route}`)
    const fresh = (page['records'] as { id: string }[]).filter(({ id }) => !known.has(id))
    t.equal(fresh.length, 1, title)
    const found = fullOf(await look(lookup))
    t.equal(found.id, fresh[0]?.id, title)
    t.equal(found.route, route)
    known.add(found.id)
    t.equal((await look({ ...lookup, key: `${String(lookup['key'])}x` })).status, 404)
    const eve = { authorization: 'Bearer eve', 'x-tenant': 't2', sub: 'eve' }
    const other = { ...(lookup['caller'] as object), ...eve }
    if (lookup['caller'] !== undefined && !['events', 'structured'].includes(route))
      t.equal((await look({ ...lookup, caller: other })).status, 404, `${title}: another caller`)
  }
  // The derived key is the one that the upstream got.
  await send(proxy, null, { path: '/derived', body: '{"a":1}', headers: json })
  const key = valueOf(upstream.seen.at(-1) ?? { headers: [] }, 'x-key')
  const { json: found } = await look({ key, route: 'derived', method: 'POST' })
  t.match(found, { route: 'derived', state: 'completed' })
  for (const wrong of [
    { key: 'k', method: 'POST', path: '/open' },
    { key: 'k', method: 'GET', path: '/header' },
    { key: 'k', route: 'tenants', method: 'POST' },
    { key: 'k', route: 'header', path: '/strict', method: 'POST' },
    { key: 'k', route: 'tokens', method: 'POST', caller: { sub: 'ann', level: [] } },
    { key: 'k"', method: 'POST', path: '/header', caller: { authorization: 'a\nb' } },
    { key: '"k', method: 'POST', path: '/header' },
  ])
    t.equal((await look(wrong)).code, 'invalid_request', JSON.stringify(wrong))
})
