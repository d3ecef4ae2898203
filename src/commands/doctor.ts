import { constants } from 'node:fs'
import { access, readdir } from 'node:fs/promises'
import { setTimeout as wait } from 'node:timers/promises'
import { counted } from '../admin/explain.ts'
import { scanRecords } from '../admin/records.ts'
import type { Config } from '../config/config.ts'
import { PHASES } from '../core/copies.ts'
import { type Millis, type RecordId, readAt } from '../core/record.ts'
import { verifyAudit } from '../observe/audit.ts'
import { disproof, GRADES, gradingOf, PROVEN } from '../store/grade.ts'
import { enteredBy } from '../store/moving/phases.ts'
import { asObserver, asOne, openStores, type Stores } from '../store/open.ts'
import { sealerOf } from '../store/record/sealing.ts'
import { orThrow, Records } from '../store/records.ts'
import { SealedRecord, type Store } from '../store/register.ts'
import { workerFolder, workerFolders } from '../store/spool/folders.ts'
import { isDamagedName, readSpool } from '../store/spool/log.ts'
import { type Decoded, decodeEntry } from '../store/spool/outbox.ts'
import { VERSION } from '../version.ts'
import { type Args, type Command, FINDING, FINE, type Io, usage } from './command.ts'
import { type RecordSource, SourceRefusal, shownUrl } from './record-source.ts'
import { adminSource, givenConfig, SOURCE_OPTIONS, storeConfig, unseenStore } from './target-options.ts'
import { json, span, table } from './terminal.ts'
import { type CheckResult, finding, fine, note, upstreamChecks } from './upstream-checks.ts'

const PINGS = 20
/** Largest tolerable difference: tokens and issued keys are checked by this clock. */
const CLOCKS_APART: Millis = 30_000
/** An unknown record that has been due for this long has been missed. */
const OVERDUE: Millis = 600_000
const SHOWN = 5
/** Time for a line that is being written to the audit log to be completed. */
const WRITTEN_BY: Millis = 250
const PROXY_TIMEOUT: Millis = 10_000

export const doctor: Command = {
  name: 'doctor',
  usage: ['doctor [--config FILE] [--store URL] [--service NAME] [--admin URL --token-file FILE]'],
  about: [
    'checks the configuration, the upstream, the store and its records, the spool, the audit log, and with --admin a running',
    'proxy; exit 1 if something is wrong. It writes nothing but a test record to the store, which it removes, and sends the',
    'upstream `OPTIONS *` and the status queries of `reconcile`, about a request that never existed.',
  ],
  options: {
    json: { value: null, help: 'for programs: [{"check", "found": "fine" | "note" | "finding", "detail"}]' },
    ...SOURCE_OPTIONS,
  },
  run: runDoctor,
}

async function runDoctor(args: Args, io: Io): Promise<number> {
  const own = args.has('config') || args.has('store')
  if (!own && !args.has('admin'))
    throw usage(
      'nothing to check: give --config FILE or --store URL, or --admin URL --token-file FILE, or both',
    )
  if (args.has('token-file') && !args.has('admin')) throw usage('found --token-file without --admin URL')
  if (args.has('service') && !own) throw usage('found --service without --config FILE or --store URL')
  const checked: CheckResult[] = []
  if (own) {
    const isNamed = args.has('config')
    const unseen = isNamed ? unseenStore(givenConfig(args, io).store.url) : null
    const config = unseen === null ? storeConfig(args, io) : givenConfig(args, io)
    if (isNamed) checked.push(...configChecks(config), ...(await upstreamChecks(config)))
    checked.push(...(unseen === null ? await storeChecks(config) : [note('store', unseen)]))
    checked.push(...(await spoolChecks(config)), ...(await auditChecks(config)))
  }
  if (args.has('admin')) {
    await using source = adminSource(args)
    checked.push(...(await proxyChecks(source, new URL(args.text('admin') as string).origin)))
  }
  const rows = checked.map(({ check, found, detail }) => [
    found === 'finding' ? 'FINDING' : found,
    check,
    detail,
  ])
  io.out(args.has('json') ? json(checked) : table(rows))
  return checked.some(({ found }) => found === 'finding') ? FINDING : FINE
}

function configChecks({ warnings }: Config): CheckResult[] {
  return warnings.length === 0
    ? [fine('configuration', 'no setting weakens the guarantee')]
    : warnings.map((detail) => note('configuration', detail))
}

