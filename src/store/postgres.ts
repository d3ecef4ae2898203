import type { Millis, RecordId, State } from '../core/record.ts'
import { settled } from '../runtime/scheduling.ts'
import { MAX_U48 } from './binary.ts'
import { BODIES_FROM, isClaim, PREFIX, SCHEMA, stamp, stateCode } from './codec.ts'
import { Epoch } from './postgres-epoch.ts'
import { Lanes, type LanesOptions, lockWait } from './postgres-lanes.ts'
import { prepare } from './postgres-layout.ts'
import { isNumber, nonsense, type SqlArg, type SqlRow, sqlNumber } from './postgres-link.ts'
import { Listener } from './postgres-listener.ts'
import type { Batch, BatchItem } from './postgres-queue.ts'
import { postgresAddress } from './postgres-url.ts'
import {
  type Condition,
  CorruptRecord,
  type DuePosition,
  type GetReply,
  InGrace,
  idOfCursor,
  type NewEpoch,
  PartlyUnavailable,
  type PutKind,
  type PutReply,
  pageOf,
  parseCursor,
  type Store,
  type StoreTraits,
  type SwapReply,
} from './register.ts'
import { Safety } from './safety.ts'
import { readNote } from './side-ports.ts'

/** Every replica tries; one per interval does the work. */
const PRUNE_EVERY: Millis = 1000
/** 8 MB: checked within milliseconds. */
const PRUNE_PAGES = 1000
/** Bounds the duration of a removal. */
const PRUNE_ROWS = 500

export interface PostgresOptions extends Omit<LanesOptions, 'address'> {
  /** `postgres://user:password@host:port/database?sslmode=…` */
  readonly url: string
  /** `store.grace`; 0: off. */
  readonly grace?: Millis
  readonly onNewEpoch?: ((epoch: NewEpoch) => void) | undefined
  readonly onSafe?: ((before: Millis) => void) | undefined
  readonly onHeld?: ((left: Millis) => void) | undefined
  /** Hides the records of other services in the database. */
  readonly service: string
  /** Called when this process has removed expired records. */
  readonly onPruned?: ((records: number) => void) | undefined
  /** Added to the server's time, for tests that travel in time; otherwise 0. */
  readonly skew?: () => Millis
}

/** Never answers synchronously. */
export interface PostgresStore extends Store {
  put(...args: Parameters<Store['put']>): Promise<PutReply>
  swap(...args: Parameters<Store['swap']>): Promise<SwapReply>
}

/** The columns that {@link bytesOf} makes a record of. */
const COLUMNS = [
  'version',
  'fence',
  'created_at',
  'updated_at',
  'due',
  'drop_at',
  'schema',
  'state',
  'token',
  'head',
  'payload',
]
const STORED = COLUMNS.map((column) => `(stored).${column}`).join(', ')
const DECIDED = `at, done, version, fence, created_at, waiting, ${STORED}`
const WRITTEN = `${DECIDED}, remaining, since`
const GET = call('get', 4, `at, ${STORED}`)
const PUT = call('put', 16, WRITTEN)
const SWAP = call('swap', 18, WRITTEN)
const CLAIMS = call('claims', 15, `id, ${DECIDED}`)
const OUTCOMES = call('outcomes', 13, `id, ${DECIDED}`)
const RENEW = call('renew', 7, 'renewed')
const REVIVE = call('revive', 7, 'done')
const REMOVE = call('remove', 5, 'done, waiting')
const PLACES = call('places', 7, 'listed')
const LIST = call('list', 6, 'ids')
const PING = call('ping', 2, 'at')
const NOTE = call('note', 9, 'done')
const NOTES = call('notes_of', 4, 'lines')
const THROTTLE = call('throttle', 7, 'wait')
const ADMIT = call('admit', 5, 'remaining, since')
const PRUNE = call('prune', 5, 'pruned')
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
const TRAITS = `SELECT $1::bigint, ${SETTINGS.map((name) => `current_setting('${name}')`).join(', ')},
  (SELECT count(*) FROM pg_stat_replication WHERE state IS DISTINCT FROM 'backup'), s.n_live_tup, s.n_dead_tup,
  (SELECT trunc(sum(c.relpages::bigint) / 128) FROM pg_class c, pg_class r WHERE r.oid = s.relid AND c.oid IN (r.oid, r.reltoastrelid)),
  (SELECT trunc(extract(epoch FROM max(clock_timestamp() - xact_start))) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL)
FROM pg_stat_user_tables s WHERE s.schemaname = 'idempotency' AND s.relname = 'records'`

