import type { Builder } from '@grafana/grafana-foundation-sdk/cog'
import {
  type Dashboard,
  DashboardBuilder,
  DashboardCursorSync,
  DashboardLinkBuilder,
  DashboardLinkType,
  DatasourceVariableBuilder,
  type Panel,
  QueryVariableBuilder,
  RowBuilder,
  VariableRefresh,
  VariableSort,
} from '@grafana/grafana-foundation-sdk/dashboard'
import { DATASOURCE } from './panels.ts'
import { of } from './queries.ts'

export interface Row {
  readonly title: string
  readonly panels: readonly Builder<Panel>[]
}

export interface Frame {
  /** Never changes: links and provisioning use it. */
  readonly uid: string
  readonly title: string
  readonly description: string
  readonly rows: readonly Row[]
}

const TAG = 'idempotency-proxy'

/** What all dashboards share: variables, links between them, time range. */
export function dashboard({ uid, title, description, rows }: Frame): Dashboard {
  const builder = new DashboardBuilder(title)
    .uid(uid)
    .description(description)
    .tags([TAG])
    .readonly()
    .timezone('browser')
    .time({ from: 'now-1h', to: 'now' })
    .refresh('30s')
    .tooltip(DashboardCursorSync.Crosshair)
    .link(
      new DashboardLinkBuilder('idempotency-proxy')
        .type(DashboardLinkType.Dashboards)
        .tags([TAG])
        .includeVars(true)
        .keepTime(true),
    )
    .withVariable(new DatasourceVariableBuilder('datasource').label('Data source').type('prometheus'))
  for (const variable of VARIABLES) builder.withVariable(queryVariable(variable))
  for (const { title, panels } of rows) {
    builder.withRow(new RowBuilder(title))
    for (const panel of panels) builder.withPanel(panel)
  }
  const built = builder.build()
  for (const [n, panel] of (built.panels ?? []).entries()) panel.id = n + 1
  return built
}

interface Variable {
  readonly name: string
  readonly label: string
  readonly description: string
  readonly query: string
  /** Matches if nothing is selected. A label that may be missing needs `.*`. */
  readonly all: '.+' | '.*'
}

const VARIABLES: readonly Variable[] = [
  {
    name: 'job',
    label: 'Job',
    description: 'Prometheus job: one per deployment.',
    query: 'label_values(idempotency_build_info, job)',
    all: '.+',
  },
  {
    name: 'namespace',
    label: 'Namespace',
    description: 'Kubernetes namespace, if any.',
    query: 'label_values(idempotency_build_info{job=~"$job"}, namespace)',
    all: '.*',
  },
  {
    name: 'instance',
    label: 'Instance',
    description: 'Replica.',
    query: 'label_values(idempotency_build_info{job=~"$job", namespace=~"$namespace"}, instance)',
    all: '.+',
  },
  {
    name: 'route',
    label: 'Route',
    description: 'Configured routes; default is everything that no route matches.',
    query: `label_values(${of('idempotency_retention_seconds').replace(', route=~"$route"', '')}, route)`,
    all: '.+',
  },
]

function queryVariable({ name, label, description, query, all }: Variable): QueryVariableBuilder {
  return new QueryVariableBuilder(name)
    .label(label)
    .description(description)
    .datasource(DATASOURCE)
    .query({ query, refId: `variable-${name}` })
    .definition(query)
    .multi(true)
    .includeAll(true)
    .allValue(all)
    .current({ selected: true, text: 'All', value: '$__all' })
    .refresh(VariableRefresh.OnTimeRangeChanged)
    .sort(VariableSort.AlphabeticalAsc)
}