async function storeChecks(config: Config): Promise<CheckResult[]> {
  let stores: Stores
  try {
    stores = await openStores(asObserver(config), { onEvent: () => {}, onBreaker: () => {} })
  } catch (error) {
    return [finding('store', (error as Error).message)]
  }
  const store = asOne(stores, config)
  try {
    const { up, checked } = await connectionChecks(store, stores, config)
    if (!up) return checked
    const records = await recordChecks(store, config.service).catch((error: unknown) => [
      finding('records', (error as Error).message),
    ])
    return [...checked, ...(await phaseChecks(stores)), ...records]
  } finally {
    await store.close()
  }
}

/** The replicas that take part in a migration between two stores. */
async function phaseChecks({ from }: Stores): Promise<CheckResult[]> {
  if (from === null) return []
  const marked = await Promise.all(
    PHASES.map(async (phase) => ({ phase, entered: await enteredBy(from, phase) })),
  )
  const alive = marked.flatMap(({ phase, entered }) =>
    entered === null ? [] : [`${phase} (entered by ${entered.map(({ tag }) => tag).join(', ')})`],
  )
  const detail =
    alive.length === 0 ? 'no replica is alive in any phase' : `alive in phase ${alive.join(' and ')}`
  return [note('migration', `${detail}; replicas without store.migrate are not listed`)]
}

async function connectionChecks(
  store: Store,
  stores: Stores,
  { store: settings }: Config,
): Promise<{ readonly up: boolean; readonly checked: CheckResult[] }> {
  const where = shownUrl(settings.url)
  const took: Millis[] = []
  let apart = 0
  try {
    for (let n = 0; n < PINGS; n++) {
      const start = performance.now()
      const wall = Date.now()
      const now = await store.ping()
      took.push(performance.now() - start)
      // The store read its clock at some time between command and reply.
      const here = (wall + Date.now()) / 2
      if (n === 0 || Math.abs(now - here) < Math.abs(apart)) apart = now - here
    }
  } catch (error) {
    return { up: false, checked: [finding('store', `${where} does not answer: ${(error as Error).message}`)] }
  }
  const sorted = took.toSorted((a, b) => a - b)
  const median = sorted[PINGS / 2] as Millis
  const slowest = sorted.at(-1) as Millis
  const times = `median ${median.toFixed(1)} ms, slowest ${slowest.toFixed(1)} ms of ${PINGS}; store.timeout is ${settings.timeout} ms`
  const clock = `the store is ${Math.abs(Math.round(apart))} ms ${apart < 0 ? 'behind' : 'ahead'}; leases and retention follow the store's clock, tokens and issued keys this machine's`
  return {
    up: true,
    checked: [
      fine('store', `${where} answers`),
      ...(await gradeChecks(store, stores, settings)),
      (slowest > settings.timeout / 2 ? finding : fine)('round trip', times),
      (Math.abs(apart) > CLOCKS_APART ? finding : fine)('clock', clock),
    ],
  }
}

/** The grade with its reasons, and what it is based on (contract §9). */
async function gradeChecks(
  store: Store,
  { to, from }: Stores,
  { acceptRisk, grace }: Config['store'],
): Promise<CheckResult[]> {
  const traits = await store.traits()
  // During a migration, each store by itself: a claim on both as one would have to enter its phase.
  const proofs = await Promise.all((from === null ? [to] : [to, from]).map(proofOf))
  const found = proofs.map(({ detail, proof }) => (proof === PROVEN ? fine : finding)('claims', detail))
  const wrong = proofs.find(({ proof }) => proof !== null && proof !== PROVEN)
  const { grade, reasons } = gradingOf(traits, grace, wrong?.proof ?? null)
  const risk = acceptRisk && wrong === undefined ? note : finding
  const rank = `${grade}, ${GRADES.indexOf(grade)} of ${GRADES.length - 1}`
  const { topology, replication, room } = traits
  return [
    grade === 'strict' ? fine('grade', rank) : risk('grade', `${rank} (docs/stores.md#the-grade)`),
    ...traits.refusals.map((detail) => finding('promises', detail)),
    // A fault of its claims has its own line.
    ...reasons.filter((detail) => detail !== wrong?.proof).map((detail) => risk('promises', detail)),
    ...Object.entries({ topology, replication, room }).flatMap(([check, detail]) =>
      detail === undefined ? [] : [fine(check, detail)],
    ),
    ...(traits.hasIdentity ? [(grace > 0 ? fine : note)('grace', graceText(grace))] : []),
    ...found,
  ]
}

function graceText(grace: Millis): string {
  return grace > 0 ? `nothing new is claimed for ${grace} ms after a failover` : 'store.grace is off'
}

/** A read-only replica or a full disk answers pings but accepts no claim. */
async function proofOf(store: Store): Promise<{ readonly detail: string; readonly proof: string | null }> {
  try {
    const proof = await disproof(store)
    return { detail: proof, proof }
  } catch (error) {
    return { detail: `nothing can be claimed: ${(error as Error).message}`, proof: null }
  }
}