/**
 * Resolves after the first attempt to connect, whatever its outcome: the process also starts without PostgreSQL.
 * @throws {StoreUnavailable} if only a person can help: a schema of a later release, a missing certificate.
 */
export async function openPostgresStore(options: PostgresOptions): Promise<PostgresStore> {
  const { service, timeoutMs, onPruned, grace = 0 } = options
  const skew = options.skew ?? (() => 0)
  const wait = lockWait(timeoutMs)
  const connecting = {
    ...options,
    address: postgresAddress(options.url, options.onEvent),
  }
  const lanes = new Lanes(connecting, prepare, () => {
    listener.resubscribe()
    void epoch?.look()
  })
  const listener = new Listener(connecting, lanes, skew)
  const epoch =
    grace === 0
      ? null
      : new Epoch({
          grace,
          look: (seen) => lanes.run(ADMIT, [service, skew(), wait, grace, seen], 'local'),
          onSilence: () => lanes.recheck(),
          onNew: options.onNewEpoch ?? (() => {}),
          safety: new Safety(1, options.onSafe ?? (() => {})),
          onHeld: options.onHeld ?? (() => {}),
        })

  const prune = async (): Promise<void> => {
    let pruned = 0
    try {
      const args = [skew(), wait, PRUNE_EVERY, PRUNE_PAGES, PRUNE_ROWS]
      const [removed] = await lanes.run(PRUNE, args, 'local')
      pruned = Number(removed)
      if (pruned > 0) onPruned?.(pruned)
    } catch {
      // Retried next time; operations report the error.
    }
    if (!isClosed) timer = setTimeout(() => void prune(), pruned >= PRUNE_ROWS ? 0 : PRUNE_EVERY).unref()
  }
  const get = async (id: RecordId): Promise<GetReply> => {
    const [now, ...stored] = await lanes.run(GET, [service, id, skew(), wait], 'local')
    return { now: sqlNumber(now), bytes: bytesOf(stored) }
  }
  const seen = (): Millis => epoch?.seen ?? 0
  const claims: Batch = {
    text: CLAIMS,
    argsOf: (items) => [
      service,
      skew(),
      wait,
      grace,
      seen(),
      ...arraysOf(items, [ruleOf, fenceOf, createdOf]),
    ],
  }
  const outcomes: Batch = {
    text: OUTCOMES,
    argsOf: (items) => [service, skew(), wait, ...arraysOf(items, [ruleOf, stateOf, fenceOf])],
  }
  let isClosed = false
  await lanes.open()
  let timer = setTimeout(() => void prune(), PRUNE_EVERY).unref()

  return {
    name: 'postgres',

    async put(id, bytes, spans, entry = 'claim') {
      const isAttempt = isClaim(bytes)
      const args = (): SqlArg[] => {
        const { schema, state, fence, token, createdAt, head, payload } = partsOf(bytes)
        const record = [schema, state, fence, token, createdAt, head, payload, spans.dueIn, spans.dropIn]
        return [service, id, skew(), wait, ...record, ENTRIES[entry], grace, seen()]
      }
      let row: SqlRow
      try {
        row = await (isAttempt && bytes[PREFIX.schema] === SCHEMA && entry !== 'again'
          ? lanes.runTogether(claims, { id, bytes, spans, rule: ENTRIES[entry] }, PUT, args, 'plain')
          : lanes.run(PUT, args()))
      } catch (error) {
        // No writes at present, but existing records answer, except this claim's own from a lost reply: the standby may not have it.
        const { now, bytes: found } = error instanceof PartlyUnavailable ? await get(id) : NOTHING
        if (found === null || tokenOf(found).equals(tokenOf(bytes))) throw error
        return { done: false, now, bytes: found }
      }
      const reply = writeReply(row)
      if (reply.done) {
        if (!isAttempt) listener.tell(id, row[WAITING] ?? '')
        return reply
      }
      if (reply.bytes === null) throw nonsense('neither written nor refused')
      return { ...reply, bytes: reply.bytes }
    },

    async swap(id, condition, bytes, spans, nextFence) {
      const isAttempt = isClaim(bytes)
      const args = (): SqlArg[] => {
        const { schema, state, fence, token, head, payload } = partsOf(bytes)
        const { dueIn, dropIn } = spans
        const record = [schema, state, fence, token, head, payload, dueIn, dropIn, nextFence ? 1 : 0]
        return [service, id, skew(), wait, ...expected(condition), ...record, grace, seen()]
      }
      const isEnd = !isAttempt && bytes[PREFIX.schema] === SCHEMA && !nextFence
      let row: SqlRow
      if (isEnd && 'token' in condition && condition.token.equals(tokenOf(bytes))) {
        const item = { id, bytes, spans, rule: bitsOf(condition.states) }
        row = await lanes.runTogether(outcomes, item, SWAP, args, 'urgent')
      } else row = await lanes.run(SWAP, args(), 'urgent')
      const reply = writeReply(row)
      // Null: no attempt was ended, nor by this swap if the upstream had already done so itself.
      const waiting = row[WAITING]
      if (waiting != null && !(reply.done && isAttempt)) listener.tell(id, waiting)
      return reply
    },

    get,

    async renew(items) {
      if (items.length === 0) return []
      const columns = [
        items.map(({ id }) => id),
        items.map(({ token }) => token),
        items.map(({ dueIn }) => dueIn),
        items.map(({ dropIn }) => dropIn),
      ]
      const [renewed] = await lanes.run(RENEW, [service, skew(), wait, ...columns], 'urgent')
      const done = new Set(wordsOf(renewed))
      // A locked record must not keep the others from being renewed.
      return settled(
        items.map(async ({ id, token, dueIn, dropIn }) => {
          if (done.has(id)) return true
          const [revived] = await lanes.run(
            REVIVE,
            [service, id, skew(), wait, token, dueIn, dropIn],
            'urgent',
          )
          return revived === 't'
        }),
        false,
      )
    },

    async due(limit, of) {
      const [what, after] = of === 'bodies' ? ['bodies', BODIES_FROM] : ['due', 0]
      const [found] = await lanes.run(PLACES, [service, skew(), wait, what, after, '', limit])
      return placesOf(found).map(({ id }) => id as RecordId)
    },

    async remove(id, version) {
      const [done, waiting] = await lanes.run(REMOVE, [service, id, skew(), wait, version], 'urgent')
      if (done === 't') listener.tell(id, waiting ?? '')
      return done === 't'
    },

    async list(which, cursor, limit) {
      if (which === 'unresolved') {
        const after = parseCursor(cursor)
        const args = [service, skew(), wait, 'list', after.due, after.id, limit]
        const [found] = await lanes.run(PLACES, args, 'local')
        return pageOf(placesOf(found), limit)
      }
      const beginning = which === 'all' ? '' : which.beginning
      const [found] = await lanes.run(
        LIST,
        [service, skew(), wait, beginning, idOfCursor(cursor), limit],
        'local',
      )
      const ids = wordsOf(found) as RecordId[]
      return { ids, next: ids[limit - 1] ?? null }
    },

    async ping() {
      const [now] = await lanes.run(PING, [skew(), wait], 'local')
      return sqlNumber(now)
    },

    history: {
      async append(id, notes) {
        const columns = [
          notes.map(({ tag }) => tag),
          notes.map(({ count }) => count),
          notes.map(({ firstAgo }) => Math.round(firstAgo)),
          notes.map(({ lastAgo }) => Math.round(lastAgo)),
          notes.map(({ text }) => text),
        ]
        const [done] = await lanes.run(NOTE, [service, id, skew(), wait, ...columns], 'local')
        return done === 't'
      },
      async read(id) {
        const [lines] = await lanes.run(NOTES, [service, id, skew(), wait], 'local')
        return linesOf(lines).map(readNote)
      },
    },

    limits: {
      async take(bucket, { count, per }, units) {
        const [free] = await lanes.run(THROTTLE, [service, bucket, skew(), wait, count, per, units], 'local')
        return sqlNumber(free)
      },
    },

    watch: (id, changed) => listener.watch(id, changed),

    traits: async () => postgresTraits(await lanes.run(TRAITS, [], 'local')),

    async close() {
      isClosed = true
      clearTimeout(timer)
      epoch?.close()
      await Promise.all([lanes.close(), listener.close()])
    },
  }
}

