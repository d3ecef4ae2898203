import { once } from 'node:events'
import { appendFileSync, mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import type { CheckResult } from '../../src/commands/upstream-checks.ts'
import type { RecordId } from '../../src/core/record.ts'
import type { OutcomeDraft, PendingOutcome } from '../../src/core/settle.ts'
import { PREFIX } from '../../src/store/record/codec.ts'
import { Sealer } from '../../src/store/record/sealing.ts'
import { RedisKeys } from '../../src/store/redis/keys.ts'
import { damagedName, newSegmentName, Spool } from '../../src/store/spool/log.ts'
import { encodeEntry } from '../../src/store/spool/outbox.ts'
import { bytesOf, draft, newId, newToken, SPANS } from '../store/fixtures.ts'
import { TOKEN } from '../support/admin.ts'
import { command, operated } from '../support/commands.ts'
import { newKey, send, tempDir } from '../support/e2e.ts'
import { emptyRedis, RedisServer } from '../support/redis.ts'
import { storeUrl } from '../support/replicas.ts'
import { SERVICE } from '../support/service.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

const redis = await emptyRedis(t)
await redis.command('CONFIG', 'SET', 'maxmemory-policy', 'noeviction')
const upstream = await upstreamStub((_seen, response) => void response.end())
t.teardown(() => upstream[Symbol.asyncDispose]())

function outcome(): PendingOutcome {
  return {
    id: newId(),
    draft: draft('completed', newToken()) as OutcomeDraft,
    spans: SPANS,
    claimed: true,
    withdrawn: false,
    over: null,
    onLeaseExpired: 'unknown',
    usefulFor: 60_000,
  }
}

/**
 * Findings, details by check, and all checks.
 * A slow round trip is left out: it only shows how busy the test machine is.
 */
async function examine(t: Test, words: readonly string[]) {
  const { code, out, err } = await command(['doctor', '--json', ...words])
  t.equal(err, '')
  const checked = JSON.parse(out) as CheckResult[]
  const found = checked.filter(({ found }) => found === 'finding')
  t.equal(code, found.length === 0 ? 0 : 1)
  return {
    checked,
    findings: found
      .filter(({ check }) => check !== 'round trip')
      .map(({ check, detail }) => `${check}: ${detail}`),
    of: (check: string) =>
      checked
        .filter((one) => one.check === check)
        .map(({ detail }) => detail)
        .join('\n'),
  }
}

void t.test('before the first start the configuration and the upstream are checked', async (t) => {
  const file = join(tempDir(t), 'proxy.yaml')
  for (const [url, says] of [
    [`sqlite:${file}.db`, /there is no file at .*\.db; a proxy creates it at startup/],
    ['memory:', /memory:, which only its own process can see/],
  ] as const) {
    writeFileSync(file, `upstream: { url: "${upstream.url}" }\nstore: { url: "${url}" }\n`)
    const { checked, findings, of } = await examine(t, ['--config', file])
    t.strictSame(findings, [])
    t.match(of('upstream'), /answers OPTIONS \*/)
    t.match(of('store'), says)
    t.notOk(checked.some(({ check }) => check === 'claims'))
  }
})

for (const kind of ['sqlite', 'redis'] as const)
  void t.test(`${kind}: a healthy deployment has no findings`, async (t) => {
    const { proxy, where, unknown } = await operated(
      t,
      storeUrl(t, kind, redis),
      // The helper leaves the grace on where the word appears.
      'defaults: { scope: { anonymous: reject } } # grace: 2s',
    )
    await send(proxy, newKey())
    const id = await unknown()
    await command(['resolve', id, '--retryable', '--reason', 'x', '--yes', ...where.config])
    await unknown()
    const { checked, findings, of } = await examine(t, [...where.config, ...where.admin])
    t.strictSame(findings, [])
    t.strictSame(
      checked.map(({ check }) => check),
      [
        'configuration',
        'upstream',
        'store',
        'grade',
        ...(kind === 'redis' ? ['replication', 'room', 'grace'] : []),
        'claims',
        'round trip',
        'clock',
        'records',
        'index',
        'spool',
        'audit log',
        'proxy',
        'proxy token',
        'proxy readiness',
        'proxy version',
      ],
    )
    t.equal(of('grade'), 'strict, 3 of 3')
    t.equal(of('claims'), 'It accepted one claim of a key and refused the next.')
    t.equal(of('topology'), '', 'one server has none')
    t.match(of('round trip'), /^median [\d.]+ ms, slowest [\d.]+ ms of 20; store.timeout is 500 ms$/)
    t.match(of('records'), '3 records checked; 1 unknown')
    t.match(of('index'), 'complete: 1 unresolved record')
    t.match(of('spool'), /store.spool is off/)
    t.match(of('audit log'), /audit\.log: 1 line, one chain; the last is [0-9a-f]{12}/)
    const text = await command(['doctor', ...where.config])
    t.match(text.out, /^fine +configuration +no setting weakens the guarantee\nfine +upstream +http/)
  })

void t.test('doctor finds a Redis that is volatile, evicts, is read-only or unreachable', async (t) => {
  await using weak = await RedisServer.start({
    args: ['--appendonly', 'no', '--maxmemory-policy', 'allkeys-lru'],
  })
  const { findings } = await examine(t, ['--store', weak.url, '--service', 'test'])
  t.match(findings, [
    'grade: unfit, 0 of 3 (docs/stores.md#the-grade)',
    /promises: appendonly is off/,
    /promises: maxmemory-policy is allkeys-lru/,
  ])
  const dir = tempDir(t)
  const risk = join(dir, 'risk.yaml')
  writeFileSync(
    risk,
    `service: test\nupstream: { url: "${upstream.url}" }\nstore: { url: "${weak.url}", acceptRisk: true }\n`,
  )
  const accepted = await examine(t, ['--config', risk])
  t.strictSame(accepted.findings, [], 'what was accepted is a note')
  t.match(accepted.of('promises'), /appendonly is off/)
  await weak.command('REPLICAOF', '127.0.0.1', '1')
  const replica = await examine(t, ['--store', weak.url, '--service', 'test'])
  t.match(
    replica.findings.join('\n'),
    /promises: The server is a read-only replica[^]*claims: nothing can be claimed: .*READONLY/,
  )
  await weak.kill()
  t.match((await examine(t, ['--store', weak.url, '--service', 'test'])).findings, [
    /store: redis:.* does not answer: .*ECONNREFUSED/,
  ])
})

void t.test('doctor shows how many Redis replicas claims wait for, and how many have them', async (t) => {
  await using server = await RedisServer.start()
  const config = (wait: string, more = '') => {
    const file = join(tempDir(t), 'wait.yaml')
    const store = `store: { url: "${server.url}", wait: ${wait}${more} }`
    writeFileSync(file, `service: test\nupstream: { url: "${upstream.url}" }\n${store}\n`)
    return ['--config', file]
  }
  const lonely = await examine(t, config('{ replicas: 1, timeout: 10ms }'))
  t.equal(lonely.of('replication'), 'claims wait for 1 replica, up to 10 ms; no replica is connected')
  t.match(lonely.findings, [
    'promises: store.wait is not satisfied: 0 of 1 replicas had it within 10 ms: claims are answered 503.',
  ])
  const accepted = await examine(t, config('{ replicas: 1, timeout: 10ms }', ', acceptRisk: true'))
  t.strictSame(
    accepted.findings,
    lonely.findings,
    'acceptRisk does not accept that every new key is answered 503',
  )
  const old = await examine(t, config('{ disk: local }'))
  t.match(old.findings, [
    /^store: store\.wait\.disk: found local, and the server has no WAITAOF; allowed: Redis 7\.2 or later/,
  ])
})

void t.test('V09 doctor grades a Redis as volatile if its user may not run INFO', async (t) => {
  await using server = await RedisServer.start()
  await server.command('ACL', 'SETUSER', 'app', 'on', '>secret', '~*', '&*', '+@all', '-info')
  const { findings } = await examine(t, [
    '--store',
    `redis://app:secret@127.0.0.1:${server.port}`,
    '--service',
    'test',
  ])
  t.match(findings, [
    'grade: volatile, 1 of 3 (docs/stores.md#the-grade)',
    /promises: Claims wait for no replica/,
    /promises: The store does not identify its process, so there is no grace/,
    /promises: .*may not run INFO.* 503: ACL SETUSER <user> \+info grants it, store\.acceptRisk/,
  ])
})

void t.test('doctor finds a record that the Redis index has lost, and unreadable records', async (t) => {
  const { where, unknown, proxy } = await operated(t, redis.url)
  const [lost, kept] = [await unknown(), await unknown()]
  const keys = new RedisKeys(SERVICE)
  await redis.command('ZREM', keys.indexes[keys.shardOf(lost)] as string, lost)
  await send(proxy, newKey())
  await redis.command('SET', `idempotency:${SERVICE}:{00}:r:${'A'.repeat(43)}`, 'no record')
  const id = 'B'.repeat(43) as RecordId
  const sealed = new Sealer([{ id: 'old', key: Buffer.alloc(32) }]).seal(id, bytesOf('completed', newToken()))
  sealed.writeUIntBE(2 ** 48 - 1, PREFIX.dropAt, 6)
  await redis.command('SET', new RedisKeys(SERVICE).record(id), sealed)
  const { findings, of } = await examine(t, where.config)
  t.match(findings, [
    /unreadable: 1 record \([AB]{43}\): /,
    /unreadable: 1 record \([AB]{43}\): /,
    /index: lacks 1 unresolved record, which no sweeper will find: /,
  ])
  t.ok(of('index').endsWith(lost))
  t.notMatch(of('index'), kept)
  t.match(of('records'), '5 records checked; 2 unknown')
  t.match(of('unreadable'), /A\): this version cannot read them/)
  t.match(
    of('unreadable'),
    /B\): the stored record is sealed with the key old; store\.encryption\.keys does not have it/,
  )
})

