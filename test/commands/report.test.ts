import t from 'tap'
import { Value } from 'typebox/value'
import { type Report, reportSchema } from '../../src/admin/report.ts'
import { words } from '../core/fixtures.ts'
import { command, operated } from '../support/commands.ts'
import { newKey, send, until } from '../support/e2e.ts'
import { emptyRedis } from '../support/redis.ts'

t.setTimeout(200_000)

const redis = await emptyRedis(t)

/** Zeros except for these. */
function row(route: string, figures: Readonly<Record<string, number>>) {
  const names = words`records executed expired notExecuted running unknown attempts replayed prevented misuse lapsed
    recovered stale reconciled resolved`
  return { route, ...Object.fromEntries(names.map((name) => [name, 0])), ...figures }
}

void t.test('O04 report counts by route what was executed, replayed, prevented, and so on', async (t) => {
  const { proxy, where, finish, unknown, upstream } = await operated(t, redis.url)
  const [paid, cut, busy] = [newKey(), newKey(), newKey()]
  for (let n = 0; n < 4; n++) await send(proxy, paid)
  await send(proxy, paid, { body: '{"amount":2}' })
  await unknown(cut)
  const other = await unknown()
  await send(proxy, cut, { path: '/break' })
  for (let n = 0; n < 2; n++) await send(proxy, busy, { path: '/busy' })
  const running = send(proxy, newKey(), { path: '/gated' })
  await upstream.arrived(6)
  await command(['resolve', other, '--retryable', '--reason', 'x', '--yes', ...where.admin])

  const ask = async (way: 'admin' | 'config', ...words: string[]): Promise<Report> => {
    const { code, out, err } = await command(['report', '--json', ...words, ...where[way]])
    t.strictSame([code, err], [0, ''])
    return JSON.parse(out) as Report
  }
  await until(async () => {
    const { period } = await ask('admin')
    return period.some((row) => row.resolved === 1) && period.some((row) => row.misuse === 1)
  })
  const report = await ask('admin')
  t.strictSame([...Value.Errors(reportSchema, report)], [], 'matches its schema')
  t.match(report, { looked: 5, complete: true, unreadable: 0 })
  t.equal(Date.parse(report.now) - Date.parse(report.since), 86_400_000, '24h by default')
  t.strictSame(report.period, [
    row('break', { records: 2, notExecuted: 1, unknown: 1, attempts: 2, prevented: 1, resolved: 1 }),
    row('default', { records: 2, notExecuted: 1, running: 1, attempts: 3 }),
    row('pay', { records: 1, executed: 1, attempts: 1, replayed: 3, prevented: 3, misuse: 1 }),
  ])
  t.strictSame(report.unknown, [
    { route: 'break', under1h: 1, under1d: 0, under7d: 0, older: 0, deadLettered: 0 },
  ])
  t.match(report.counted?.routes, [
    { route: 'break', executed: 0, prevented: 1, unknown: 2 },
    { route: 'default', executed: 2, replayed: 0 },
    { route: 'pay', executed: 1, replayed: 3, prevented: 3, misuse: 1, unknown: 0 },
  ])
  t.ok(Date.parse(report.counted?.since ?? '') <= Date.parse(report.now))

  const direct = await ask('config')
  t.strictSame([direct.period, direct.unknown, direct.counted], [report.period, report.unknown, null])
  await until(async () => (await ask('config', '--since', '1ms')).period.length === 0)
  const late = await ask('config', '--since', '1ms')
  t.strictSame(late.unknown, report.unknown, 'what is unknown does not depend on the period')
  const text = await command(['report', ...where.admin])
  t.match(text.out, /\nbreak +2 +0 +0 +1 +0 +1 +2 +0 +1 +0/)
  t.match(text.out, /\nUnknown now, whenever created, by age\nROUTE +UNDER1H .*\nbreak +1 +0 +0 +0 +0\n/)
  t.match(text.out, /\nCounted by this one proxy since it started, /)
  t.match(
    (await command(['report', '--format', 'csv', ...where.admin])).out,
    /\r\nunknown,break,under1h,1\r\n/,
  )
  t.match(
    (await command(['report', '--format', 'markdown', ...where.admin])).out,
    /\n\| break \| 1 \| 0 \| 0 \| 0 \| 0 \|\n/,
  )
  for (const since of ['0', 'yesterday', '1'])
    t.match(await command(['report', '--since', since, ...where.admin]), {
      code: 2,
      err: /--since: a duration of more than 0, such as 90m, 24h or 7d/,
    })
  finish()
  await running
})
