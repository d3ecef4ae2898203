import { setTimeout as wait } from 'node:timers/promises'
import type { Config, SealingKey } from '../config/config.ts'
import { SCALARS } from '../config/scalars.ts'
import { quote } from '../config/units.ts'
import { isSharedStore } from '../config/urls.ts'
import type { Rate } from '../core/policy.ts'
import { type Millis, RECORD_ID, type RecordId } from '../core/record.ts'
import type { StoreHooks } from '../store/around.ts'
import {
  areTheSame,
  COPIED,
  type Copied,
  CopyDiffers,
  type CopyMode,
  copyRecord,
  findRunning,
  PAGE,
} from '../store/moving/copying.ts'
import { openStore, STORE_SCHEMES } from '../store/open.ts'
import { type Page, type Store, StoreFull, StoreUnavailable } from '../store/register.ts'
import { type Args, type Command, Exit, FINDING, FINE, finding, type Io, usage } from './command.ts'
import { validConfig } from './configuration.ts'
import { shownUrl } from './record-source.ts'
import { missingFile, mustExist } from './target-options.ts'
import { json, plain, span, table } from './terminal.ts'

/** Records copied concurrently: SQLite puts them into one transaction. */
const LANES = 32
/** No client waits for these operations. */
const TIMEOUT: Millis = 10_000
const MADE_UP: Millis = 50
const DRAW_EVERY: Millis = 100
const REPORT_EVERY: Millis = 10_000
const BAR = 30
/** Each of these needs an operator. */
const FINDINGS: readonly Copied[] = ['running', 'different', 'unreadable']

export const copy: Command = {
  name: 'copy',
  usage: [
    'copy --from STORE --to STORE [--service NAME] [--completed-only] [--rate N/s] [--cursor ID] [--dry-run]',
  ],
  about: [
    'copies the records of a service to another store, on which its proxies then continue (docs/guides/moving-stores.md).',
    'Stop the proxies first: keys that they claim meanwhile are not in the copy, and would be executed again there. It refuses to',
    'begin while a request is in progress. It can be run again: existing records are compared, and nothing newer is overwritten.',
    'STORE: the URL of a store, or the configuration file of the proxies that use it.',
    'exit 1 if a record needs a decision, if there is no record, or if it ended early',
  ],
  options: {
    from: { value: 'STORE', help: 'store to copy from' },
    to: { value: 'STORE', help: 'store to copy to; an empty one is set up' },
    service: {
      value: 'NAME',
      help: 'service whose records are copied, such as payments, if no configuration file names it',
    },
    'completed-only': {
      value: null,
      help: 'copies only final records, while proxies still run on --from; follow it with a copy without this flag',
    },
    rate: { value: 'N/s', help: 'at most N records per s, m, h or d (default: as many as the stores take)' },
    cursor: { value: 'ID', help: 'continues a copy that ended early and printed this' },
    'dry-run': { value: null, help: 'shows what a copy would do; writes no record' },
    json: { value: null, help: 'for programs: counts by result, and "next", the cursor' },
  },
  run: runCopy,
}

interface CopySide {
  /** For people, without secrets. */
  readonly name: string
  readonly config: Config
}

interface Plan {
  readonly from: CopySide
  readonly to: CopySide
  readonly mode: CopyMode
  readonly rate: Rate | null
  readonly cursor: string | null
}

async function runCopy(args: Args, io: Io): Promise<number> {
  const plan = planOf(args, io)
  const stopping = new AbortController()
  const stop = (): void => stopping.abort()
  process.once('SIGINT', stop).once('SIGTERM', stop)
  try {
    await using stores = await openStores(plan)
    const { tally, next, why } = await copyAll(plan, stores, io, stopping.signal)
    io.out(args.has('json') ? json({ ...tally, next }) : inWords(tally, plan.mode))
    if (why === null) return FINDINGS.some((name) => tally[name] > 0) ? FINDING : FINE
    throw finding(`${plain(why)}${next === null ? '' : `; or only the rest, with --cursor ${next}`}`)
  } finally {
    process.off('SIGINT', stop).off('SIGTERM', stop)
  }
}

