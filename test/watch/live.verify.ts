import { spawnSync } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { setTimeout as wait } from 'node:timers/promises'
import t from 'tap'
import { parse, stringify } from 'yaml'
import { DASHBOARDS } from '../../scripts/dashboards.ts'
import { RULES, RULES_FILE } from '../support/alerts.ts'
import { Prometheus, WITHOUT } from '../support/prometheus.ts'
import { trouble } from '../support/trouble.ts'

// Outages, leases and backoffs take time.
t.setTimeout(240_000)

interface Panel {
  readonly type: string
  readonly title: string
  readonly targets: readonly { readonly expr: string; readonly instant?: boolean }[]
}
interface Compose {
  readonly global: Record<string, string>
  rule_files: string[]
  readonly scrape_configs: { dns_sd_configs?: unknown; static_configs?: unknown }[]
}

/** The configuration of docker-compose.yml, scraping every second, with these targets and the rules of this checkout. */
function configuration(targets: readonly string[]): string {
  const file = new URL('../../examples/compose/prometheus.yml', import.meta.url)
  const config = parse(readFileSync(file, 'utf8')) as Compose
  for (const name of Object.keys(config.global)) config.global[name] = '1s'
  config.rule_files = [RULES_FILE]
  const [scrape] = config.scrape_configs
  if (scrape?.dns_sd_configs === undefined) throw new Error('no scrape_configs with dns_sd_configs')
  delete scrape.dns_sd_configs
  scrape.static_configs = [{ targets, labels: { namespace: 'shop' } }]
  return stringify(config)
}

/** Grafana's own variables as for a scrape every second over the whole test; `All` for the others. */
function substituted(expr: string, range: number): string {
  return expr
    .replaceAll('$__rate_interval', '4s')
    .replaceAll('$__range', `${range}s`)
    .replaceAll('$namespace', '.*')
    .replaceAll(/\$(?:job|instance|route)/g, '.+')
}

void t.test('dashboards and alerts work on a real Prometheus', { skip: WITHOUT }, async (t) => {
  const { targets, metrics, run } = await trouble(t)
  await using prometheus = await Prometheus.start(configuration(targets))
  const start = Math.floor(Date.now() / 1000)
  const scraped = async () => (await prometheus.query('count(idempotency_build_info)', Date.now() / 1000))[0]
  while ((await scraped())?.values[0] !== targets.length - 1) await wait(200)
  await run()
  const end = Math.ceil(Date.now() / 1000)

  for (const [name, make] of Object.entries(DASHBOARDS))
    await t.test(`every query of the dashboard ${name} returns data`, async (t) => {
      const { panels } = make() as unknown as { panels: Panel[] }
      for (const { type, title, targets } of panels.filter(({ type }) => type !== 'row'))
        for (const { expr, instant } of targets) {
          const query = substituted(expr, end - start)
          t.notMatch(query, /\$/, `${title}: every variable is known`)
          const series = await (instant ? prometheus.query(query, end) : prometheus.range(query, start, end))
          const values = series.flatMap(({ values }) => values)
          t.ok(values.length > 0, `${title}: data for ${query}`)
          if (type === 'timeseries')
            t.ok(
              values.some((value) => value > 0),
              `${title}: it happened, and the panel shows it`,
            )
          t.ok(
            values.every((value) => value >= 0),
            `${title}: nothing below 0`,
          )
        }
    })

  await t.test('every rule is evaluated, and alerts that fire at once have fired', async (t) => {
    const { groups } = (await prometheus.get('rules')) as {
      groups: { rules: { name: string; health: string; lastError?: string }[] }[]
    }
    const rules = groups.flatMap((group) => group.rules)
    t.equal(rules.length, RULES.length)
    for (const { name, health, lastError } of rules) t.equal(health, 'ok', `${name} ${lastError ?? ''}`)
    const rung = await prometheus.range('ALERTS{alertstate="firing"}', start, end)
    const names = new Set(rung.map(({ metric }) => metric['alertname']))
    for (const name of `
      IdempotencyDeadLettered IdempotencyOrphaned IdempotencyUnresolvedExpiring
      IdempotencyOutcomeRecovered IdempotencyOutcomeStale
    `
      .trim()
      .split(/\s+/))
      t.ok(names.has(name), name)
    t.notOk(names.has('IdempotencyAbsent'))
  })

  await t.test('promtool has no complaint about the metrics of this program', async (t) => {
    const input = await (await fetch(`${metrics.adminUrl}/metrics`)).text()
    const { stdout, stderr, status } = spawnSync('promtool', ['check', 'metrics'], {
      input,
      encoding: 'utf8',
    })
    const said = `${stdout}${stderr}`.split('\n').filter((line) => line.startsWith('idempotency_'))
    t.same(said, [])
    t.ok(status === 0 || status === 3, `readable: ${stderr}`)
  })
})