/** The number of the statement comes first, and is returned first: a lost reply cannot be taken for that of another statement. */
function call(name: string, args: number, columns: string): string {
  const places = Array.from({ length: args }, (_, n) => `$${n + 2}`).join(', ')
  return `SELECT $1::bigint, ${columns} FROM idempotency.${name}(${places})`
}

/** Where the found record's columns are in {@link DECIDED}. */
const [FOUND, FOUND_END] = [6, 6 + COLUMNS.length]
const WAITING = 5

const ENTRIES: Readonly<Record<PutKind, number>> = { claim: 0, fresh: 1, again: 2 }

/** @throws {InGrace}, or {@link StoreUnavailable} if it is not such a reply: what was claimed by it would have no fence. */
function writeReply(row: SqlRow) {
  const [at, done, version, fence, createdAt] = row
  const now = sqlNumber(at)
  if (done === 'f') {
    const [remaining, since] = row.slice(FOUND_END)
    const left = sqlNumber(remaining ?? '0')
    if (left > 0) throw new InGrace(now, sqlNumber(since), left)
    return { done: false, now, bytes: bytesOf(row.slice(FOUND, FOUND_END)) } as const
  }
  const stamp = { version: sqlNumber(version), fence: sqlNumber(fence), createdAt: sqlNumber(createdAt) }
  if (done !== 't' || stamp.version === 0 || stamp.fence === 0) throw nonsense('neither written nor refused')
  return { done: true, now, stamp } as const
}

