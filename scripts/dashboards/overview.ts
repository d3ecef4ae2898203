import type { Dashboard } from '@grafana/grafana-foundation-sdk/dashboard'
import { dashboard, type Row } from './frame.ts'
import { PROCESS, STORE } from './machinery.ts'
import { graph, stat } from './panels.ts'
import { anyOf, increase, of, ofProcess, quantile, rate, shared, some } from './queries.ts'

/** Faults of the proxy, its store and its upstream. Clients' are on the dashboard Safety. */
const ERRORS = anyOf('error')

const GLANCE: Row = {
  title: 'At a glance',
  panels: [
    stat({
      title: 'Protected requests',
      description: 'Requests with a key, per second, however they were answered.',
      unit: 'reqps',
      width: 4,
      queries: [{ expr: rate('idempotency_requests_total', '', 'outcome!="passed"'), legend: 'requests' }],
    }),
    stat({
      title: 'Duplicates prevented',
      description: 'Requests that would have been executed again without the proxy, in the time shown.',
      unit: 'short',
      width: 4,
      queries: [{ expr: increase('idempotency_duplicates_prevented_total'), legend: 'prevented' }],
    }),
    stat({
      title: 'Outcomes unknown now',
      description:
        'Records of which nobody knows yet whether they were executed. More on the dashboard Safety.',
      unit: 'short',
      width: 4,
      limits: { yellow: 1 },
      queries: [{ expr: shared(of('idempotency_records', 'state="unknown"')), legend: 'unknown' }],
    }),
    stat({
      title: 'Store',
      description: 'Whether the last operation of every replica was answered.',
      unit: 'none',
      width: 4,
      limits: { yellow: 1, red: 2 },
      called: { 0: 'up', 1: 'down' },
      queries: [{ expr: `1 - min (${of('idempotency_store_up')})`, legend: 'store' }],
    }),
    stat({
      title: 'Replicas',
      description: 'Processes that Prometheus reaches.',
      unit: 'short',
      width: 4,
      queries: [{ expr: `count (${of('idempotency_build_info')})`, legend: 'replicas' }],
    }),
    stat({
      title: 'Last reload',
      description: 'Whether every replica has taken the configuration that it was given last.',
      unit: 'none',
      width: 4,
      limits: { red: 1 },
      called: { 0: 'taken', 1: 'refused' },
      queries: [
        {
          expr: `1 - min (${ofProcess('idempotency_config_last_reload_successful')})`,
          legend: 'reload',
        },
      ],
    }),
  ],
}

const TRAFFIC: Row = {
  title: 'Traffic and outcomes',
  panels: [
    graph({
      title: 'Requests by outcome',
      description:
        'How requests were answered. executed went to the upstream, replayed and waited got the first answer again.',
      unit: 'reqps',
      width: 12,
      stacked: true,
      queries: [{ expr: some(rate('idempotency_requests_total', 'outcome')), legend: '{{outcome}}' }],
    }),
    graph({
      title: 'Requests by route',
      description: 'All requests of a route, those without a key included.',
      unit: 'reqps',
      width: 12,
      stacked: true,
      queries: [{ expr: some(rate('idempotency_requests_total', 'route')), legend: '{{route}}' }],
    }),
    graph({
      title: 'Claims by result',
      description:
        'What requests with a key found in the store: created is a new key, replay a finished record.',
      unit: 'ops',
      width: 12,
      queries: [{ expr: some(rate('idempotency_claims_total', 'result')), legend: '{{result}}' }],
    }),
    graph({
      title: 'Outcomes by what became of them',
      description: 'stored and released are the rule. The others are on the dashboard Safety.',
      unit: 'ops',
      width: 12,
      queries: [{ expr: some(rate('idempotency_completions_total', 'result')), legend: '{{result}}' }],
    }),
  ],
}