function planOf(args: Args, io: Io): Plan {
  const rate = SCALARS.rateOrOff.parse(args.text('rate') ?? 'off')
  if (!rate.ok) throw usage(`--rate: ${rate.message}`)
  const cursor = args.text('cursor') ?? null
  if (cursor !== null && !RECORD_ID.test(cursor))
    throw usage(`--cursor: found ${quote(cursor)}; allowed: the record id that an earlier copy named`)
  const mode = { completedOnly: args.has('completed-only'), writes: !args.has('dry-run') }
  const { from, to } = sidesOf(args, io)
  mustExist(from.config.store.url)
  return { from, to: mode.writes ? to : standIn(to), mode, rate: rate.value, cursor }
}

/** Opening a missing file would create it; a dry run compares with an empty store instead. */
function standIn(to: CopySide): CopySide {
  const { name, config } = to
  if (missingFile(config.store.url) === null) return to
  return { name, config: { ...config, store: { ...config.store, url: 'memory:' } } }
}

/** Two stores of one service, with the same record ids. */
function sidesOf(args: Args, io: Io): Pick<Plan, 'from' | 'to'> {
  const named = (flag: 'from' | 'to') => {
    const text = args.text(flag)
    if (text === undefined) throw usage('copy needs --from STORE and --to STORE')
    if (STORE_SCHEMES.some((scheme) => text.startsWith(scheme))) return { url: text, config: null }
    return { url: '', config: validConfig(text, {}, io.env) }
  }
  const [from, to] = [named('from'), named('to')]
  const given = [args.text('service'), from.config?.service, to.config?.service]
  const [service, other] = new Set(given.filter((name) => name !== undefined))
  if (service === undefined && (isSharedStore(from.url) || isSharedStore(to.url)))
    throw usage('--service NAME is required: several services may share these stores')
  if (service !== undefined && other !== undefined)
    throw usage(`found the services ${quote(service)} and ${quote(other)}; allowed: one, ${IN_EVERY_ID}`)
  if (from.config !== null && to.config !== null && !haveOneSecret(from.config, to.config))
    throw usage(`found two secrets (store.secretFile); allowed: one, ${IN_EVERY_ID}`)
  const missing = from.config?.store.encryption.keys.find((key) => !hasKey(to.config, key))
  if (missing !== undefined)
    throw usage(
      `the key ${quote(missing.id)} of --from is not in --to (store.encryption.keys); records sealed with it could not be read there`,
    )
  const side = ({ url, config: ofFile }: ReturnType<typeof named>): CopySide => {
    // Nothing is sent upstream.
    const flags = { upstream: 'http://127.0.0.1', store: url, service }
    const config = ofFile ?? validConfig(null, flags, io.env)
    if (config.store.url === 'memory:')
      throw usage('found memory:, which only its own process can see; allowed: any other store')
    return { config, name: `the store ${shownUrl(config.store.url)}` }
  }
  return { from: side(from), to: side(to) }
}

const IN_EVERY_ID = 'since every record id depends on it'

function haveOneSecret({ store: a }: Config, { store: b }: Config): boolean {
  return Buffer.compare(a.secret ?? Buffer.alloc(0), b.secret ?? Buffer.alloc(0)) === 0
}

/** Whether a store has the key; assumed if only its URL is given, which names no keys. */
function hasKey(config: Config | null, { id, key }: SealingKey): boolean {
  return config?.store.encryption.keys.some((own) => own.id === id && own.key.equals(key)) !== false
}

interface Opened {
  readonly side: CopySide
  readonly store: Store
  /** Its connection was lost and reopened: the server may have restarted without its data. */
  readonly wasLost: () => boolean
}

interface CopyStores extends AsyncDisposable {
  readonly from: Opened
  readonly to: Opened
  /** Reports which store failed. Other errors are bugs and propagate. */
  readonly trouble: (error: unknown) => { readonly why: string; readonly isOfTarget: boolean }
}

