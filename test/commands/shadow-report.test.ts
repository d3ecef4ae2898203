import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { Value } from 'typebox/value'
import { type Report, reportSchema } from '../../src/admin/report.ts'
import type { FullView } from '../../src/admin/schemas.ts'
import { isDuplicate, isVerdict, type ShadowTallyRow } from '../../src/admin/shadow-tally.ts'
import type { ShadowReport } from '../../src/commands/shadow-log.ts'
import { namesOf, SHADOW_VERDICTS } from '../../src/protect/outcomes.ts'
import { command, operated } from '../support/commands.ts'
import { newKey, send, tempDir, until } from '../support/e2e.ts'
import { metricIs } from '../support/exchange.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { emptyRedis } from '../support/redis.ts'
import { SERVICE } from '../support/service.ts'

t.setTimeout(200_000)

const redis = await emptyRedis(t)

/** Zeros except for these. */
function row(route: string, figures: object, verdicts: object): ShadowTallyRow {
  return {
    route,
    requests: 0,
    executed: 0,
    prevented: 0,
    differed: 0,
    refused: 0,
    unjudged: 0,
    newKeys: 0,
    retriedIn1m: 0,
    retriedIn1h: 0,
    retriedIn1d: 0,
    retriedLater: 0,
    ...figures,
    verdicts: { ...Object.fromEntries(namesOf(SHADOW_VERDICTS).map((name) => [name, 0])), ...verdicts },
  }
}

void t.test('O06 the counters and the log of shadow mode give the same figures by route', async (t) => {
  const { proxy, where, dir } = await operated(t, 'memory:', 'defaults: { mode: shadow, key: required }')
  const [paid, misused] = [newKey(), newKey()]
  const verdict = (route: string, name: string, count: number): Promise<void> =>
    metricIs(proxy, `idempotency_shadow_total{route="${route}",verdict="${name}"}`, count)
  await send(proxy, paid)
  await verdict('pay', 'first', 1)
  await send(proxy, paid)
  await send(proxy, paid)
  await verdict('pay', 'replay_same', 2)
  await send(proxy, misused, { body: '{"amount":2}' })
  await send(proxy, misused, { body: '{"amount":3}' })
  await send(proxy, null)
  // A client that makes a new key for each attempt.
  for (let n = 0; n < 3; n++) await send(proxy, newKey(), { path: '/pay', body: '{"amount":9}' })
  await send(proxy, newKey(), { path: '/break' }).catch(() => {})
  await verdict('pay', 'first', 5)
  await verdict('pay', 'misuse', 1)
  await verdict('pay', 'key_missing', 1)
  await verdict('break', 'upstream_failed', 1)
  await metricIs(proxy, 'idempotency_regenerated_keys_total{route="pay"}', 2)
  await metricIs(proxy, 'idempotency_retry_age_seconds_count{route="pay"}', 2)

  const known = [
    row('break', { requests: 1, executed: 1 }, { upstream_failed: 1 }),
    row(
      'pay',
      { requests: 9, executed: 5, prevented: 2, refused: 2, newKeys: 2, retriedIn1m: 2 },
      { first: 5, replay_same: 2, misuse: 1, key_missing: 1 },
    ),
  ]
  const asked = await command(['report', '--json', ...where.admin])
  const report = JSON.parse(asked.out) as Report
  t.strictSame([...Value.Errors(reportSchema, report)], [], 'matches its schema')
  t.strictSame(report.counted?.shadow, known)
  const text = await command(['report', ...where.admin])
  t.match(text.out, /\nWhat enforce would have done, counted by this one proxy since it started, 20/)
  t.match(
    text.out,
    /\nThe same by verdict .*\nROUTE +FIRST +REPLAY_SAME +MISUSE +KEY_MISSING +UPSTREAM_FAILED\n/,
  )
  t.match(text.out, /\npay +5 +2 +1 +1 +0\n/)

  const log = join(dir, 'proxy.log')
  const time = new Date().toISOString()
  const lines = proxy.log.map((line) =>
    JSON.stringify({ level: 'info', ...line, time: line['time'] && time }),
  )
  writeFileSync(log, `${lines.join('\n')}\n`)
  const told = await command(['report', '--log', log, '--json', '--since', '7d'])
  t.strictSame([told.code, told.err], [0, ''])
  const fromLog = JSON.parse(told.out) as ShadowReport
  t.match(fromLog, { lines: 10, unreadable: 0, first: time, last: time })
  t.strictSame(fromLog.shadow, known)
})

