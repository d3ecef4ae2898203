import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { FullView, PageView, RecordView } from '../../src/admin/schemas.ts'
import type { RecordId } from '../../src/core/record.ts'
import { verifyAudit } from '../../src/observe/audit.ts'
import { openStore } from '../../src/store/open.ts'
import { hadOtherUpstream } from '../../src/store/other-upstream.ts'
import { bytesOf, newToken, PLAIN_STORE, SPANS } from '../store/fixtures.ts'
import { command, operated } from '../support/commands.ts'
import { newKey, send, tempDir, until } from '../support/e2e.ts'
import { emptyRedis } from '../support/redis.ts'
import { SERVICE } from '../support/service.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

const redis = await emptyRedis(t)

const NOBODY = 'A'.repeat(43)
const CALLER = ['--caller', 'Authorization: Bearer alice', '--method', 'POST', '--path']

for (const way of ['admin', 'config'] as const)
  void t.test(`§11 by --${way}, inspect takes the beginning of an id`, async (t) => {
    const { proxy, where } = await operated(t, redis.url)
    const run = async (...words: string[]) => command([...words, ...where[way]])
    // One id in 64 begins with a dash, and seven characters of it read as an option: those are tried below.
    const seen = new Set<string>()
    let record = '-'
    while (record.startsWith('-')) {
      await send(proxy, newKey())
      const line = await proxy.logged((entry) => entry.msg === 'request' && !seen.has(entry.record as string))
      record = line.record as string
      seen.add(record)
    }
    const { records } = JSON.parse((await run('list', '--json')).out) as PageView
    const id = records.find((one) => one.id.startsWith(record))?.id ?? ''
    await until(async () => (await run('inspect', id)).out.includes('fence='))
    const whole = await run('inspect', id, '--json')
    t.strictSame(await run('inspect', record, '--json'), whole)
    t.strictSame(await run('inspect', id.slice(0, 8), '--json'), whole)
    t.match(await run('inspect', id.slice(0, 7)), { code: 2, out: '', err: /8 or more characters/ })

    const alike = ['-_-_-_-_-_-_', '-_-_-_-_-_-a'].map((start) => start.padEnd(43, 'A') as RecordId)
    const settings = { ...PLAIN_STORE, url: redis.url, timeout: 10_000 }
    const store = await openStore({ service: SERVICE, store: settings }, { onEvent() {}, onBreaker() {} })
    for (const one of alike) await store.put(one, bytesOf('completed', newToken()), SPANS)
    await store.close()
    const several = await run('inspect', '-_-_-_-_')
    t.match(several, { code: 1, out: '', err: /: 2 record ids begin with -_-_-_-_; give more of the one/ })
    for (const one of alike) t.match(several.err, new RegExp(`^${one} +completed `, 'm'))
    t.match((await run('inspect', '-_-_-_-_-_-a')).out, new RegExp(`^record +${alike[1]}$`, 'm'))
    t.match(await run('inspect', 'order-4711-secret'), {
      code: 1,
      out: '',
      err: /record_not_found: no record id begins with that\. A key needs --method, --path and --caller, or --route\.\n$/,
    })
    t.match(await run('inspect', newKey()), { code: 2, out: '', err: /a key needs --method/ })
    const decision = await run('resolve', id.slice(0, 12), '--retryable', '--reason', 'r', '--yes')
    t.match(decision, { code: 2, out: '', err: `resolve: give the whole id: ${id}\n` })
  })