/** @throws {Exit} if a copy must not begin */
async function openStores(plan: Plan): Promise<CopyStores> {
  await using opened = new AsyncDisposableStack()
  const sides = new WeakMap<Error, CopySide>()
  const trouble: CopyStores['trouble'] = (error) => {
    if (!(error instanceof StoreUnavailable) && !(error instanceof CopyDiffers)) throw error
    const side = sides.get(error) ?? plan.to
    return { why: `${side.name}: ${error.message}`, isOfTarget: side === plan.to }
  }
  const open = async (side: CopySide): Promise<Opened> => {
    const { service, store: settings } = side.config
    let isOpen = false
    let lost = false
    const hooks: StoreHooks = {
      onEvent: (kind) => {
        if (kind === 'connected' && isOpen) lost = true
      },
      onBreaker: () => {},
      onOperation: (_operation, _time, error) => {
        if (error instanceof Error) sides.set(error, side)
      },
    }
    // No client waits for its operations.
    const timeout = Math.max(settings.timeout, TIMEOUT)
    // Compressed and sealed records are copied as they are. Nothing is executed, so nothing waits for replicas. During a migration, each
    // store counts by itself.
    const asItIs = {
      encryption: { keys: [] },
      compression: 'off',
      grace: 0,
      wait: null,
      migrate: null,
    } as const
    const store = await openStore({ service, store: { ...settings, ...asItIs, timeout } }, hooks).catch(
      (error: Error) => {
        sides.set(error, side)
        throw error
      },
    )
    isOpen = true
    opened.defer(() => store.close())
    await store.ping()
    return { side, store, wasLost: () => lost }
  }
  try {
    const [from, to] = [await open(plan.from), await open(plan.to)]
    if (await areTheSame(from.store, to.store))
      throw usage(`${plan.from.name} and ${plan.to.name} are the same`)
    const running = plan.mode.completedOnly ? null : await findRunning(from.store)
    if (running !== null)
      throw finding(
        `${plan.from.name}: a request is in progress (record ${running.id}, for ${span(running.leaseLeft)} more if its proxy was killed). Stop the proxies and run it again, or copy what is final meanwhile: --completed-only`,
      )
    const closing = opened.move()
    return { from, to, trouble, [Symbol.asyncDispose]: () => closing.disposeAsync() }
  } catch (error) {
    throw error instanceof Exit ? error : finding(plain(trouble(error).why))
  }
}

type Tally = Record<Copied, number>

interface Run {
  readonly tally: Tally
  /** Why the copy is unusable; null: it is complete. */
  readonly why: string | null
  /** Where it can continue; null: only at the beginning. */
  readonly next: string | null
}

async function copyAll(plan: Plan, stores: CopyStores, io: Io, stop: AbortSignal): Promise<Run> {
  const { from, to, mode } = plan
  const [source, target] = [stores.from.store, stores.to.store]
  const tally = Object.fromEntries(Object.keys(COPIED).map((name) => [name, 0])) as Tally
  const pace = pacer(plan.rate, stop)
  io.err(`${mode.writes ? 'copying' : 'comparing'} from ${plain(from.name)} to ${plain(to.name)}\n`)
  let next = plan.cursor
  let progress: ReturnType<typeof progressBar> | null = null
  /** What was copied may be lost if the target's connection was. */
  const early = (why: string, mayGoOn = !stores.to.wasLost()): Run => ({
    tally,
    why: `${why}; run it again`,
    next: mayGoOn && isPlace(next) ? next : null,
  })
  try {
    const beganAt = await source.ping()
    progress = progressBar(io, io.isTerminal ? await count(source, next, stop) : 0)
    /** Changes in the source since the copy began. */
    let written = 0
    const one = async (id: RecordId): Promise<void> => {
      const { became, updatedAt } = await copyRecord(source, target, id, mode)
      tally[became]++
      if (updatedAt > beganAt) written++
      if (FINDINGS.includes(became)) progress?.tell(`${COPIED[became]}: ${plain(id)}`)
      progress?.add()
    }
    for (;;) {
      const page: Page = await source.list('all', next, PAGE)
      await inLanes(page.ids, pace, one)
      // A different Redis, even the same one after a restart, scans its records in another order.
      const lost = [stores.to, ...(isPlace(page.next ?? next) ? [] : [stores.from])]
      for (const { side, wasLost } of lost)
        if (wasLost()) return early(`${side.name}: the connection was lost meanwhile`)
      if (stop.aborted) return early('interrupted')
      if (page.next === null) break
      next = page.next
    }
    next = null
    if (plan.cursor === null && Object.values(tally).every((records) => records === 0)) {
      const why = `${from.name} has no record of the service ${quote(from.config.service)}; is that its name?`
      return { tally, why, next: null }
    }
    if (mode.completedOnly) return { tally, why: null, next: null }
    if (written > 0 || (await findRunning(source)) !== null)
      return early(`${from.name} was written to meanwhile: stop its proxies`)
    return { tally, why: null, next: null }
  } catch (error) {
    const { why, isOfTarget } = stores.trouble(error)
    return early(why, !isOfTarget || error instanceof StoreFull)
  } finally {
    progress?.end()
  }
}