const NOW = Date.now()
const HOUR = 3_600_000
const line = (ago: number, more: object = {}): string =>
  JSON.stringify({
    level: 'info',
    time: new Date(NOW - ago).toISOString(),
    route: 'pay',
    verdict: 'replay_differs',
    msg: 'shadow',
    ...more,
  })

void t.test('report --log counts lines by their time, and says what the log does not cover', async (t) => {
  const log = join(tempDir(t), 'proxy.log')
  const ages = [59_000, 61_000, 2 * HOUR, 25 * HOUR]
  writeFileSync(
    log,
    [
      line(8 * 24 * HOUR, { msg: 'listening' }),
      line(8 * 24 * HOUR),
      ...ages.map((retryAgeMs) => line(HOUR, { retryAgeMs })),
      line(HOUR, { verdict: 'expired' }),
      line(HOUR, { verdict: 'error' }),
    ].join('\n'),
  )
  const ask = async (...words: string[]): Promise<ShadowReport> =>
    JSON.parse((await command(['report', '--log', log, '--json', ...words])).out) as ShadowReport
  const week = await ask('--since', '7d')
  t.equal(week.lines, 6)
  t.strictSame(week.shadow, [
    row(
      'pay',
      {
        requests: 6,
        prevented: 5,
        differed: 4,
        unjudged: 1,
        retriedIn1m: 1,
        retriedIn1h: 1,
        retriedIn1d: 1,
        retriedLater: 1,
      },
      { replay_differs: 4, expired: 1, error: 1 },
    ),
  ])
  t.equal((await ask('--since', '9d')).lines, 7)
  t.strictSame((await ask('--since', '30m')).shadow, [])
  const said = await command(['report', '--log', log, '--since', '7d'])
  t.notMatch(said.out, /nothing is known about the time before/)
  t.match(said.out, /^6 lines of shadow mode in that time; the log has lines from 20.* to 20/m)
  const long = await command(['report', '--log', log, '--since', '30d'])
  t.match(long.out, /^It begins at 20.*: nothing is known about the time before\.$/m)
  const none = await command(['report', '--log', log, '--since', '1m'])
  t.match(none.out, /^What enforce would have done, from .*\nnone\n/)
  t.match(
    none,
    { code: 1, err: /found no line of shadow mode in that time: is it the log of a proxy / },
    'only lines of another time',
  )
  const csv = await command(['report', '--log', log, '--since', '7d', '--format', 'csv'])
  t.match(csv.out, /\r\nshadow,pay,differed,4\r\n/)
  t.match(csv.out, /\r\nverdicts,pay,replay_differs,4\r\n/)
  t.match((await command(['report', '--log', log, '--format', 'markdown'])).out, /\| pay \| 4 \| 1 \| 1 \|/)
})

void t.test('report --log reads logs of several replicas, and lines as other tools wrap them', async (t) => {
  const dir = tempDir(t)
  const [plain, wrapped, empty] = ['a.log', 'b.log', 'c.log'].map((name) => join(dir, name)) as [
    string,
    string,
    string,
  ]
  writeFileSync(plain, `${line(1000, { verdict: 'first', newKey: true })}\r\n`)
  writeFileSync(
    wrapped,
    [
      `2026-11-21T08:00:00.000000000Z stdout F ${line(1000)}`,
      `[pod/api-1/proxy] ${line(1000)}`,
      JSON.stringify({ log: `${line(1000)}\n`, stream: 'stdout', time: '2026-11-21T08:00:00.123456789Z' }),
      // Not lines of shadow mode, whatever they say.
      '{"msg":"request","note":"\\"msg\\":\\"shadow\\""}',
      'no JSON at all',
      // Cut off, or of another version.
      line(1000).slice(0, -1),
      line(1000, { verdict: 'from-the-future' }),
      line(1000, { time: 'yesterday' }),
      line(1000, { route: 1 }),
    ].join('\n'),
  )
  writeFileSync(empty, '')
  const { code, out } = await command(['report', '--json', '--log', plain, '--log', wrapped, '--log', empty])
  t.equal(code, 0)
  t.match(JSON.parse(out), {
    lines: 4,
    shadow: [{ requests: 4, executed: 1, differed: 3, newKeys: 1 }],
  })
  const told = await command(['report', '--log', wrapped])
  t.match(told.out, /^[45] lines of shadow mode cannot be read\.$/m)
  const nothing = await command(['report', '--log', empty])
  t.equal(nothing.code, 1)
  t.match(nothing.out, /^0 lines of shadow mode in that time\.\nNo line has a time: is it a proxy log/m)
})