t.test('doctor finds outcomes in the spool and edits of the audit log, and shows warnings', async (t) => {
  const { dir, where, unknown } = await operated(t, redis.url)
  await command(['resolve', await unknown(), '--retryable', '--reason', 'x', '--yes', ...where.config])
  await command(['resolve', await unknown(), '--retryable', '--reason', 'x', '--yes', ...where.config])
  const audit = join(dir, 'audit.log')
  const spool = join(dir, 'spool')
  const file = join(dir, 'doctor.yaml')
  writeFileSync(
    file,
    `service: ${SERVICE}\nupstream: { url: "${upstream.url}" }\nstore: { url: "${redis.url}", spool: ${spool} }\naudit: { file: ${audit} }\ndefaults: { onLeaseExpired: retry }\n`,
  )
  const fresh = await examine(t, ['--config', file])
  t.strictSame(fresh.findings, [])
  t.match(fresh.of('configuration'), /onLeaseExpired retry/)
  t.match(fresh.of('spool'), /does not exist yet: a proxy creates it/)
  mkdirSync(spool)
  t.match((await examine(t, ['--config', file])).of('spool'), /is empty/)
  const opened = { directory: spool, maxBytes: 1024 ** 2, say: () => {} }
  const { spool: open } = await Spool.open(opened)
  for (const service of [SERVICE, 'orders', SERVICE, 'orders', 'orders'])
    await open.append(encodeEntry(outcome(), service, null)).done
  t.match((await examine(t, ['--config', file])).findings, [
    /spool: 2 outcomes in .* that the store has not accepted/,
    /spool: 3 outcomes of service orders in .* that test will not write: start a proxy of orders on it/,
  ])
  await open.append(Buffer.from('an outcome')).done
  t.match((await examine(t, ['--config', file])).findings.slice(2), [
    /spool: 1 outcome of another version in .* that this one cannot read \(the entry has version 97, not 2\)/,
  ])
  await open.close()
  writeFileSync(join(spool, damagedName(newSegmentName(1).name)), 'x')
  t.match((await examine(t, ['--config', file])).findings, [
    /spool: 2 outcomes in /,
    /spool: 3 outcomes of service orders in /,
    /spool: 1 outcome of another version in /,
    /spool: 1 damaged file set aside in .*: inspect and remove them/,
  ])
  rmSync(spool, { recursive: true })

  const whole = readFileSync(audit, 'utf8')
  writeFileSync(audit, whole.replace('retryable', 'completed'))
  t.match((await examine(t, ['--config', file])).findings, [/audit log: .*audit\.log:1: the line was edited/])
  writeFileSync(audit, '')
  t.match(
    (await examine(t, ['--config', file])).of('audit log'),
    /audit\.log is empty: nothing has been changed/,
  )
  writeFileSync(audit, whole.split('\n').slice(1).join('\n'))
  t.match((await examine(t, ['--config', file])).findings, [
    /audit\.log:1: lines before this one were removed/,
  ])
  writeFileSync(audit, whole)
  appendFileSync(audit, '{"torn')
  t.match((await examine(t, ['--config', file])).findings, [/audit\.log:3: the line is incomplete/])
})