async function recordChecks(store: Store, service: string): Promise<CheckResult[]> {
  const records = new Records(store)
  const indexed = new Set<RecordId>()
  await scanRecords(store, 'unresolved', async (id) => void indexed.add(id))
  const unresolved = new Map<RecordId, number>()
  /** Record ids by reason. */
  const unreadable = new Map<string, RecordId[]>()
  const count = { all: 0, unknown: 0, deadLettered: 0, overdue: 0 }
  const { complete } = await scanRecords(store, 'all', async (id) => {
    count.all++
    const found = await records.get(id)
    if (found.kind === 'corrupt') {
      const { error } = found
      const why = error instanceof SealedRecord ? error.message : 'this version cannot read them'
      unreadable.set(why, [...(unreadable.get(why) ?? []), id])
      return
    }
    const { record, now } = orThrow(found)
    const read = record && readAt(record, now)
    if (record === null || read === null) return
    if (record.state === 'in_progress' || record.state === 'unknown') unresolved.set(id, record.version)
    if (read.state !== 'unknown') return
    count.unknown++
    if (read.reconciliation?.deadLettered === true) count.deadLettered++
    else if (now - read.nextLookAt > OVERDUE) count.overdue++
  })
  const lost = await lostOf(store, records, unresolved, indexed)
  const looked = `service ${service}: ${complete ? '' : 'only '}${counted(count.all, 'record')} checked; ${count.unknown} unknown`
  const checked = [(complete ? fine : note)('records', looked)]
  if (count.deadLettered > 0) {
    const dead = counted(count.deadLettered, 'unknown record')
    checked.push(finding('dead letters', `an operator has to resolve ${dead}: list --dead-lettered`))
  }
  if (count.overdue > 0) {
    const overdue = `${counted(count.overdue, 'unknown record')} overdue by more than ${span(OVERDUE)}`
    checked.push(finding('sweeping', `${overdue}: is a proxy running on this store?`))
  }
  for (const [why, ids] of unreadable)
    checked.push(finding('unreadable', `${counted(ids.length, 'record')} (${some(ids)}): ${why}`))
  checked.push(
    lost.length === 0
      ? fine('index', `complete: ${counted(unresolved.size, 'unresolved record')}`)
      : finding(
          'index',
          `lacks ${counted(lost.length, 'unresolved record')}, which no sweeper will find: ${some(lost)}`,
        ),
  )
  return checked
}

function some(ids: readonly RecordId[]): string {
  const more = ids.length - SHOWN
  return `${ids.slice(0, SHOWN).join(' ')}${more > 0 ? ` and ${more} more` : ''}`
}

/** Records come and go during a scan, so a missing one is looked up again and must be unchanged. */
async function lostOf(
  store: Store,
  records: Records,
  unresolved: ReadonlyMap<RecordId, number>,
  indexed: ReadonlySet<RecordId>,
): Promise<RecordId[]> {
  const missing = [...unresolved].filter(([id]) => !indexed.has(id))
  if (missing.length === 0) return []
  const now = new Set<RecordId>()
  await scanRecords(store, 'unresolved', async (id) => void now.add(id))
  const lost: RecordId[] = []
  for (const [id, version] of missing.filter(([id]) => !now.has(id)))
    if (orThrow(await records.get(id)).record?.version === version) lost.push(id)
  return lost
}

/** Outcomes in the spool that the store has not accepted yet. Read only. */
async function spoolChecks(config: Config): Promise<CheckResult[]> {
  const { spool } = config.store
  if (spool === null)
    return [
      note('spool', 'store.spool is off: outcomes that the store has not accepted are lost with the process'),
    ]
  const folders = (await workerFolders(spool).catch(() => [])).map((number) => workerFolder(spool, number))
  const checked = await Promise.all([spool, ...folders].map((folder) => folderChecks(config, folder)))
  return checked.flat()
}

async function folderChecks({ service, store }: Config, directory: string): Promise<CheckResult[]> {
  try {
    await access(directory, constants.R_OK | constants.W_OK | constants.X_OK)
    const { found } = await readSpool(directory, () => {})
    const sealer = sealerOf(store)
    const owned = found.map(({ payload }) => ownerOf(decodeEntry(payload, service, sealer), service))
    const owners = Map.groupBy(owned, ({ of }) => of)
    const damaged = (await readdir(directory)).filter(isDamagedName).length
    const kept = `${counted(damaged, 'damaged file')} set aside in ${directory}: inspect and remove them`
    return [
      ...(found.length === 0 ? [fine('spool', `${directory} is empty`)] : []),
      ...[...owners].map(([of, all]) =>
        finding('spool', `${counted(all.length, 'outcome')} ${of}in ${directory} ${all[0]?.todo}`),
      ),
      ...(damaged === 0 ? [] : [finding('spool', kept)]),
    ]
  } catch (error) {
    return [missing('spool', error, `${directory} does not exist yet: a proxy creates it at startup`)]
  }
}