const NOTHING: GetReply = { now: 0, bytes: null }

function tokenOf(bytes: Buffer): Buffer {
  return bytes.subarray(PREFIX.token, PREFIX.createdAt)
}

function ruleOf({ rule }: BatchItem): number {
  return rule
}

function stateOf({ bytes }: Pick<BatchItem, 'bytes'>): number {
  return bytes.readUInt8(PREFIX.state)
}

function fenceOf({ bytes }: Pick<BatchItem, 'bytes'>): number {
  return bytes.readUIntBE(PREFIX.fence, 6)
}

function createdOf({ bytes }: Pick<BatchItem, 'bytes'>): number {
  return bytes.readUIntBE(PREFIX.createdAt, 6)
}

function headEnd(bytes: Buffer): number {
  return bytes.length < PREFIX.end + 4 ? bytes.length : PREFIX.end + 4 + bytes.readUInt32BE(PREFIX.end)
}

/** The columns of a record that the caller sets; the store stamps the rest. */
function partsOf(bytes: Buffer) {
  const end = headEnd(bytes)
  return {
    schema: bytes.readUInt8(PREFIX.schema),
    state: stateOf({ bytes }),
    fence: fenceOf({ bytes }),
    token: tokenOf(bytes),
    createdAt: createdOf({ bytes }),
    head: bytes.subarray(PREFIX.end, end),
    payload: bytes.subarray(end),
  }
}

/**
 * As the functions for many take records: ids, `numbers` and spans as arrays, then where in the bytes of all, which come last, each record
 * begins, its payload begins, and it ends.
 */