/** A cursor that stays valid: a record id. */
function isPlace(cursor: string | null): boolean {
  return cursor !== null && RECORD_ID.test(cursor)
}

async function count(source: Store, from: string | null, stop: AbortSignal): Promise<number> {
  let records = 0
  let cursor = from
  do {
    const page: Page = await source.list('all', cursor, PAGE)
    records += page.ids.length
    cursor = page.next
  } while (cursor !== null && !stop.aborted)
  return records
}

/** Shows how many records are done: a bar on a terminal, otherwise a line now and then. */
function progressBar({ err, isTerminal }: Io, total: number) {
  let records = 0
  let drawnAt = performance.now()
  const draw = (): void => {
    drawnAt = performance.now()
    const text = `${records.toLocaleString('en')} records`
    if (!isTerminal) return err(`${text}\n`)
    // Records come and go, and a store may name one twice.
    const share = Math.min(1, records / Math.max(1, total))
    err(`\r[${'#'.repeat(share * BAR).padEnd(BAR, '-')}] ${Math.floor(share * 100)} %  ${text}\x1b[K`)
  }
  return {
    add: () => {
      records++
      if (performance.now() - drawnAt >= (isTerminal ? DRAW_EVERY : REPORT_EVERY)) draw()
    },
    /** Prints a separate line. */
    tell: (line: string) => err(isTerminal ? `\r${line}\x1b[K\n` : `${line}\n`),
    /** Leaves the last state on the screen. */
    end: () => {
      if (!isTerminal) return
      draw()
      err('\n')
    },
  }
}

/** Ends at the first failure, once no record is in progress any more. */
async function inLanes(
  ids: readonly RecordId[],
  pace: () => Promise<boolean>,
  each: (id: RecordId) => Promise<void>,
): Promise<void> {
  const queue = (async function* () {
    for (const id of ids) {
      if (!(await pace())) return
      yield id
    }
  })()
  const lanes = Array.from({ length: LANES }, async () => {
    for await (const id of queue) await each(id)
  })
  for (const lane of await Promise.allSettled(lanes)) if (lane.status === 'rejected') throw lane.reason
}

/** Resolves when the next record may begin; false: stop. */
function pacer(rate: Rate | null, stop: AbortSignal): () => Promise<boolean> {
  let nextAt = performance.now()
  return async () => {
    if (rate !== null) {
      const now = performance.now()
      // Compensates for late timers, not for slow stores.
      nextAt = Math.max(nextAt, now - MADE_UP) + rate.per / rate.count
      if (nextAt - now >= 1) await wait(nextAt - now, undefined, { signal: stop }).catch(() => {})
    }
    return !stop.aborted
  }
}

function inWords(tally: Tally, { writes }: CopyMode): string {
  const rows = (Object.keys(COPIED) as Copied[])
    .filter((name) => tally[name] > 0 || name === 'copied')
    .map((name) => [String(tally[name]), name === 'copied' && !writes ? 'to copy' : COPIED[name]])
  return `${table(rows)}${writes ? '' : 'nothing was written: this was a dry run\n'}`
}