for (const way of ['admin', 'config'] as const)
  void t.test(`by --${way}, list and inspect show records, and resolve decides one`, async (t) => {
    const { proxy, upstream, dir, where, audit, unknown } = await operated(t, redis.url)
    const there = where[way]
    const run = async (...words: string[]) => command([...words, ...there])
    t.strictSame(await run('list'), { code: 0, out: 'no records\n', err: '' })

    const [paid, lost] = [newKey(), newKey()]
    await send(proxy, paid)
    await send(proxy, paid)
    await send(proxy, paid)
    await send(proxy, paid, { body: '{"amount":2}' })
    const id = await unknown(lost)
    t.equal((await send(proxy, lost, { path: '/break' })).code, 'idempotency_outcome_unknown')

    const listed = await run('list')
    t.equal(listed.code, 0)
    const [head, ...rows] = listed.out.trimEnd().split('\n')
    t.match(head, /^RECORD +STATE +ROUTE +REQUEST +AGE +ATTEMPTS +ANSWER +WHY$/)
    t.equal(rows.length, 2)
    t.ok(rows.some((row) => /^[\w-]{43} +completed +pay +POST \/pay +\ds +1 +201$/.test(row)))
    t.ok(rows.some((row) => new RegExp(`^${id} +unknown +break +POST /break +\\ds +1 +- +\\S`).test(row)))
    const queue = JSON.parse((await run('list', '--state', 'unknown', '--json')).out) as PageView
    t.strictSame([queue.records.map((one) => one.id), queue.next], [[id], null])
    t.equal((await run('list', '--state', 'completed,expired', '--route', 'break')).out, 'no records\n')
    t.equal((await run('list', '--age', '1h')).out, 'no records\n')
    t.equal((await run('list', '--dead-lettered')).out, 'no records\n')

    // Histories are written after the requests.
    const byKey = (...more: string[]) => run('inspect', paid, ...CALLER, '/pay', ...more)
    await until(async () => (await byKey()).out.includes('misuse'))
    const told = await byKey()
    t.equal(told.code, 0)
    t.match(
      told.out,
      /^record {4}[\w-]{43}\nrequest {3}POST \/pay\nroute {5}pay\nstate {5}completed\nattempts {2}1 \(the latest is fence \d+\)\nanswer {4}201\n/,
    )
    for (const sentence of [
      'It was executed once.\n',
      'The response was 201; 11 bytes are stored.\n',
      '2 retries were answered without executing: 2 with the stored response.\n',
      '1 request with this key but different content was refused.\n',
      'What to do:\nNothing. A retry with the same key is not executed.\n',
    ])
      t.ok(told.out.includes(sentence), sentence)
    t.notMatch(`${told.out}${told.err}`, paid, 'the key is not shown')
    t.notMatch(told.out, /stored-body|sid=secret/)
    const full = JSON.parse((await byKey('--json')).out) as FullView
    t.match(full, { route: 'pay', state: 'completed', attempts: 1, response: { status: 201, size: 11 } })
    t.strictSame(
      JSON.parse((await run('inspect', full.id, '--json')).out),
      full,
      'the same by its id as by its key',
    )

    const asked = await run('inspect', id)
    t.equal(asked.code, 0)
    for (const sentence of [
      'It is unknown whether it was executed: ',
      'It was sent upstream once, so it was done once or not at all.',
      `idempotency-proxy resolve ${id} --completed FILE --reason TEXT ${there.join(' ')}   # done;`,
      `idempotency-proxy resolve ${id} --retryable --reason TEXT ${there.join(' ')}        # not done;`,
      'Until then retries are refused, and a new key is not safe.',
    ])
      t.ok(asked.out.includes(sentence), sentence)
    const secret = redis.url.replace('//', '//default:pass-word@')
    const shown = (await command(['inspect', id, '--store', secret, '--service', SERVICE])).out
    t.ok(
      shown.includes(` --reason TEXT --config FILE --store URL --service ${SERVICE}`),
      'no password is repeated',
    )

    const other = await run(
      'inspect',
      paid,
      '--caller',
      'authorization: Bearer bob',
      '--method',
      'POST',
      '--path',
      '/pay',
    )
    t.strictSame([other.code, other.out], [1, ''])
    t.match(
      other.err,
      /record_not_found: .*\nA missing record proves nothing: the key, the caller, the method and the path/,
    )
    t.notMatch(other.err, paid)
    t.match(await run('inspect', NOBODY), { code: 1, out: '', err: /record_not_found/ })
    const wrong = await run('inspect', paid, ...CALLER, '/nowhere', '--route', 'none')
    t.match(wrong, {
      code: 2,
      out: '',
      err: /--route: there is no route "none"; there are: pay, break, default\n/,
    })

    const file = join(dir, 'answer.json')
    writeFileSync(file, JSON.stringify({ status: 200, headers: [['X-By', 'hand']], bodyBase64: 'aGk=' }))
    const decide = ['--reason', 'seen in the ledger', '--by', 'ada', '--yes']
    const stale = await run('resolve', id, '--retryable', '--version', '7', ...decide)
    t.match(stale, { code: 1, out: '', err: /version_mismatch: it is now at version \d+/ })
    t.match(await run('resolve', full.id, '--retryable', ...decide), {
      code: 1,
      out: '',
      err: /not_unknown: the record is completed; there is nothing to decide/,
    })
    t.match(await run('resolve', NOBODY, '--retryable', ...decide), { code: 1, err: /record_not_found/ })
    const done = await run('resolve', id, '--completed', file, ...decide)
    t.strictSame(done, {
      code: 0,
      out: `${id} is completed now. Retries with its key are answered 200; nothing is executed.\n`,
      err: '',
    })
    const replay = await send(proxy, lost, { path: '/break' })
    t.strictSame(
      [replay.status, replay.body, replay.headers.get('x-by'), replay.replayed],
      [200, 'hi', 'hand', true],
    )
    await until(async () => (await run('inspect', id)).out.includes('replayed'))
    const after = await run('inspect', id)
    t.ok(after.out.includes('It was done, as decided by ada; it was sent upstream once.\n'))
    t.match(after.out, /resolved +1 +.*outcome=completed .*by=ada reason=seen in the ledger/)

    const second = await unknown(newKey())
    const freed = await run('resolve', second, '--retryable', '--json', ...decide)
    t.match(JSON.parse(freed.out) as RecordView, { id: second, state: 'failed_retryable' })
    const counts = 'It counts as not executed, as decided by ada.\n'
    await until(async () => (await run('inspect', second)).out.includes(counts))
    t.equal(upstream.seen.length, 3, 'none of this was executed')

    t.match(await verifyAudit(audit), { ok: true, lines: 2 })
    const lines = readFileSync(audit, 'utf8')
      .trimEnd()
      .split('\n')
      .map((line) => JSON.parse(line) as object)
    t.match(lines[0], {
      what: 'resolve',
      record: id,
      who: { by: 'ada' },
      before: { state: 'unknown' },
      after: { state: 'completed', status: 200 },
      reason: 'seen in the ledger',
    })
  })