function arraysOf(items: readonly BatchItem[], numbers: readonly ((item: BatchItem) => number)[]): SqlArg[] {
  const arrayOf = (of: (item: BatchItem) => string | number): string => `{${items.map(of).join()}}`
  let end = 0
  const begin = ({ bytes }: BatchItem): number => (end += bytes.length) - bytes.length
  const starts = items.map(begin)
  return [
    arrayOf(({ id }) => id),
    ...numbers.map(arrayOf),
    arrayOf(({ spans }) => spans.dueIn),
    arrayOf(({ spans }) => spans.dropIn),
    `{${starts.join()}}`,
    `{${items.map(({ bytes }, n) => (starts[n] as number) + headEnd(bytes)).join()}}`,
    `{${items.map(({ bytes }, n) => (starts[n] as number) + bytes.length).join()}}`,
    Buffer.concat(items.map(({ bytes }) => bytes)),
  ]
}

function bitsOf(states: readonly State[]): number {
  return states.reduce((bits, state) => bits | (1 << stateCode(state)), 0)
}

/** `\\x` and 16 bytes. */
const TOKEN_LENGTH = 34

/** The record assembled from these columns. */
function bytesOf(stored: SqlRow): Buffer | null {
  const [version, fence, createdAt, updatedAt, due, dropAt, schema, state, token, head, payload] = stored
  if (stored.length === COLUMNS.length && stored.every((column) => column === null)) return null
  if (token?.length !== TOKEN_LENGTH)
    throw new CorruptRecord('the token of the stored record has another length')
  // Parses `\x6162…`. Half a byte of one would be completed by the next.
  const isHex = [token, `${head}`, `${payload}`].every((one) => one.startsWith('\\x') && one.length % 2 === 0)
  const rest = `${token.slice(2)}${`${head}`.slice(2)}${`${payload}`.slice(2)}`
  const numbers = [version, fence, createdAt, updatedAt, due, dropAt]
  if (!numbers.every((one) => isNumber(one, MAX_U48)) || ![schema, state].every((one) => isNumber(one, 0xff)))
    throw new CorruptRecord('the stored record has a number that it cannot have')
  const bytes = Buffer.allocUnsafe(PREFIX.end - 16 + rest.length / 2)
  bytes.write('IP', 'latin1')
  bytes[PREFIX.schema] = Number(schema)
  bytes[PREFIX.state] = Number(state)
  const tokenWritten = bytes.write(rest.slice(0, 32), PREFIX.token, 'hex')
  const written = tokenWritten + bytes.write(rest.slice(32), PREFIX.end, 'hex')
  if (!isHex || written * 2 !== rest.length)
    throw new CorruptRecord('PostgreSQL did not write the bytes of the stored record in hex')
  stamp(bytes, {
    version: Number(version),
    fence: Number(fence),
    createdAt: Number(createdAt),
    updatedAt: Number(updatedAt),
    due: Number(due),
    dropAt: Number(dropAt),
  })
  return bytes
}

function expected(condition: Condition): readonly SqlArg[] {
  return 'version' in condition
    ? [condition.version, null, null]
    : [null, condition.token, condition.states.map(stateCode)]
}

function wordsOf(text: string | null | undefined): string[] {
  return text ? text.split(' ') : []
}

/** Parses `due id,due id`. */
function placesOf(text: string | null | undefined): DuePosition[] {
  if (text === '') return []
  if (text == null || !/^\d{1,16} [\w-]{1,64}(?:,\d{1,16} [\w-]{1,64})*$/.test(text))
    throw nonsense('no list of places')
  return text.split(',').map((place) => {
    const [due, id = ''] = place.split(' ')
    return { due: Number(due), id }
  })
}

/** Parses a list of texts. */
function linesOf(json: string | null | undefined): string[] {
  let lines: unknown
  try {
    lines = JSON.parse(json ?? '[]')
  } catch {
    // Refused below.
  }
  if (Array.isArray(lines) && lines.every((line) => typeof line === 'string')) return lines
  throw new CorruptRecord('the history of the stored record is no list of texts')
}

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
      `${dead} dead rows and ${live} live ones in idempotency.records: VACUUM does not keep up, or may not remove them.`,
    )
  if (Number(open) > LONG_OPEN)
    findings.push(`A transaction has been open for ${open} s: VACUUM keeps everything that it may still see.`)
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
