import type { Dashboard } from '@grafana/grafana-foundation-sdk/dashboard'
import { dashboard, type Row } from './frame.ts'
import { buckets, graph, stat } from './panels.ts'
import { anyOf, increase, of, quantile, rate, shared, some } from './queries.ts'

const protectedRequests = some(rate('idempotency_requests_total', 'route', 'outcome!="passed"'))

const PERSON: Row = {
  title: 'Needs a person',
  panels: [
    stat({
      title: 'Dead-lettered now',
      description:
        'Records that the reconciler has given up: somebody has to decide. Alert IdempotencyDeadLettered.',
      unit: 'short',
      width: 4,
      limits: { red: 1 },
      queries: [{ expr: shared(of('idempotency_records', 'state="dead_lettered"')), legend: 'records' }],
    }),
    stat({
      title: 'Unknown now',
      description: 'Records whose outcome is not known yet, dead-lettered ones apart.',
      unit: 'short',
      width: 4,
      limits: { yellow: 1 },
      queries: [{ expr: shared(of('idempotency_records', 'state="unknown"')), legend: 'records' }],
    }),
    stat({
      title: 'Leases lapsed',
      description:
        'Requests whose replica ended or stood still, in the time shown. Alert IdempotencyOrphaned.',
      unit: 'short',
      width: 4,
      limits: { red: 1 },
      queries: [{ expr: increase('idempotency_lease_expired_total'), legend: 'leases' }],
    }),
    stat({
      title: 'Outcomes not stored now',
      description:
        'Executed, and the store has not taken what came of it. Alert IdempotencyOutcomesNotStored.',
      unit: 'short',
      width: 4,
      limits: { red: 1 },
      queries: [{ expr: `sum (${of('idempotency_spooled')})`, legend: 'outcomes' }],
    }),
    stat({
      title: 'About to be dropped',
      description:
        'Unknown records that reach unresolvedTtl within a day, told in the time shown. Alert IdempotencyUnresolvedExpiring.',
      unit: 'short',
      width: 4,
      limits: { red: 1 },
      queries: [{ expr: increase('idempotency_unresolved_expiring_total'), legend: 'records' }],
    }),
    stat({
      title: 'Executed without protection',
      description: 'On routes with onStoreUnavailable bypass, while the store was away, in the time shown.',
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
        'Counted in the store, once a minute. Every replica counts the same ones, so the largest count is shown.',
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
      title: 'Outcomes that became unknown, by route',
      description:
        'Sent upstream, and no answer that says what happened: a broken connection, a timeout, a 502 or 504.',
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
      title: 'Retries refused because nobody knows',
      description: 'Answered 409 idempotency_outcome_unknown.',
      unit: 'reqps',
      width: 8,
      queries: [
        { expr: rate('idempotency_requests_total', 'route', 'outcome="unknown"'), legend: '{{route}}' },
      ],
    }),
    graph({
      title: 'Reconciliation by result',
      description: 'What asking the upstream has brought. failed and dead_lettered need a look.',
      unit: 'ops',
      width: 12,
      queries: [{ expr: some(rate('idempotency_reconcile_total', 'result')), legend: '{{result}}' }],
    }),
    graph({
      title: 'Dead letters by route',
      description: 'Records that the reconciler gave up.',
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
  title: 'Leases, late and lost outcomes',
  panels: [
    graph({
      title: 'Lapsed leases by route',
      description: 'Each once, told by the replica that found it.',
      unit: 'ops',
      width: 8,
      queries: [{ expr: rate('idempotency_lease_expired_total', 'route'), legend: '{{route}}' }],
    }),
    graph({
      title: 'Use of the lease by route, slowest hundredth',
      description:
        'Upstream time by lease. Over 80 % a call lives by renewals: alert IdempotencyLeaseTooShort.',
      unit: 'percentunit',
      width: 8,
      queries: [{ expr: quantile(0.99, 'idempotency_lease_use_ratio', 'route'), legend: '{{route}}' }],
    }),
    graph({
      title: 'Stale outcomes by route',
      description:
        'Came after the record had been decided or claimed anew, and were refused. Alert IdempotencyOutcomeStale.',
      unit: 'ops',
      width: 8,
      queries: [
        { expr: rate('idempotency_completions_total', 'route', 'result="stale"'), legend: '{{route}}' },
      ],
    }),
    graph({
      title: 'Recovered outcomes by route',
      description:
        'The record was gone when its outcome came: the store loses records. Alert IdempotencyOutcomeRecovered.',
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
      description: 'The store did not take them at once; they are written in the background.',
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
      title: 'Answers that were not kept, by route',
      description: 'Over limits.response, or streamed: known to be done, and a retry gets no body.',
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
      description: 'A key that was first used for another payload. Alert IdempotencyMisuseHigh over 0.1 %.',
      unit: 'percentunit',
      width: 8,
      queries: [
        {
          expr: `${rate('idempotency_requests_total', 'route', 'outcome="misuse"')} / (${protectedRequests})`,
          legend: '{{route}}',
        },
      ],
    }),
    graph({
      title: 'A new key for each attempt, by route',
      description:
        'The same caller sent the same operation again under another key within a minute: it is executed twice, and no proxy can help.',
      unit: 'reqps',
      width: 8,
      queries: [{ expr: rate('idempotency_regenerated_keys_total', 'route'), legend: '{{route}}' }],
    }),
    graph({
      title: 'Refused keys and callers',
      description:
        'No key where one is required, a key that is not valid, a caller that cannot be told from others.',
      unit: 'reqps',
      width: 8,
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
      title: 'Age of retries against retention, by route',
      description:
        'The slowest hundredth of the replays, and ttl. Where they meet, later retries are executed again.',
      unit: 's',
      width: 8,
      queries: [
        { expr: quantile(0.99, 'idempotency_retry_age_seconds', 'route'), legend: '{{route}} p99 age' },
        { expr: `max by (route) (${of('idempotency_retention_seconds')})`, legend: '{{route}} ttl' },
      ],
    }),
    buckets({
      title: 'Replays by age of the record',
      description:
        'How many retries came so many seconds after the first request at most, and later than the bar before says, in the time shown.',
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
      title: 'Retries after retention, by route',
      description:
        'Refused because a tombstone was left. Without tombstones they are executed again and nobody sees it.',
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
        'Verdicts on requests of routes in shadow mode. replay_differs: the second answer was another one.',
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
      'Unknown and dead-lettered outcomes, lapsed leases, stale and recovered outcomes, misuse of keys, retention.',
    rows: [PERSON, UNKNOWN, OWNERS, MISUSE, RETENTION, SHADOW],
  })
}
