import type { Row } from './frame.ts'
import { graph, stat } from './panels.ts'
import { of, ofProcess, quantile, rate } from './queries.ts'

export const STORE: Row = {
  title: 'Store',
  panels: [
    graph({
      title: 'Operations',
      description: 'What the store is asked. A protected request is a put and a swap.',
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
      title: 'Time of operations, slowest hundredth',
      description: 'p99, until the answer or the error. Bounded by store.timeout.',
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
      title: 'Errors of the store',
      description: 'Operations that failed: no answer in time, a full store, a breaker that is open.',
      unit: 'ops',
      width: 8,
      queries: [{ expr: rate('idempotency_store_errors_total', 'store'), legend: '{{store}}' }],
    }),
    graph({
      title: 'Replicas that reach the store',
      description: 'Those whose last operation was answered, and those whose breaker is not closed.',
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
      title: 'Outcomes not stored yet',
      description: 'Held in memory, and on disk with store.spool, until the store takes them. 0 is the rule.',
      unit: 'short',
      width: 8,
      queries: [{ expr: `sum (${of('idempotency_spooled')})`, legend: 'outcomes' }],
    }),
    stat({
      title: 'What the store promises',
      description: 'Strict: durable, and evicts nothing. Unfit: it may evict records that have not expired.',
      unit: 'none',
      width: 4,
      limits: { yellow: 2, red: 3 },
      called: { 0: 'strict', 1: 'does not tell', 2: 'forgets on restart', 3: 'unfit' },
      queries: [{ expr: `3 - min by (store) (${of('idempotency_store_grade')})`, legend: '{{store}}' }],
    }),
    graph({
      title: 'Expired records removed',
      description:
        'By stores that do it themselves and tell: memory and SQLite. Redis expires by itself, and is not here.',
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
      title: 'Bodies held',
      description: 'Bytes of requests and answers in memory, by replica. Bounded by limits.buffered.',
      unit: 'bytes',
      width: 6,
      queries: [{ expr: `sum by (instance) (${of('idempotency_buffered_bytes')})`, legend: '{{instance}}' }],
    }),
    graph({
      title: 'Resident memory',
      description: 'Of each replica. docs/internals/performance.md says what is usual.',
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
        'Cores in use by each replica. One is the most for traffic; the garbage collector and SQLite have threads of their own.',
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
      title: 'Delay of the event loop, slowest hundredth',
      description: 'How late a replica gets to its work. Over 50 ms it is short of CPU.',
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