void t.test('the command line and a proxy take turns writing one audit log', async (t) => {
  const { where, audit, unknown } = await operated(t, redis.url)
  const decide = ['--retryable', '--reason', 'why', '--yes']
  for (const way of ['admin', 'config', 'admin', 'config'] as const)
    t.match(await command(['resolve', await unknown(), ...decide, ...where[way]]), { code: 0, err: '' })
  t.match(await verifyAudit(audit), { ok: true, lines: 4 })
})

void t.test('without audit.file the audit line of a direct decision goes to standard error', async (t) => {
  const { dir, unknown } = await operated(t, redis.url)
  const plain = join(dir, 'plain.yaml')
  const whole = readFileSync(join(dir, 'proxy.yaml'), 'utf8')
  writeFileSync(plain, whole.replace(/^audit:.*\n/m, ''))
  const id = await unknown()
  const { code, err } = await command([
    'resolve',
    id,
    '--retryable',
    '--reason',
    'why',
    '--yes',
    '--config',
    plain,
  ])
  t.equal(code, 0)
  t.match(JSON.parse(err), { audit: { what: 'resolve', record: id, reason: 'why' } })
})

void t.test('only yes confirms a decision at the terminal', async (t) => {
  const { where, dir, unknown } = await operated(t, redis.url)
  const id = await unknown()
  const file = join(dir, 'a.json')
  writeFileSync(file, '{"status":204}')
  const retryable = ['resolve', id, '--retryable', '--reason', 'x', ...where.config]
  for (const answer of ['', 'y', 'no', 'YES']) {
    const { code, out, err } = await command(retryable, [answer])
    t.strictSame([code, out], [1, ''], answer)
    t.match(
      err,
      /POST \/break, route break, of .*\nunknown: .*\nThis records the request as NOT executed\. .*\nType yes to confirm: .*not confirmed: nothing was changed/,
    )
  }
  const done = await command(
    ['resolve', id, '--completed', file, '--reason', 'x', ...where.config],
    [' yes '],
  )
  t.equal(done.code, 0)
  t.match(done.err, /This records the request as EXECUTED; retries are answered 204/)
})

