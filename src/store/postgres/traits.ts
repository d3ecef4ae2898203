import type { StoreTraits } from '../register.ts'
import type { SqlRow } from './link.ts'

const SETTINGS = [
  'synchronous_commit',
  'fsync',
  'full_page_writes',
  'default_transaction_isolation',
  'synchronous_standby_names',
  'track_activities',
]
/**
 * Settings; connected standbys; live rows of records, and dead ones that VACUUM has to remove; their size in MiB at the last VACUUM; age in
 * seconds of the oldest transaction visible to the role. Locks no table.
 */
export const TRAITS = `SELECT $1::bigint, ${SETTINGS.map((name) => `current_setting('${name}')`).join(', ')},
  (SELECT count(*) FROM pg_stat_replication WHERE state IS DISTINCT FROM 'backup'), s.n_live_tup, s.n_dead_tup,
  (SELECT trunc(sum(c.relpages::bigint) / 128) FROM pg_class c, pg_class r WHERE r.oid = s.relid AND c.oid IN (r.oid, r.reltoastrelid)),
  (SELECT trunc(extract(epoch FROM max(clock_timestamp() - xact_start))) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL)
FROM pg_stat_user_tables s WHERE s.schemaname = 'idempotency' AND s.relname = 'records'`

/** With more dead rows than this, and more than live ones, VACUUM cannot keep up. */
const BLOATED = 100_000
/** Seconds. */
const LONG_OPEN = 3600

/** `row`: what {@link TRAITS} reads. */
export function postgresTraits(row: SqlRow): StoreTraits {
  const [commit, fsync, pages, isolation, standbys, activities, connected, live, dead, size, open] = row
  const findings: string[] = []
  if (commit === 'off')
    findings.push('synchronous_commit is off: a crash of PostgreSQL loses the latest records.')
  if (fsync === 'off' || pages === 'off')
    findings.push('fsync or full_page_writes is off: a crash of the server can damage or lose records.')
  const replicas = Number(connected)
  const isAsynchronous = standbys === '' && replicas > 0
  if (Number(dead) > Math.max(BLOATED, Number(live)))
    findings.push(
      `${dead} dead rows and ${live} live ones in idempotency.records: VACUUM does not keep up, or is not allowed to remove them.`,
    )
  if (Number(open) > LONG_OPEN)
    findings.push(`A transaction has been open for ${open} s: VACUUM keeps all rows that it may still see.`)
  if (isolation !== 'read committed')
    findings.push(
      `default_transaction_isolation is ${isolation}: concurrent operations on one record are retried, where read committed would wait.`,
    )
  if (activities === 'off')
    findings.push(
      'track_activities is off: after connections were cut the proxy cannot tell which of their statements still run, and may open more than 16.',
    )
  return {
    durable: commit !== 'off' && fsync !== 'off' && pages !== 'off',
    evicts: false,
    forgets: isAsynchronous
      ? 'The standby is asynchronous (synchronous_standby_names is empty): promoting it loses the latest claims.'
      : standbys !== '' && commit !== 'on' && commit !== 'remote_apply'
        ? `synchronous_commit is ${commit}: a promotion of a standby can lose claims that were acknowledged; allowed: on, remote_apply.`
        : null,
    hasIdentity: true,
    findings,
    refusals: [],
    replication:
      standbys === ''
        ? `commits wait for no standby; connected: ${replicas}`
        : `commits wait for ${standbys} (synchronous_commit ${commit}); connected: ${replicas}`,
    room: `${size} MiB at the last VACUUM; ${live} rows, and ${dead} dead ones`,
  }
}
