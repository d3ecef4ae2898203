import { randomBytes } from 'node:crypto'
import { scanRecords } from '../admin/scan.ts'
import type { Config } from '../config/config.ts'
import { type IdempotencyRecord, type Millis, type RecordId, readAt } from '../core/record.ts'
import { Records } from '../store/records.ts'
import { CorruptRecord, type Store } from '../store/register.ts'
import { type CheckResult, finding } from './check-result.ts'
import { shownUrl } from './direct.ts'
import { counted, span } from './terminal.ts'

const PINGS = 20
/** Beyond that a retry's token, or a key that expires, is judged by a clock that differs from its maker's. */
const CLOCKS_APART: Millis = 30_000
/** So long after its time an unknown record has surely been passed over. */
const OVERDUE: Millis = 600_000
const SHOWN = 5

/** Reachable, fit, fast enough, writable, and of the same time. */
export async function storeChecks(
  store: Store,
  { store: settings }: Config,
): Promise<{ readonly up: boolean; readonly checked: CheckResult[] }> {
  const where = shownUrl(settings.url)
  const took: Millis[] = []
  let apart = 0
  try {
    for (let n = 0; n < PINGS; n++) {
      const asked = performance.now()
      const wall = Date.now()
      const now = await store.ping()
      took.push(performance.now() - asked)
      // The store's clock was read somewhere between question and answer.
      const here = (wall + Date.now()) / 2
      if (n === 0 || Math.abs(now - here) < Math.abs(apart)) apart = now - here
    }
  } catch (error) {
    const detail = `${where} does not answer: ${(error as Error).message}`
    return { up: false, checked: [{ check: 'store', found: 'finding', detail }] }
  }
  const sorted = took.toSorted((a, b) => a - b)
  const median = sorted[PINGS / 2] as Millis
  const slowest = sorted.at(-1) as Millis
  const slow = slowest > settings.timeout / 2
  return {
    up: true,
    checked: [
      { check: 'store', found: 'fine', detail: `${where} answers` },
      ...(await traitChecks(store, settings.acceptRisk)),
      {
        check: 'round trip',
        found: slow ? 'finding' : 'fine',
        detail: `${median.toFixed(1)} ms in the middle, ${slowest.toFixed(1)} ms at worst of ${PINGS}; store.timeout is ${settings.timeout} ms`,
      },
      {
        check: 'clock',
        found: Math.abs(apart) > CLOCKS_APART ? 'finding' : 'fine',
        detail: `the store is ${Math.abs(Math.round(apart))} ms ${apart < 0 ? 'behind' : 'ahead'}; leases and retention go by the store's, tokens and issued keys by this machine's`,
      },
      await writable(store),
    ],
  }
}

async function traitChecks(store: Store, acceptRisk: boolean): Promise<CheckResult[]> {
  const { durable, evicts, findings } = await store.traits()
  if (findings.length === 0)
    return [
      {
        check: 'promises',
        found: 'fine',
        detail: `version, persistence and eviction of ${store.name} are as needed${durable === true && evicts === false ? ': strict routes may run on it' : ''}`,
      },
    ]
  return findings.map((detail) => ({ check: 'promises', found: acceptRisk ? 'note' : 'finding', detail }))
}

/** A read-only replica and a full disk answer pings. */
async function writable(store: Store): Promise<CheckResult> {
  try {
    await store.limits.take(randomBytes(32).toString('base64url'), { count: 1, per: 1000 }, 1)
    return { check: 'writing', found: 'fine', detail: 'it takes writes' }
  } catch (error) {
    return { check: 'writing', found: 'finding', detail: (error as Error).message }
  }
}

/** What the records say, and whether the index of the unresolved ones has them all. */
export async function recordChecks(store: Store): Promise<CheckResult[]> {
  const records = new Records(store)
  const indexed = new Set<RecordId>()
  await scanRecords(store, 'unresolved', async (id) => void indexed.add(id))
  const unresolved = new Map<RecordId, number>()
  const unreadable: RecordId[] = []
  const count = { all: 0, unknown: 0, deadLettered: 0, overdue: 0 }
  const { complete } = await scanRecords(store, 'all', async (id) => {
    count.all++
    let found: { readonly record: IdempotencyRecord | null; readonly now: Millis }
    try {
      found = await records.get(id)
    } catch (error) {
      if (!(error instanceof CorruptRecord)) throw error
      unreadable.push(id)
      return
    }
    const { record, now } = found
    const read = record && readAt(record, now)
    if (record === null || read === null) return
    if (record.state === 'in_progress' || record.state === 'unknown') unresolved.set(id, record.version)
    if (read.state !== 'unknown') return
    count.unknown++
    if (read.reconciliation?.deadLettered === true) count.deadLettered++
    else if (now - read.nextLookAt > OVERDUE) count.overdue++
  })
  const lost = await lostOf(store, records, unresolved, indexed)
  return [
    {
      check: 'records',
      found: complete ? 'fine' : 'note',
      detail: `${complete ? '' : 'only '}${counted(count.all, 'record')} looked at; ${count.unknown} unknown`,
    },
    ...(count.deadLettered === 0
      ? []
      : [
          finding(
            'dead letters',
            `${counted(count.deadLettered, 'unknown record')} that a person has to decide about: list --dead-lettered`,
          ),
        ]),
    ...(count.overdue === 0
      ? []
      : [
          finding(
            'sweeping',
            `${counted(count.overdue, 'unknown record')} should have been looked at over ${span(OVERDUE)} ago: does a proxy run on this store?`,
          ),
        ]),
    ...(unreadable.length === 0
      ? []
      : [finding('unreadable', `${some(unreadable)}: this version cannot read them`)]),
    lost.length === 0
      ? { check: 'index', found: 'fine', detail: `has all ${counted(unresolved.size, 'unresolved record')}` }
      : finding(
          'index',
          `lacks ${counted(lost.length, 'unresolved record')}, which no sweeper will find: ${some(lost)}`,
        ),
  ]
}

function some(ids: readonly RecordId[]): string {
  const more = ids.length - SHOWN
  return `${ids.slice(0, SHOWN).join(' ')}${more > 0 ? ` and ${more} more` : ''}`
}

/** Records come and go while one looks: what was missing is looked for once more, and must not have moved. */
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
    if ((await records.get(id)).record?.version === version) lost.push(id)
  return lost
}