void t.test('doctor finds a wrong token, no proxy, one that drains, and its troubles', async (t) => {
  const { dir, where } = await operated(t, 'memory:')
  const wrong = join(dir, 'wrong')
  writeFileSync(wrong, 'wrong-token')
  const [, url = '', , token = ''] = where.admin
  t.match((await examine(t, ['--admin', url, '--token-file', wrong])).findings, [/proxy token: unauthorized/])
  t.equal((await command(['drain', ...where.admin])).code, 0)
  t.match((await examine(t, where.admin)).findings, [/proxy readiness: not ready: .*draining/])

  const answers: Record<string, string> = {
    '/v1/config': '{}',
    '/readyz': '{}',
    '/metrics': [
      '# HELP idempotency_build_info x',
      'idempotency_build_info{version="0.0.9",node="v1"} 1',
      'idempotency_store_up{store="redis"} 0',
      'idempotency_breaker_state{store="redis"} 2',
      'idempotency_store_grade{store="redis"} 0',
      'idempotency_spooled 3',
    ].join('\n'),
  }
  const other = createServer(({ url: path = '', headers }, response) => {
    const isDenied = path.startsWith('/v1/') && headers.authorization !== `Bearer ${TOKEN}`
    response.writeHead(isDenied ? 401 : 200)
    response.end(isDenied ? '{"type":"urn:idempotency-proxy:unauthorized"}' : answers[path])
  }).listen(0, '127.0.0.1')
  await once(other, 'listening')
  t.teardown(() => void other.close())
  const at = `http://127.0.0.1:${(other.address() as AddressInfo).port}`
  const { findings, of } = await examine(t, ['--admin', at, '--token-file', token])
  t.match(findings, [
    /proxy store: the store does not answer this proxy/,
    /proxy store: its breaker is open/,
    /proxy store: its store is graded unfit, not strict/,
    /proxy spool: 3 outcomes are waiting to be written/,
  ])
  t.match(of('proxy version'), /^0\.0\.9; this command is /)
  other.close()
  other.closeAllConnections()
  t.match((await examine(t, ['--admin', at, '--token-file', token])).findings, [
    /proxy: http:.* does not answer: /,
  ])
})