const DUPLICATES: Row = {
  title: 'Prevented duplicates',
  panels: [
    graph({
      title: 'Duplicates prevented by route',
      description: 'Requests that were not executed again.',
      unit: 'reqps',
      width: 8,
      queries: [{ expr: some(rate('idempotency_duplicates_prevented_total', 'route')), legend: '{{route}}' }],
    }),
    graph({
      title: 'Share of duplicates by route',
      description: 'Prevented duplicates by protected requests. Over 5 % something makes clients retry.',
      unit: 'percentunit',
      width: 8,
      queries: [
        {
          expr: `${rate('idempotency_duplicates_prevented_total', 'route')} / (${some(rate('idempotency_requests_total', 'route', 'outcome!="passed"'))})`,
          legend: '{{route}}',
        },
      ],
    }),
    graph({
      title: 'Under way',
      description: 'Protected requests that run, and duplicates that are held until the first has finished.',
      unit: 'short',
      width: 8,
      queries: [
        { expr: `sum (${of('idempotency_in_flight')})`, legend: 'in flight' },
        { expr: `sum (${of('idempotency_waiters')})`, legend: 'waiting duplicates' },
      ],
    }),
  ],
}

const LATENCY: Row = {
  title: 'Latency and overhead',
  panels: [
    graph({
      title: 'Duration of executed requests',
      description: 'From the head of the request to the answer, the upstream included.',
      unit: 's',
      width: 8,
      queries: [0.5, 0.95, 0.99].map((share) => ({
        expr: quantile(share, 'idempotency_request_duration_seconds', '', 'outcome="executed"'),
        legend: `p${share * 100}`,
      })),
    }),
    graph({
      title: 'Overhead of executed requests',
      description: 'The same without the upstream: the proxy, its store, and the arrival of the body.',
      unit: 's',
      width: 8,
      queries: [0.5, 0.95, 0.99].map((share) => ({
        expr: quantile(share, 'idempotency_overhead_seconds', '', 'outcome="executed"'),
        legend: `p${share * 100}`,
      })),
    }),
    graph({
      title: 'Overhead of replays',
      description: 'How long a retry takes that gets the stored answer.',
      unit: 's',
      width: 8,
      queries: [0.5, 0.95, 0.99].map((share) => ({
        expr: quantile(share, 'idempotency_overhead_seconds', '', 'outcome="replayed"'),
        legend: `p${share * 100}`,
      })),
    }),
    graph({
      title: 'Duration by route, slowest hundredth',
      description: 'p99 of executed requests.',
      unit: 's',
      width: 12,
      queries: [
        {
          expr: quantile(0.99, 'idempotency_request_duration_seconds', 'route', 'outcome="executed"'),
          legend: '{{route}}',
        },
      ],
    }),
    graph({
      title: 'Overhead by route, slowest hundredth',
      description: 'p99 of executed and replayed requests.',
      unit: 's',
      width: 12,
      queries: [
        {
          expr: quantile(0.99, 'idempotency_overhead_seconds', 'route', 'outcome=~"executed|replayed"'),
          legend: '{{route}}',
        },
      ],
    }),
  ],
}

const FAULTS: Row = {
  title: 'Errors',
  panels: [
    graph({
      title: 'Errors by outcome',
      description: 'Requests that the proxy answered itself because something failed or a bound was reached.',
      unit: 'reqps',
      width: 12,
      queries: [{ expr: some(rate('idempotency_requests_total', 'outcome', ERRORS)), legend: '{{outcome}}' }],
    }),
    graph({
      title: 'Share of errors by route',
      description: 'The same, by all protected requests of the route.',
      unit: 'percentunit',
      width: 12,
      queries: [
        {
          expr: `${rate('idempotency_requests_total', 'route', ERRORS)} / (${some(rate('idempotency_requests_total', 'route', 'outcome!="passed"'))})`,
          legend: '{{route}}',
        },
      ],
    }),
  ],
}

/** Is it well, and what does it do? */
export function overview(): Dashboard {
  return dashboard({
    uid: 'idempotency-proxy-overview',
    title: 'idempotency-proxy / Overview',
    description: 'Traffic and outcomes, prevented duplicates, latency and overhead, errors, store.',
    rows: [GLANCE, TRAFFIC, DUPLICATES, LATENCY, FAULTS, STORE, PROCESS],
  })
}
