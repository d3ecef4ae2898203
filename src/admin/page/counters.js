import { byId, make, write } from './dom.js'
import { parse, sum } from './metrics.js'

/** @typedef {import('./metrics.js').Sample} Sample */

const MINUTE = 60_000
/** How requests are answered: the numbers of the tiles that grow. */
const REQUESTS = 'idempotency_requests_total'

/**
 * @typedef {object} Tile
 * @property {string} id
 * @property {string} label
 * @property {string} note
 * @property {(samples: readonly Sample[]) => number} of
 * @property {boolean} [grows] its note says by how much in the last minute
 * @property {boolean} [bad] more than none of it asks for somebody
 */

/** @type {readonly Tile[]} */
const TILES = [
  {
    id: 'unknown',
    label: 'Unknown',
    note: 'in the store',
    bad: true,
    of: (all) => sum(all, 'idempotency_records', { state: 'unknown' }),
  },
  {
    id: 'dead',
    label: 'Dead-lettered',
    note: 'a person decides',
    bad: true,
    of: (all) => sum(all, 'idempotency_records', { state: 'dead_lettered' }),
  },
  {
    id: 'executed',
    label: 'Executed',
    note: '',
    grows: true,
    of: (all) => sum(all, REQUESTS, { outcome: 'executed' }),
  },
  {
    id: 'replayed',
    label: 'Replayed',
    note: '',
    grows: true,
    of: (all) => sum(all, REQUESTS, { outcome: ['replayed', 'waited'] }),
  },
  {
    id: 'prevented',
    label: 'Prevented',
    note: '',
    grows: true,
    of: (all) => sum(all, 'idempotency_duplicates_prevented_total'),
  },
  {
    id: 'misuse',
    label: 'Misused',
    note: '',
    grows: true,
    of: (all) => sum(all, REQUESTS, { outcome: 'misuse' }),
  },
  {
    id: 'running',
    label: 'Running',
    note: 'on this replica',
    of: (all) => sum(all, 'idempotency_in_flight'),
  },
  {
    id: 'spooled',
    label: 'Unwritten',
    note: 'outcomes held',
    bad: true,
    of: (all) => sum(all, 'idempotency_spooled'),
  },
]

/**
 * What the queue has just counted, which the census of the proxy does once in a minute.
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

/** @param {string} text what /metrics says */
export function count(text) {
  const samples = parse(text)
  const values = new Map(TILES.map(({ id, of }) => [id, valueOf(id, of(samples))]))
  const at = Date.now()
  const before = seen.at(-1)
  // A process that was started anew counts from nought.
  if (
    before !== undefined &&
    TILES.some(({ id, grows }) => grows && Number(values.get(id)) < Number(before.values.get(id)))
  )
    seen = []
  seen.push({ at, values })
  seen = seen.filter((one) => at - one.at <= MINUTE)
  const [first = { at, values }] = seen
  for (const { id, note, grows, bad } of TILES) {
    const tile = byId(`count-${id}`)
    const value = values.get(id) ?? 0
    const [, shown, trend] = tile.children
    if (shown === undefined || trend === undefined) continue
    write(shown, value.toLocaleString())
    const grown = value - (first.values.get(id) ?? 0)
    write(trend, grows ? `+${grown.toLocaleString()} last minute` : note)
    tile.classList.toggle('bad', bad === true && value > 0)
    tile.classList.toggle('grew', grows === true && grown > 0)
  }
  const build = samples.find(({ name }) => name === 'idempotency_build_info')
  write(byId('version'), build?.labels['version'] ?? '')
  byRoute(samples)
}

/** @param {readonly Sample[]} samples */
function byRoute(samples) {
  const routes = [
    ...new Set(samples.flatMap(({ labels: { route } }) => (route === undefined ? [] : [route]))),
  ].sort()
  const rows = byId('routes').querySelector('tbody')
  if (rows === null) return
  const cells = routes.map((route) => [
    route,
    ...[
      ['executed'],
      ['replayed', 'waited'],
      ['in_progress'],
      ['misuse'],
      ['unknown'],
      ['upstream_failed', 'upstream_timeout', 'upstream_unreachable', 'upstream_slow'],
    ].map((outcome) => sum(samples, REQUESTS, { route, outcome }).toLocaleString()),
    sum(samples, 'idempotency_lease_expired_total', { route }).toLocaleString(),
  ])
  while (rows.children.length > cells.length) rows.lastElementChild?.remove()
  for (const [n, [name = '', ...counts]] of cells.entries()) {
    const row =
      rows.children[n] ??
      rows.appendChild(make('tr', {}, make('th', { scope: 'row' }), ...counts.map(() => make('td'))))
    for (const [at, text] of [name, ...counts].entries()) write(row.children[at], text)
  }
}