void t.test('drain fails the readiness, not requests, and the audit log says who did it', async (t) => {
  const { proxy, where, audit } = await operated(t, 'memory:')
  const ready = async () => (await fetch(`${proxy.adminUrl}/readyz`)).status
  t.equal(await ready(), 200)
  const { code, out, err } = await command(['drain', '--reason', 'rollout', '--by', 'hook', ...where.admin])
  t.strictSame([code, err], [0, ''])
  t.match(out, /^the proxy at http:.* is draining: it fails its readiness and keeps serving\n$/)
  t.equal(await ready(), 503)
  t.equal((await send(proxy, newKey())).status, 201)
  t.strictSame(await command(['drain', '--json', ...where.admin]), {
    code: 0,
    out: '{"draining":true}\n',
    err: '',
  })
  t.match(await command(['undrain', ...where.admin]), {
    code: 0,
    out: /^the proxy at http:.* is ready again\n$/,
    err: '',
  })
  t.equal(await ready(), 200)
  t.match(JSON.parse(readFileSync(audit, 'utf8').split('\n')[0] ?? ''), {
    what: 'drain',
    who: { by: 'hook' },
    reason: 'rollout',
  })
  t.match(await command(['drain', '--admin', 'http://127.0.0.1:1', ...where.admin.slice(2)]), {
    code: 1,
    err: /unreachable/,
  })
})
