import type { Dashboard } from '@grafana/grafana-foundation-sdk/dashboard'
import { dashboard, type Row } from './frame.ts'
import { buckets, graph, stat } from './panels.ts'
import { anyOf, increase, of, quantile, rate, shared, some } from './queries.ts'

const protectedRequests = some(rate('idempotency_requests_total', 'route', 'outcome!="passed"'))

const PERSON: Row = {
  title: 'Needs attention',
  panels: [
    stat({
      title: 'Dead-lettered',
      description:
        'Records that the reconciler has given up on: a person has to decide. Alert: IdempotencyDeadLettered.',
      unit: 'short',
      width: 4,
      limits: { red: 1 },
      queries: [{ expr: shared(of('idempotency_records', 'state="dead_lettered"')), legend: 'records' }],
    }),
    stat({
      title: 'Unknown',
      description: 'Records whose outcome is unknown, without dead-lettered ones.',
      unit: 'short',
      width: 4,
      limits: { yellow: 1 },
      queries: [{ expr: shared(of('idempotency_records', 'state="unknown"')), legend: 'records' }],
    }),
    stat({
      title: 'Expired leases',
      description:
        'Requests whose replica died or hung, in the selected time range. Alert: IdempotencyOrphaned.',
      unit: 'short',
      width: 4,
      limits: { red: 1 },
      queries: [{ expr: increase('idempotency_lease_expired_total'), legend: 'leases' }],
    }),
    stat({
      title: 'Outcomes not stored',
      description:
        'Executed, but the store has not accepted the outcome yet. Alert: IdempotencyOutcomesNotStored.',
      unit: 'short',
      width: 4,
      limits: { red: 1 },
      queries: [{ expr: `sum (${of('idempotency_spooled')})`, legend: 'outcomes' }],
    }),
    stat({
      title: 'About to be dropped',
      description:
        'Unknown records that reach unresolvedTtl within a day, in the selected time range. Alert: IdempotencyUnresolvedExpiring.',
      unit: 'short',
      width: 4,
      limits: { red: 1 },
      queries: [{ expr: increase('idempotency_unresolved_expiring_total'), legend: 'records' }],
    }),
    stat({
      title: 'Executed without protection',
      description:
        'On routes with onStoreUnavailable: bypass while the store was down, in the selected time range.',
      unit: 'short',
      width: 4,
      limits: { yellow: 1 },
      queries: [
        { expr: increase('idempotency_requests_total', '', 'outcome="bypassed"'), legend: 'requests' },
      ],
    }),
  ],
}

const UNKNOWN: Row = {
  title: 'Unknown outcomes',
  panels: [
    graph({
      title: 'Unresolved records',
      description:
        'Counted in the store once a minute. Every replica counts the same records, so the largest count is shown.',
      unit: 'short',
      width: 8,
      queries: [
        {
          expr: `sum by (state) (max by (job, namespace, state) (${of('idempotency_records')}))`,
          legend: '{{state}}',
        },
      ],
    }),
    graph({
      title: 'New unknown outcomes by route',
      description: 'Sent upstream without a conclusive answer: broken connection, timeout, 502 or 504.',
      unit: 'ops',
      width: 8,
      queries: [
        {
          expr: rate('idempotency_completions_total', 'route', 'result="unknown"'),
          legend: '{{route}}',
        },
      ],
    }),
    graph({
      title: 'Retries refused as unknown',
      description: 'Answered 409 idempotency_outcome_unknown.',
      unit: 'reqps',
      width: 8,
      queries: [
        { expr: rate('idempotency_requests_total', 'route', 'outcome="unknown"'), legend: '{{route}}' },
      ],
    }),
    graph({
      title: 'Reconciliation by result',
      description: 'Results of asking the upstream. Investigate failed and dead_lettered.',
      unit: 'ops',
      width: 12,
      queries: [{ expr: some(rate('idempotency_reconcile_total', 'result')), legend: '{{result}}' }],
    }),
    graph({
      title: 'Dead letters by route',
      description: 'Records that the reconciler has given up on.',
      unit: 'ops',
      width: 12,
      queries: [
        {
          expr: rate('idempotency_reconcile_total', 'route', 'result="dead_lettered"'),
          legend: '{{route}}',
        },
      ],
    }),
  ],
}

