import { readFileSync } from 'node:fs'
import t from 'tap'
import { DASHBOARDS, rendered } from '../../scripts/dashboards.ts'
import { unknownTo } from '../support/known-metrics.ts'

interface Panel {
  readonly id: number
  readonly type: string
  readonly title: string
  readonly description?: string
  readonly gridPos: { readonly x: number; readonly y: number; readonly w: number; readonly h: number }
  readonly datasource: unknown
  readonly fieldConfig: { readonly defaults: { readonly unit?: string } }
  readonly targets: readonly {
    readonly expr: string
    readonly datasource: unknown
    readonly instant?: boolean
    readonly legendFormat: string
  }[]
}
interface Dashboard {
  readonly uid: string
  readonly editable: boolean
  readonly templating: { readonly list: readonly Record<string, unknown>[] }
  readonly panels: readonly Panel[]
}

const SOURCE = { type: 'prometheus', uid: '${datasource}' }

for (const name of Object.keys(DASHBOARDS) as (keyof typeof DASHBOARDS)[]) {
  const text = readFileSync(new URL(`../../dashboards/${name}.json`, import.meta.url), 'utf8')
  const dashboard = JSON.parse(text) as Dashboard
  const panels = dashboard.panels.filter(({ type }) => type !== 'row')

  void t.test(`dashboards/${name}.json is what its code makes`, async (t) => {
    t.ok(text === rendered(name), 'run: node scripts/dashboards.ts')
  })

  // The rules of Grafana's dashboard-linter, by their names. The linter is a Go program, which npm does not have.
  void t.test(`${name} follows the rules of the dashboard-linter`, async (t) => {
    t.equal(dashboard.editable, false, 'uneditable-dashboard-rule')
    const variables = new Map(dashboard.templating.list.map((one) => [one['name'], one]))
    t.same([...variables.keys()], ['datasource', 'job', 'namespace', 'instance', 'route'])
    t.match(variables.get('datasource'), { type: 'datasource', query: 'prometheus', label: 'Data source' })
    for (const [variable, label] of [
      ['job', 'Job'],
      ['instance', 'Instance'],
    ])
      t.match(
        variables.get(variable),
        { type: 'query', label, multi: true, allValue: '.+', datasource: SOURCE },
        `template-${variable}-rule`,
      )
    for (const variable of ['job', 'namespace', 'instance', 'route'])
      t.match(
        variables.get(variable),
        { refresh: 2, includeAll: true, datasource: SOURCE },
        `${variable}: template-on-time-change-reload-rule`,
      )
    t.ok(panels.length > 15)
    for (const { title, description, type, datasource, fieldConfig, targets } of panels) {
      t.ok(title && description && description.length > 20, `${title}: panel-title-description-rule`)
      t.same(datasource, SOURCE, `${title}: panel-datasource-rule`)
      t.match(
        fieldConfig.defaults.unit,
        /^(?:none|short|percentunit|s|bytes|reqps|ops)$/,
        `${title}: panel-units-rule`,
      )
      t.ok(targets.length > 0, `${title}: panel-no-targets-rule`)
      for (const { expr, datasource, instant, legendFormat } of targets) {
        t.same(datasource, SOURCE)
        t.ok(legendFormat, `${title}: a legend`)
        t.equal(
          instant === true,
          type !== 'timeseries',
          `${title}: single figures query an instant, graphs a range`,
        )
        for (const [selector = ''] of expr.matchAll(/\b(?:idempotency|process|nodejs)_\w+(?:\{[^}]*\})?/g)) {
          t.match(selector, /\{.*job=~"\$job"/, `${title}: target-job-rule`)
          t.match(selector, /\{.*instance=~"\$instance"/, `${title}: target-instance-rule`)
          t.match(selector, /\{.*namespace=~"\$namespace"/, `${title}: by namespace`)
          const labelled =
            /^idempotency_(?:requests|claims|completions|duplicates|request_|overhead|lease|reconcile|unresolved|retry|shadow|regenerated|caller)/
          if (labelled.test(selector)) t.match(selector, /route=~"\$route"/, `${title}: by route`)
        }
        for (const [, call, range] of expr.matchAll(/(\w+)\s*\((?:\w+\{[^}]*\})\[([^\]]+)\]/g)) {
          if (call === 'rate' || call === 'irate')
            t.equal(range, '$__rate_interval', `${title}: target-rate-interval-rule`)
          else t.same([call, range, type === 'timeseries'], ['increase', '$__range', false], title)
        }
        for (const [, before = '', counter] of expr.matchAll(
          /(\w*)\(?\b(\w+(?:_total|_bucket|_count|_sum))\{/g,
        ))
          t.match(before, /^(?:rate|increase)$/, `${title}: ${counter}: target-counter-agg-rule`)
      }
    }
  })

  void t.test(`${name} uses only metrics, labels and values that a proxy has`, async (t) => {
    for (const { title, targets } of panels)
      for (const { expr } of targets) t.same(unknownTo(expr), [], `${title}: ${expr}`)
    for (const { query } of dashboard.templating.list)
      if (typeof query === 'object') t.same(unknownTo((query as { query: string }).query), [])
  })

  void t.test(`${name}: panels have their own ids and places`, async (t) => {
    const taken = new Set<string>()
    const ids = new Set<number>()
    for (const { id, title, gridPos } of dashboard.panels) {
      t.notOk(ids.has(id), `${title}: a unique id`)
      ids.add(id)
      const { x, y, w, h } = gridPos
      t.ok(x + w <= 24, `${title} is within the grid`)
      for (let i = x; i < x + w; i++)
        for (let j = y; j < y + h; j++) {
          if (taken.has(`${i} ${j}`)) t.fail(`${title} lies over another panel at ${i} ${j}`)
          taken.add(`${i} ${j}`)
        }
    }
  })
}

void t.test('unknownTo finds metrics, labels and values that no proxy has', async (t) => {
  t.same(unknownTo('sum by (rout) (rate(idempotency_request_total{job="x"}[5m]))'), [
    'idempotency_request_total',
    'by (rout)',
  ])
  t.same(unknownTo('idempotency_requests_total{outcome=~"executed|reply"}'), [
    'idempotency_requests_total{outcome="reply"}',
  ])
  t.same(unknownTo('idempotency_store_up{route="x"} + idempotency_in_flight_count'), [
    'idempotency_store_up{route}',
    'idempotency_in_flight_count',
  ])
})
