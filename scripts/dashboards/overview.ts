import type { Dashboard } from '@grafana/grafana-foundation-sdk/dashboard'
import { dashboard, type Row } from './frame.ts'
import { PROCESS, STORE } from './machinery.ts'
import { graph, stat } from './panels.ts'
import { anyOf, increase, of, ofProcess, quantile, rate, shared, some } from './queries.ts'

/** Faults of the proxy, its store and its upstream. The Safety dashboard has those of clients. */
const ERRORS = anyOf('error')

const GLANCE: Row = {
  title: 'At a glance',
  panels: [
    stat({
      title: 'Protected requests',
      description: 'Requests with a key, per second, whatever the answer.',
      unit: 'reqps',
      width: 4,
      queries: [{ expr: rate('idempotency_requests_total', '', 'outcome!="passed"'), legend: 'requests' }],
    }),
    stat({
      title: 'Duplicates prevented',
      description:
        'Requests that would have been executed twice without the proxy, in the selected time range.',
      unit: 'short',
      width: 4,
      queries: [{ expr: increase('idempotency_duplicates_prevented_total'), legend: 'prevented' }],
    }),
    stat({
      title: 'Unknown outcomes',
      description: 'Records that may or may not have been executed. Details on the Safety dashboard.',
      unit: 'short',
      width: 4,
      limits: { yellow: 1 },
      queries: [{ expr: shared(of('idempotency_records', 'state="unknown"')), legend: 'unknown' }],
    }),
    stat({
      title: 'Store',
      description: 'Up if the last operation of every replica was answered.',
      unit: 'none',
      width: 4,
      limits: { yellow: 1, red: 2 },
      names: { 0: 'up', 1: 'down' },
      queries: [{ expr: `1 - min (${of('idempotency_store_up')})`, legend: 'store' }],
    }),
    stat({
      title: 'Replicas',
      description: 'Replicas that Prometheus scrapes.',
      unit: 'short',
      width: 4,
      queries: [{ expr: `count (${of('idempotency_build_info')})`, legend: 'replicas' }],
    }),
    stat({
      title: 'Last reload',
      description: 'Whether every replica accepted the latest configuration.',
      unit: 'none',
      width: 4,
      limits: { red: 1 },
      names: { 0: 'accepted', 1: 'refused' },
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
        'How requests were answered. executed went upstream; replayed and waited received the stored response.',
      unit: 'reqps',
      width: 12,
      stacked: true,
      queries: [{ expr: some(rate('idempotency_requests_total', 'outcome')), legend: '{{outcome}}' }],
    }),
    graph({
      title: 'Requests by route',
      description: 'All requests of a route, including those without a key.',
      unit: 'reqps',
      width: 12,
      stacked: true,
      queries: [{ expr: some(rate('idempotency_requests_total', 'route')), legend: '{{route}}' }],
    }),
    graph({
      title: 'Claims by result',
      description:
        'What requests with a key found in the store: created is a new key, replay a completed record.',
      unit: 'ops',
      width: 12,
      queries: [{ expr: some(rate('idempotency_claims_total', 'result')), legend: '{{result}}' }],
    }),
    graph({
      title: 'Completions by result',
      description:
        'How outcomes were recorded. stored and released are normal; the others are on the Safety dashboard.',
      unit: 'ops',
      width: 12,
      queries: [{ expr: some(rate('idempotency_completions_total', 'result')), legend: '{{result}}' }],
    }),
  ],
}

const DUPLICATES: Row = {
  title: 'Duplicates',
  panels: [
    graph({
      title: 'Duplicates prevented by route',
      description: 'Requests that were not executed a second time.',
      unit: 'reqps',
      width: 8,
      queries: [{ expr: some(rate('idempotency_duplicates_prevented_total', 'route')), legend: '{{route}}' }],
    }),
    graph({
      title: 'Duplicate ratio by route',
      description:
        'Prevented duplicates divided by protected requests. Above 5 % something makes clients retry.',
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
      title: 'In progress',
      description: 'Protected requests in flight, and duplicates waiting for the first request to finish.',
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
      description: 'From the request head to the end of the response, including the upstream.',
      unit: 's',
      width: 8,
      queries: [0.5, 0.95, 0.99].map((share) => ({
        expr: quantile(share, 'idempotency_request_duration_seconds', '', 'outcome="executed"'),
        legend: `p${share * 100}`,
      })),
    }),
    graph({
      title: 'Overhead of executed requests',
      description: 'The same without the upstream: proxy, store, and arrival of the body.',
      unit: 's',
      width: 8,
      queries: [0.5, 0.95, 0.99].map((share) => ({
        expr: quantile(share, 'idempotency_overhead_seconds', '', 'outcome="executed"'),
        legend: `p${share * 100}`,
      })),
    }),
    graph({
      title: 'Overhead of replays',
      description: 'How long a retry waits for the stored response.',
      unit: 's',
      width: 8,
      queries: [0.5, 0.95, 0.99].map((share) => ({
        expr: quantile(share, 'idempotency_overhead_seconds', '', 'outcome="replayed"'),
        legend: `p${share * 100}`,
      })),
    }),
    graph({
      title: 'Duration by route (p99)',
      description: 'Executed requests, including the upstream.',
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
      title: 'Overhead by route (p99)',
      description: 'Executed and replayed requests, without the upstream.',
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
      description: 'Requests that the proxy answered itself because something failed or a limit was reached.',
      unit: 'reqps',
      width: 12,
      queries: [{ expr: some(rate('idempotency_requests_total', 'outcome', ERRORS)), legend: '{{outcome}}' }],
    }),
    graph({
      title: 'Error ratio by route',
      description: 'Errors divided by protected requests of the route.',
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

/** Is it healthy, and what does it do? */
export function overview(): Dashboard {
  return dashboard({
    uid: 'idempotency-proxy-overview',
    title: 'idempotency-proxy / Overview',
    description: 'Traffic and outcomes, duplicates, latency and overhead, errors, store, process.',
    rows: [GLANCE, TRAFFIC, DUPLICATES, LATENCY, FAULTS, STORE, PROCESS],
  })
}