const OWNERS: Row = {
  title: 'Leases and late outcomes',
  panels: [
    graph({
      title: 'Expired leases by route',
      description: 'Counted once each, by the replica that found it.',
      unit: 'ops',
      width: 8,
      queries: [{ expr: rate('idempotency_lease_expired_total', 'route'), legend: '{{route}}' }],
    }),
    graph({
      title: 'Lease use by route (p99)',
      description:
        'Upstream time divided by the lease. Above 80 % requests depend on renewals. Alert: IdempotencyLeaseTooShort.',
      unit: 'percentunit',
      width: 8,
      queries: [{ expr: quantile(0.99, 'idempotency_lease_use_ratio', 'route'), legend: '{{route}}' }],
    }),
    graph({
      title: 'Stale outcomes by route',
      description:
        'Refused, because the record had been resolved or claimed again. Alert: IdempotencyOutcomeStale.',
      unit: 'ops',
      width: 8,
      queries: [
        { expr: rate('idempotency_completions_total', 'route', 'result="stale"'), legend: '{{route}}' },
      ],
    }),
    graph({
      title: 'Recovered outcomes by route',
      description:
        'The record was gone when its outcome arrived: the store loses records. Alert: IdempotencyOutcomeRecovered.',
      unit: 'ops',
      width: 8,
      queries: [
        {
          expr: rate('idempotency_completions_total', 'route', 'result="recovered"'),
          legend: '{{route}}',
        },
      ],
    }),
    graph({
      title: 'Deferred outcomes by route',
      description: 'Not accepted by the store at first; written in the background.',
      unit: 'ops',
      width: 8,
      queries: [
        {
          expr: rate('idempotency_completions_total', 'route', 'result="deferred"'),
          legend: '{{route}}',
        },
      ],
    }),
    graph({
      title: 'Responses not kept by route',
      description: 'Over limits.response, or streamed: the request is done, but a retry gets no body.',
      unit: 'ops',
      width: 8,
      queries: [
        {
          expr: rate('idempotency_completions_total', 'route', 'result="too_large"'),
          legend: '{{route}}',
        },
      ],
    }),
  ],
}

const MISUSE: Row = {
  title: 'Clients',
  panels: [
    graph({
      title: 'Misuse by route',
      description: 'Keys first used for a different request. Alert above 0.1 %: IdempotencyMisuseHigh.',
      unit: 'percentunit',
      width: 6,
      queries: [
        {
          expr: `${rate('idempotency_requests_total', 'route', 'outcome="misuse"')} / (${protectedRequests})`,
          legend: '{{route}}',
        },
      ],
    }),
    graph({
      title: 'New key per attempt by route',
      description:
        'The same caller repeated an operation under a new key within a minute: it is executed twice, and no proxy can prevent that.',
      unit: 'reqps',
      width: 6,
      queries: [{ expr: rate('idempotency_regenerated_keys_total', 'route'), legend: '{{route}}' }],
    }),
    graph({
      title: 'Caller changed by route',
      description:
        'The same key and operation came from another caller within ten minutes and was executed again, or a response changed the cookie of its caller. Alert: IdempotencyCallerChanged.',
      unit: 'reqps',
      width: 6,
      queries: [{ expr: rate('idempotency_caller_changed_total', 'route'), legend: '{{route}}' }],
    }),
    graph({
      title: 'Invalid keys and callers',
      description: 'Missing key, invalid key, or unidentified caller.',
      unit: 'reqps',
      width: 6,
      queries: [
        {
          expr: some(rate('idempotency_requests_total', 'outcome, route', anyOf('client', 'misuse'))),
          legend: '{{outcome}} {{route}}',
        },
      ],
    }),
  ],
}

const RETENTION: Row = {
  title: 'Retention',
  panels: [
    graph({
      title: 'Retry age and ttl by route',
      description: 'Age of replayed records (p99) and ttl. If they meet, later retries are executed again.',
      unit: 's',
      width: 8,
      queries: [
        { expr: quantile(0.99, 'idempotency_retry_age_seconds', 'route'), legend: '{{route}} p99 age' },
        { expr: `max by (route) (${of('idempotency_retention_seconds')})`, legend: '{{route}} ttl' },
      ],
    }),
    buckets({
      title: 'Replays by record age',
      description:
        'Retries by time since the first request, in the selected time range: each bar counts up to its bound.',
      unit: 'short',
      width: 8,
      queries: [
        {
          expr: `sum by (le) (increase(${of('idempotency_retry_age_seconds', '', '_bucket')}[$__range]))`,
          legend: '{{le}} s',
        },
      ],
    }),
    graph({
      title: 'Retries after ttl by route',
      description:
        'Refused because of a tombstone. Without tombstones, retries are executed again unnoticed.',
      unit: 'reqps',
      width: 8,
      queries: [
        { expr: rate('idempotency_requests_total', 'route', 'outcome="expired"'), legend: '{{route}}' },
      ],
    }),
  ],
}

const SHADOW: Row = {
  title: 'Shadow mode',
  panels: [
    graph({
      title: 'What enforce would have done',
      description:
        'Verdicts on requests of routes in shadow mode. replay_differs: the second response differed.',
      unit: 'reqps',
      width: 24,
      queries: [
        { expr: some(rate('idempotency_shadow_total', 'route, verdict')), legend: '{{route}} {{verdict}}' },
      ],
    }),
  ],
}

/** Is anything executed twice, lost or undecided? */
export function safety(): Dashboard {
  return dashboard({
    uid: 'idempotency-proxy-safety',
    title: 'idempotency-proxy / Safety',
    description:
      'Unknown and dead-lettered outcomes, expired leases, stale and recovered outcomes, key misuse, retention.',
    rows: [PERSON, UNKNOWN, OWNERS, MISUSE, RETENTION, SHADOW],
  })
}