void t.test('a listing stops at its limit and continues from its cursor', async (t) => {
  const { proxy, where } = await operated(t, redis.url)
  for (let n = 0; n < 7; n++) await send(proxy, newKey())
  for (const way of ['admin', 'config'] as const) {
    const ids = new Set<string>()
    let cursor: string[] = []
    for (let pages = 0; pages < 7; pages++) {
      const { out } = await command(['list', '--limit', '3', '--json', ...cursor, ...where[way]])
      const page = JSON.parse(out) as PageView
      for (const { id } of page.records) ids.add(id)
      if (page.next === null) break
      cursor = ['--cursor', page.next]
    }
    t.equal(ids.size, 7)
    const first = await command(['list', '--limit', '3', ...where[way]])
    t.match(first, { code: 0, err: /^there are more: --cursor \S+\n$/ })
    t.match(await command(['list', '--cursor', 'x', ...where[way]]), {
      code: 2,
      err: /--cursor: not the `next`/,
    })
    t.match(await command(['list', '--state', 'lost', ...where[way]]), {
      code: 2,
      err: /--state: a list of in_progress,/,
    })
  }
})

void t.test('--caller takes one or several header lines, a file of them, or JSON', async (t) => {
  const more = 'defaults: { scope: { caller: ["header:authorization", "header:x-tenant"] } }'
  const { proxy, where } = await operated(t, redis.url, more)
  const key = newKey()
  await send(proxy, key, { headers: { 'x-tenant': 't1' } })
  const ask = (...caller: string[]) =>
    command([
      'inspect',
      key,
      '--route',
      'pay',
      '--method',
      'POST',
      ...caller.flatMap((one) => ['--caller', one]),
      ...where.config,
    ])
  t.equal((await ask('authorization: Bearer alice', 'X-Tenant:t1')).code, 0)
  const file = join(tempDir(t), 'caller')
  writeFileSync(file, 'Authorization: Bearer alice\r\nX-Tenant: t1\n')
  t.equal((await ask(`@${file}`)).code, 0)
  t.equal((await ask('{"authorization": "Bearer alice", "x-tenant": "t1"}')).code, 0)
  t.equal((await ask('authorization: Bearer alice', 'x-tenant: t2')).code, 1)
  t.equal((await ask('authorization: Bearer alice')).code, 1)
  t.equal((await ask('authorization: Bearer alice', 'x-tenant: t1', 'x-tenant: t1')).code, 1)
})

void t.test('--store alone finds records by id, and by key those of a proxy without a file', async (t) => {
  const store = `sqlite:${tempDir(t)}/store.db`
  const { proxy, where, dir, unknown } = await operated(t, store)
  const key = newKey()
  await send(proxy, key, { path: '/other' })
  const alone = ['--store', store]
  const undecided = await unknown(newKey())
  const decide = async (...there: string[]): Promise<string> =>
    / --retryable --reason TEXT (.*?) +#/.exec((await command(['inspect', undecided, ...there])).out)?.[1] ??
    ''
  t.equal(await decide(...alone), `--config FILE ${alone.join(' ')}`, 'what resolve needs as well')
  const odd = join(dir, "ada's own.yaml")
  copyFileSync(where.config[1] as string, odd)
  t.equal(await decide('--config', odd), `--config '${dir}/ada'\\''s own.yaml'`, 'quoted for a shell')
  t.equal((await command(['inspect', key, ...CALLER, '/other', ...alone])).code, 0)
  const page = JSON.parse((await command(['list', '--json', ...where.config])).out) as PageView
  t.equal((await command(['inspect', page.records[0]?.id ?? '', ...alone])).code, 0)
  const lost = await command(['inspect', newKey(), ...CALLER, '/other', ...alone])
  t.match(lost, {
    code: 1,
    err: /--store alone assumes a proxy without a configuration file; otherwise give --config/,
  })
})

