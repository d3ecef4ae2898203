import { readFileSync } from 'node:fs'
import { codeOf, type Link, type Row } from './postgres-link.ts'
import { StoreUnavailable } from './register.ts'

/** Of the tables. A database of a later one is left alone. */
const VERSION = 1
/** Of the functions. A later one does for this release, too. */
const REVISION = 5
const OLDEST = 14
const NOT_ALLOWED = '42501'
/** Tables that the functions write. */
const WRITTEN = ['records', 'unresolved', 'notes', 'buckets', 'waits', 'pruning', 'epochs', 'graces']

/** Nobody but a person can help: the process does not start on it. */
export class Unusable extends StoreUnavailable {
  constructor(why: string) {
    super(`cannot use the PostgreSQL store: ${why}`, false)
  }
}

/** What makes the schema, in one transaction; where it is there already, it changes nothing. */
export function layoutScript(): string {
  return ['tables', 'functions']
    .map((name) => readFileSync(new URL(`../store/sql/${name}.sql`, import.meta.url), 'utf8'))
    .join('\n')
}

/**
 * Makes the schema if there is none, and says which server it is. Nothing is written to a database that is another program's or a later release's.
 * @throws {Unusable}, or an error that may pass: the server is a standby, the role has no right.
 */
export async function prepare(link: Link): Promise<Identity | null> {
  if (!(await isReady(link))) {
    await make(link)
    if (!(await isReady(link))) throw new Error('the schema idempotency was being changed at the same time')
  }
  await checkRights(link)
  return identityOf(link)
}

/** Which life of which server it is: each promotion begins a new timeline. */
export interface Identity {
  readonly system: string
  readonly timeline: number
}

/** Null: it does not tell. */
async function identityOf(link: Link): Promise<Identity | null> {
  const [[system, file] = []] = await link
    .ask('SELECT system_identifier, pg_walfile_name(pg_current_wal_lsn()) FROM pg_control_system()')
    .catch((): Row[] => [])
  return system == null || file == null ? null : { system, timeline: Number.parseInt(file.slice(0, 8), 16) }
}

/** The functions have the rights of whoever calls them: what is missing is told at once, not by the first request that needs it. */
async function checkRights(link: Link): Promise<void> {
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
      `the role of store.url lacks rights in the schema idempotency: ${missing.join(', ')}; \`idempotency-proxy migrate --print\` says what to grant`,
    )
}

async function isReady(link: Link): Promise<boolean> {
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

async function isCurrent(link: Link): Promise<boolean> {
  const [[version, revision] = []] = await link
    .ask('SELECT version, revision FROM idempotency.layout')
    .catch((error: Error) => {
      throw codeOf(error) === NOT_ALLOWED
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

async function make(link: Link): Promise<void> {
  await link.execute(layoutScript()).catch((error: Error) => {
    throw codeOf(error) === NOT_ALLOWED
      ? new Error(
          `the schema idempotency is missing or outdated, and the role of store.url may not change it (${error.message}); \`idempotency-proxy migrate --print\` prints the SQL for its owner to run`,
        )
      : error
  })
}
