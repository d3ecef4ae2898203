import { byId, make, write } from './dom.js'

/** @typedef {{ name: string, labels: Record<string, string>, value: number }} Sample */

const MINUTE = 60_000
const REQUESTS = 'idempotency_requests_total'

/**
 * @typedef {object} Tile
 * @property {string} id
 * @property {string} label
 * @property {string} [note] absent: a counter, which shows its increase in the last minute
 * @property {boolean} [bad] any value above 0 needs attention
 * @property {(samples: readonly Sample[]) => number} of
 */

/** @type {(outcome: string | readonly string[]) => Tile['of']} */
const requests = (outcome) => (all) => sum(all, REQUESTS, { outcome })
/** @type {(state: string) => Tile['of']} */
const records = (state) => (all) => sum(all, 'idempotency_records', { state })
/** @type {(name: string) => Tile['of']} */
const all = (name) => (samples) => sum(samples, name)

/** @type {readonly Tile[]} */
const TILES = [
  { id: 'unknown', label: 'Unknown', note: 'in the store', bad: true, of: records('unknown') },
  { id: 'dead', label: 'Dead-lettered', note: 'in the store', bad: true, of: records('dead_lettered') },
  { id: 'executed', label: 'Executed', of: requests('executed') },
  { id: 'replayed', label: 'Replayed', of: requests(['replayed', 'waited']) },
  { id: 'prevented', label: 'Prevented', of: all('idempotency_duplicates_prevented_total') },
  { id: 'misuse', label: 'Misuse', of: requests('misuse') },
  { id: 'running', label: 'Running', note: 'on this replica', of: all('idempotency_in_flight') },
  { id: 'spooled', label: 'Unstored', note: 'outcomes held', bad: true, of: all('idempotency_spooled') },
]

/**
 * Counts of the queue, fresher than the proxy's own, which it takes once a minute.
 * @type {Map<string, { at: number, count: number, more: boolean }>}
 */
const listed = new Map()

/** @param {string} id @param {number} count @param {boolean} more whether there are more than that */
export function counted(id, count, more) {
  listed.set(id, { at: Date.now(), count, more })
}

/** @param {string} id @param {number} gauge */
function valueOf(id, gauge) {
  const known = listed.get(id)
  if (known === undefined || Date.now() - known.at > MINUTE) return gauge
  return known.more ? Math.max(known.count, gauge) : known.count
}

/** @type {{ at: number, values: Map<string, number> }[]} */
let seen = []

export function drawCounters() {
  byId('counters').replaceChildren(
    ...TILES.map(({ id, label }) =>
      make(
        'div',
        { id: `count-${id}`, class: 'tile' },
        make('dt', {}, label),
        make('dd', { class: 'value' }, '–'),
        make('dd', { class: 'trend' }, '\u00a0'),
      ),
    ),
  )
  seen = []
  listed.clear()
}

/** @param {string} text the response of /metrics */
export function count(text) {
  const samples = parse(text)
  const values = new Map(TILES.map(({ id, of }) => [id, valueOf(id, of(samples))]))
  const at = Date.now()
  const before = seen.at(-1)
  // A restarted process counts from 0.
  if (
    before !== undefined &&
    TILES.some(({ id, note }) => note === undefined && Number(values.get(id)) < Number(before.values.get(id)))
  )
    seen = []
  seen.push({ at, values })
  seen = seen.filter((one) => at - one.at <= MINUTE)
  const [first = { at, values }] = seen
  for (const { id, note, bad } of TILES) {
    const tile = byId(`count-${id}`)
    const value = values.get(id) ?? 0
    const [, shown, trend] = tile.children
    if (shown === undefined || trend === undefined) continue
    write(shown, value.toLocaleString())
    const grown = value - (first.values.get(id) ?? 0)
    write(trend, note ?? `+${grown.toLocaleString()} last minute`)
    tile.classList.toggle('bad', bad === true && value > 0)
    tile.classList.toggle('grew', note === undefined && grown > 0)
  }
  const build = samples.find(({ name }) => name === 'idempotency_build_info')
  write(byId('version'), build?.labels['version'] ?? '')
}

/** Parses Prometheus' text format as this proxy writes it. @param {string} text @returns {Sample[]} */
function parse(text) {
  return [...text.matchAll(/^(idempotency_[a-z_]+)(?:\{(.*)\})? (\S+)/gm)].map(
    ([, name = '', labels = '', value]) => ({ name, labels: labelsOf(labels), value: Number(value) }),
  )
}

/** No value has a quote: they are names. @param {string} text @returns {Record<string, string>} */
function labelsOf(text) {
  return Object.fromEntries([...text.matchAll(/(\w+)="([^"]*)"/g)].map(([, name, value]) => [name, value]))
}

/**
 * Sum of the samples of that name with these labels.
 * @param {readonly Sample[]} samples @param {string} name
 * @param {Readonly<Record<string, string | readonly string[]>>} [labels]
 */
function sum(samples, name, labels = {}) {
  const wanted = Object.entries(labels)
  return samples
    .filter((sample) => sample.name === name)
    .filter((sample) => wanted.every(([label, of]) => [of].flat().includes(sample.labels[label] ?? '')))
    .reduce((total, { value }) => total + value, 0)
}