void t.test('list says when a proxy refuses the token, is not a proxy or does not answer', async (t) => {
  const { proxy, upstream, where, dir } = await operated(t, redis.url)
  const wrong = join(dir, 'wrong')
  writeFileSync(wrong, 'wrong-token')
  const ask = (url: string, token: string) => command(['list', '--admin', url, '--token-file', token])
  const right = where.admin[3] as string
  t.match(await ask(proxy.adminUrl, wrong), {
    code: 1,
    out: '',
    err: /the proxy at http:.*: unauthorized: the token in ".*" is not this proxy's admin token \(admin\.tokenFile\)\n/,
  })
  t.notMatch((await ask(proxy.adminUrl, wrong)).err, /wrong-token/)
  // The traffic listener of the same proxy, and an API that answers everything with JSON.
  await using api = await upstreamStub((_request, response) => {
    response.writeHead(200, { 'Content-Type': 'application/json' }).end('{"status":"ok","draining":true}')
  })
  for (const url of [upstream.url, proxy.url, api.url])
    for (const words of [
      ['list'],
      ['drain'],
      ['report'],
      ['doctor', ...where.config],
      ['inspect', 'A'.repeat(43)],
    ]) {
      const { code, out, err } = await command([...words, '--admin', url, '--token-file', right])
      t.equal(code, 1)
      t.match(
        `${out}${err}`,
        /not an admin listener of idempotency-proxy; allowed: the address in admin\.listen/,
      )
    }
  t.notMatch(JSON.stringify([...api.seen, ...upstream.seen]), /Bearer/, 'nobody else gets the token')
  t.notOk(
    api.seen.some(({ target }) => target !== '/v1/config'),
    'nothing else is asked',
  )
  t.equal(
    (await command(['list', '--store', redis.url, '--service', 'typo'])).out,
    'no records of service typo\n',
  )
  t.match(await ask('http://127.0.0.1:1', right), { code: 1, err: /unreachable: (bad port|.*ECONNREFUSED)/ })
})

void t.test('a file of other services is not taken for an empty store', async (t) => {
  const url = `sqlite:${tempDir(t)}/records.db`
  for (const service of ['pay', 'buy', 'default']) {
    const settings = { ...PLAIN_STORE, url, timeout: 10_000 }
    const store = await openStore({ service, store: settings }, { onEvent() {}, onBreaker() {} })
    // A proxy that was started without a name leaves a mark.
    if (service === 'default') await hadOtherUpstream(store, 'a')
    else await store.put(NOBODY as RecordId, bytesOf('completed', newToken()), SPANS)
    await store.close()
  }
  const others = /holds records of "buy", "pay", and none of "(default|typo)"\n/
  for (const words of [['list'], ['inspect', NOBODY], ['report'], ['doctor']]) {
    const said = await command([...words, '--store', url])
    t.match(said, { code: 2, out: '', err: /--service NAME is required: / }, words.join(' '))
    t.match(said.err, others)
    t.match((await command([...words, '--store', url, '--service', 'typo'])).err, others)
    t.match(await command([...words, '--store', url, '--service', 'pay']), { code: 0, err: '' })
  }
  t.match(
    (await command(['doctor', '--store', redis.url, '--service', 'typo'])).out,
    /service typo: 0 records/,
  )
})

void t.test('a file that cannot be opened is told of once', async (t) => {
  const file = `${tempDir(t)}/records.db`
  mkdirSync(file)
  const { code, err } = await command(['list', '--store', `sqlite:${file}`])
  t.equal(code, 1)
  t.equal(err.match(/unable to open/g)?.length, 1)
})

void t.test('resolve --config takes a response that is larger than the admin listener reads', async (t) => {
  const more = 'limits: { response: 32MiB }\n'
  const { dir, where, unknown } = await operated(t, redis.url, more, '10s')
  const id = await unknown(newKey())
  const file = join(dir, 'large.json')
  writeFileSync(file, JSON.stringify({ status: 200, headers: [], body: 'x'.repeat(9 * 1024 * 1024) }))
  const words = ['resolve', id, '--completed', file, '--reason', 'seen', '--yes']
  t.match(await command([...words, ...where.config]), { code: 0, err: '' })
})