function ownerOf(decoded: Decoded, service: string): { readonly of: string; readonly todo: string } {
  if (decoded.kind === 'own')
    return {
      of: '',
      todo: 'that the store has not accepted: a proxy writes them once the store answers; start one if none is running',
    }
  if (decoded.kind === 'unreadable')
    return { of: 'of another version ', todo: `that this one cannot read (${decoded.error.message})` }
  return {
    of: `of service ${decoded.service} `,
    todo: `that ${service} will not write: start a proxy of ${decoded.service} on it, and give each service its own directory`,
  }
}

async function auditChecks({ audit: { file } }: Config): Promise<CheckResult[]> {
  if (file === null)
    return [note('audit log', 'audit.file is not set: changes go to the log, which is not checked')]
  try {
    let verified = await verifyAudit(file)
    if (!verified.ok) {
      await wait(WRITTEN_BY)
      verified = await verifyAudit(file)
    }
    if (!verified.ok) return [finding('audit log', `${file}:${verified.line}: ${verified.problem}`)]
    const { lines, head } = verified
    if (lines === 0) return [fine('audit log', `${file} is empty: nothing has been changed yet`)]
    return [
      fine('audit log', `${file}: ${counted(lines, 'line')}, one chain; the last is ${head.slice(0, 12)}`),
    ]
  } catch (error) {
    return [missing('audit log', error, `${file} does not exist yet`)]
  }
}

function missing(check: string, error: unknown, detail: string): CheckResult {
  const { code, message } = error as NodeJS.ErrnoException
  return code === 'ENOENT' ? note(check, detail) : finding(check, message)
}

async function proxyChecks(source: RecordSource, origin: string): Promise<CheckResult[]> {
  const refusal = await source.ask({ method: 'GET', path: '/v1/config' }).then(
    () => null,
    (error: unknown) => {
      if (error instanceof SourceRefusal) return error
      throw error
    },
  )
  if (refusal?.problem === 'unreachable')
    return [finding('proxy', `${origin} does not answer: ${refusal.detail}`)]
  if (refusal?.problem === 'unexpected') return [finding('proxy', `${origin}: ${refusal.detail}`)]
  const ready = await get(`${origin}/readyz`)
  const metrics = (await get(`${origin}/metrics`))?.text ?? ''
  return [
    fine('proxy', `${origin} answers`),
    refusal === null
      ? fine('proxy token', 'accepted by the admin API')
      : finding('proxy token', `${refusal.problem}: ${refusal.detail}`),
    ready?.status === 200
      ? fine('proxy readiness', 'ready')
      : finding('proxy readiness', `not ready: ${ready?.text.trim() ?? 'no answer'}`),
    ...metrics.split('\n').flatMap(sampleCheck),
  ]
}

/** The version, and gauges that show trouble; healthy ones are left out. */
function sampleCheck(line: string): CheckResult | [] {
  const [, name = '', labels = '', text] = /^(\w+)(?:\{(.*)\})? (\S+)$/.exec(line) ?? []
  const value = Number(text)
  switch (name) {
    case 'idempotency_build_info': {
      const version = /version="([^"]*)"/.exec(labels)?.[1] ?? '?'
      if (version === VERSION) return fine('proxy version', version)
      return note('proxy version', `${version}; this command is ${VERSION}`)
    }
    case 'idempotency_store_up':
      return value === 1 ? [] : finding('proxy store', 'the store does not answer this proxy')
    case 'idempotency_breaker_state':
      return value === 0 ? [] : finding('proxy store', 'its breaker is open: protected requests are refused')
    case 'idempotency_store_grade':
      return value === 3
        ? []
        : finding('proxy store', `its store is graded ${GRADES[value] ?? value}, not strict`)
    case 'idempotency_spooled':
      return value === 0 ? [] : finding('proxy spool', `${value} outcomes are waiting to be written`)
    case 'idempotency_workers_ended_total':
      return value === 0
        ? []
        : finding(
            'proxy workers',
            `${counted(value, 'worker')} exited unexpectedly since it started: see its log`,
          )
    default:
      return []
  }
}

async function get(url: string): Promise<{ readonly status: number; readonly text: string } | null> {
  try {
    const response = await fetch(url, { signal: AbortSignal.timeout(PROXY_TIMEOUT), redirect: 'error' })
    return { status: response.status, text: await response.text() }
  } catch {
    return null
  }
}
