import { readFileSync } from 'node:fs'
import { fileOf } from '../files.ts'
import { StoreUnavailable } from '../register.ts'
import { type PostgresLink, type SqlRow, sqlState } from './link.ts'

/** Version of the tables. A database with a later one is left alone. */
const VERSION = 1
/** Version of the functions. This release can also use a later one. */
export const REVISION = 9
const OLDEST = 14
const NOT_ALLOWED = '42501'
/** Tables that the functions write. */
const WRITTEN = ['records', 'unresolved', 'notes', 'buckets', 'waits', 'pruning', 'epochs', 'graces']

/** Only an operator can fix this, so the process does not start. */
export class Unusable extends StoreUnavailable {
  constructor(why: string) {
    super(`cannot use the PostgreSQL store: ${why}`, false)
  }
}

/** SQL that creates the schema in one transaction; changes nothing if it exists. */
export function layoutScript(): string {
  return ['tables', 'functions', 'lists', 'complete']
    .map((name) => readFileSync(fileOf(`postgres/sql/${name}.sql`), 'utf8'))
    .join('\n')
}

/**
 * Creates the schema if there is none, and identifies the server. Writes nothing to a database of another program or of a later release.
 * @throws {Unusable}, or an error that may pass: the server is a standby, the role lacks a privilege.
 */
export async function prepare(link: PostgresLink): Promise<Identity | null> {
  if (!(await isReady(link))) {
    await make(link)
    if (!(await isReady(link))) throw new Error('the schema idempotency was being changed at the same time')
  }
  await checkRights(link)
  return identityOf(link)
}

/** Identifies a server and its timeline; each promotion begins a new one. */
export interface Identity {
  readonly system: string
  readonly timeline: number
}

/**
 * A human-readable message about a connection that leads to `found`; null: nothing new. With two servers, each key could be claimed twice.
 * After a promotion the later timeline wins; an old primary that is still up does not know.
 * @throws if it may not be used: an old primary, or an unrelated server while the one in use answers (`isInUse`).
 */
export function changeOf(known: Identity | null, found: Identity, isInUse: boolean): string | null {
  if (known === null) return null
  if (known.system !== found.system) {
    if (!isInUse)
      return 'PostgreSQL is a different server now: connections to the previous one, which does not answer, are closed'
    throw new Error(
      'the name points to a different server while the one in use still answers: with two, each key could be claimed twice',
    )
  }
  if (found.timeline < known.timeline)
    throw new Error(
      `the server is an old primary: its timeline is ${found.timeline}, that of its successor ${known.timeline}`,
    )
  if (found.timeline === known.timeline) return null
  return `PostgreSQL has failed over (timeline ${found.timeline}): connections to the old primary are closed`
}

/** Null: unknown. */
async function identityOf(link: PostgresLink): Promise<Identity | null> {
  const [[system, file] = []] = await link
    .ask('SELECT system_identifier, pg_walfile_name(pg_current_wal_lsn()) FROM pg_control_system()')
    .catch((): SqlRow[] => [])
  return system == null || file == null ? null : { system, timeline: Number.parseInt(file.slice(0, 8), 16) }
}

/** The functions run with their caller's privileges: missing privileges are reported at startup, not by the first request that needs them. */
async function checkRights(link: PostgresLink): Promise<void> {
  const [[tables, functions] = []] = await link.ask(
    `SELECT (
      SELECT string_agg(n.needed || ' on ' || n.relation, ', ')
      FROM (SELECT r.relation, p.needed FROM unnest($1::text[]) r (relation), unnest($2::text[]) p (needed) UNION ALL SELECT 'stored', 'SELECT') n
      WHERE NOT has_table_privilege('idempotency.' || n.relation, n.needed)
    ), (
      SELECT 'EXECUTE on ' || count(*) || ' functions' FROM pg_proc p
      WHERE p.pronamespace = 'idempotency'::regnamespace AND p.proname <> 'complete' AND NOT has_function_privilege(p.oid, 'EXECUTE') HAVING count(*) > 0
    )`,
    [WRITTEN, ['SELECT', 'INSERT', 'UPDATE', 'DELETE']],
  )
  const missing = [tables, functions].filter((one) => one != null)
  if (missing.length > 0)
    throw new Error(
      `the role of store.url lacks privileges in the schema idempotency: ${missing.join(', ')}; \`idempotency-proxy migrate --print\` says what to grant`,
    )
}

async function isReady(link: PostgresLink): Promise<boolean> {
  const [row = []] = await link.ask(
    `SELECT pg_is_in_recovery(), current_setting('server_version_num')::int / 10000,
     (SELECT count(*) FROM pg_class c WHERE c.relnamespace = n.oid),
     (SELECT count(*) FROM pg_class c WHERE c.relnamespace = n.oid AND c.relname = 'layout')
     FROM (SELECT (SELECT oid FROM pg_namespace WHERE nspname = $1) AS oid) n`,
    ['idempotency'],
  )
  const [isStandby, version, relations, layouts] = row
  if (isStandby === 't') throw new Error('the server is a standby, on which no key can be claimed')
  if (Number(version) < OLDEST)
    throw new Unusable(`PostgreSQL ${version} is too old; allowed: ${OLDEST} or later`)
  if (Number(relations) > 0 && Number(layouts) === 0)
    throw new Unusable('the schema idempotency of the database belongs to another program')
  return Number(layouts) > 0 && isCurrent(link)
}

async function isCurrent(link: PostgresLink): Promise<boolean> {
  const [[version, revision] = []] = await link
    .ask('SELECT version, revision FROM idempotency.layout')
    .catch((error: Error) => {
      throw sqlState(error) === NOT_ALLOWED
        ? new Error(
            'the role of store.url may not use the schema idempotency; `idempotency-proxy migrate --print` says what to grant',
          )
        : error
    })
  if (Number(version) > VERSION)
    throw new Unusable(
      `its schema idempotency has version ${version}, of a later release; this one reads ${VERSION}`,
    )
  return Number(revision) >= REVISION
}

async function make(link: PostgresLink): Promise<void> {
  await link.execute(layoutScript()).catch((error: Error) => {
    throw sqlState(error) === NOT_ALLOWED
      ? new Error(
          `the schema idempotency is missing or outdated, and the role of store.url may not change it (${error.message}); \`idempotency-proxy migrate --print\` prints the SQL for its owner to run`,
        )
      : error
  })
}