void t.test('control characters in a route name from the log do not reach a terminal', async (t) => {
  const log = join(tempDir(t), 'proxy.log')
  writeFileSync(log, line(1000, { route: 'a\u001b]0;x\u0007' }))
  // CSV is for programs, which read it as it is.
  for (const format of ['text', 'json', 'csv', 'markdown'])
    if (format !== 'csv')
      t.notMatch(
        (await command(['report', '--log', log, '--format', format])).out.replaceAll('\n', ''),
        /\p{Cc}/u,
        format,
      )
})

void t.test('every verdict is known, and report --log refuses a missing file', async (t) => {
  t.ok(namesOf(SHADOW_VERDICTS).every(isVerdict))
  t.notOk(isVerdict('toString'))
  const none = join(tempDir(t), 'none')
  t.match(await command(['report', '--log', none]), { code: 1, out: '', err: /ENOENT/ })
})

t.test('O06 inspect and report count the duplicates that shadow mode forwarded, even later', async (t) => {
  const shadow = 'defaults: { mode: shadow, key: required }'
  const { proxy, upstream, where, dir } = await operated(t, redis.url, shadow)
  const key = newKey()
  const asked = ['--caller', 'authorization: Bearer alice', '--method', 'POST', '--path', '/pay']
  const inspect = async (...from: readonly string[]): Promise<string> =>
    (await command(['inspect', key, ...asked, ...from])).out
  await send(proxy, key)
  await metricIs(proxy, 'idempotency_shadow_total{route="pay",verdict="first"}', 1)
  await until(async () => (await inspect(...where.admin)).includes('verdict=first'))
  t.match(await inspect(...where.admin), /\nIt was executed at least once, and sent upstream at least once\./)
  await send(proxy, key)
  await send(proxy, key)
  await send(proxy, key, { body: '{"amount":2}' })
  t.equal(upstream.seen.length, 4)
  await until(async () => (await inspect(...where.admin)).includes('verdict=misuse'))

  const executed = /\nIt was executed at least once, and sent upstream at least 3 times\./
  const besides =
    /\n2 duplicates were forwarded in shadow mode and may also have been executed; .*\n1 request with this key but different content was forwarded in shadow mode\./
  for (const from of [where.admin, where.config]) {
    const told = await inspect(...from)
    t.match(told, executed)
    t.match(told, besides)
    t.match(told, /\nattempts +1 .*, and at least 2 duplicates in shadow mode\n/)
    t.match(told, /shadowed +2 +.*verdict=replay_same/)
    t.match(told, /is in mode shadow: retries are executed again/)
    t.notMatch(told, /executed once|is not executed|Retries get it/)
  }
  const view = JSON.parse(await inspect('--json', ...where.admin)) as FullView
  t.match(view, { attempts: 1, shadowed: { duplicates: 2, misuse: 1 } })
  const alone = (await command(['inspect', view.id, '--store', redis.url, '--service', SERVICE])).out
  t.match(alone, executed)
  t.match(alone, /What to do:\nNothing, if the route is in mode enforce/)
  const report = JSON.parse((await command(['report', '--format', 'json', ...where.admin])).out) as Report
  t.match(report.period, [{ route: 'pay', records: 1, executed: 1, attempts: 3, prevented: 0 }])

  await proxy.drain()
  const file = join(dir, 'proxy.yaml')
  writeFileSync(file, readFileSync(file, 'utf8').replace(shadow, ''))
  const enforce = await proxyInProcess(readFileSync(file, 'utf8'))
  t.teardown(() => enforce.drain())
  t.equal((await send(enforce, key)).replayed, true)
  t.equal(upstream.seen.length, 4)
  await until(async () => (await inspect(...where.config)).includes('replayed'))
  const after = await inspect(...where.config)
  t.match(after, executed)
  t.match(after, besides)
  t.match(
    after,
    /\n1 retry was answered without executing: [^]*Nothing\. A retry with the same key is not executed\.\n$/,
  )
})

void t.test('shadow counts as duplicates what enforce would have answered without executing', async (t) => {
  const duplicates = namesOf(SHADOW_VERDICTS).filter(isDuplicate)
  t.equal(
    duplicates.join(),
    'replay_same,replay_differs,not_compared,response_unavailable,in_progress,waited,unknown,expired',
  )
  for (const strange of [null, 1, 'toString']) t.notOk(isDuplicate(strange))
})
