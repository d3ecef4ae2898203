import type { Row } from './frame.ts'
import { graph, stat } from './panels.ts'
import { of, ofProcess, quantile, rate } from './queries.ts'

export const STORE: Row = {
  title: 'Store',
  panels: [
    graph({
      title: 'Operations',
      description: 'Operations per second. A protected request is a put and a swap.',
      unit: 'ops',
      width: 8,
      queries: [
        {
          expr: rate('idempotency_store_operation_seconds', 'store, operation', '', '_count'),
          legend: '{{store}} {{operation}}',
        },
      ],
    }),
    graph({
      title: 'Operation duration (p99)',
      description: 'Until the answer or the error. Bounded by store.timeout.',
      unit: 's',
      width: 8,
      queries: [
        {
          expr: quantile(0.99, 'idempotency_store_operation_seconds', 'store, operation'),
          legend: '{{store}} {{operation}}',
        },
      ],
    }),
    graph({
      title: 'Store errors',
      description: 'Failed operations: timeout, store full, breaker open.',
      unit: 'ops',
      width: 8,
      queries: [{ expr: rate('idempotency_store_errors_total', 'store'), legend: '{{store}}' }],
    }),
    graph({
      title: 'Replicas that reach the store',
      description: 'Replicas whose last operation was answered, and replicas whose breaker is not closed.',
      unit: 'short',
      width: 8,
      queries: [
        { expr: `sum by (store) (${of('idempotency_store_up')})`, legend: '{{store}} answers' },
        {
          expr: `count by (store) (${of('idempotency_breaker_state')} > 0) or 0 * sum by (store) (${of('idempotency_breaker_state')})`,
          legend: '{{store}} breaker not closed',
        },
      ],
    }),
    graph({
      title: 'Outcomes not yet stored',
      description: 'Held in memory, and on disk with store.spool, until the store accepts them. Normally 0.',
      unit: 'short',
      width: 8,
      queries: [{ expr: `sum (${of('idempotency_spooled')})`, legend: 'outcomes' }],
    }),
    stat({
      title: 'Store guarantees',
      description:
        'Strict: two servers must be lost together before a key is executed twice. Volatile: one is enough. Unfit: records may vanish, or a key may be granted twice.',
      unit: 'none',
      width: 4,
      limits: { yellow: 2, red: 3 },
      names: { 0: 'strict', 1: 'unknown', 2: 'volatile', 3: 'unfit' },
      queries: [{ expr: `3 - min by (store) (${of('idempotency_store_grade')})`, legend: '{{store}}' }],
    }),
    graph({
      title: 'Expired records removed',
      description: 'Memory and SQLite only: Redis does not report expired keys.',
      unit: 'ops',
      width: 4,
      queries: [{ expr: rate('idempotency_pruned_total', 'store'), legend: '{{store}}' }],
    }),
  ],
}

export const PROCESS: Row = {
  title: 'Process',
  panels: [
    graph({
      title: 'Buffered bodies',
      description: 'Bytes of request and response bodies in memory, by replica. Bounded by limits.buffered.',
      unit: 'bytes',
      width: 6,
      queries: [{ expr: `sum by (instance) (${of('idempotency_buffered_bytes')})`, legend: '{{instance}}' }],
    }),
    graph({
      title: 'Resident memory',
      description: 'By replica. Typical values: docs/internals/performance.md.',
      unit: 'bytes',
      width: 6,
      queries: [
        {
          expr: `sum by (instance) (${ofProcess('process_resident_memory_bytes')} and on (job, instance) ${of('idempotency_build_info')})`,
          legend: '{{instance}}',
        },
      ],
    }),
    graph({
      title: 'CPU',
      description:
        'Cores used by each replica. Traffic uses one at most; the garbage collector and SQLite have their own threads.',
      unit: 'short',
      width: 6,
      queries: [
        {
          expr: `sum by (instance) (rate(${ofProcess('process_cpu_seconds_total')}[$__rate_interval]) and on (job, instance) ${of('idempotency_build_info')})`,
          legend: '{{instance}}',
        },
      ],
    }),
    graph({
      title: 'Event loop delay (p99)',
      description: 'How late timers fire, by replica. Above 50 ms the replica is short of CPU.',
      unit: 's',
      width: 6,
      queries: [
        {
          expr: `max by (instance) (${ofProcess('nodejs_eventloop_lag_p99_seconds')} and on (job, instance) ${of('idempotency_build_info')})`,
          legend: '{{instance}}',
        },
      ],
    }),
  ],
}
