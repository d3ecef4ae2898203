import { call, routeOf } from './api.js'
import { counted as tally } from './counters.js'
import { byId, make, show, write } from './dom.js'
import { ago, asksUpstream, moment, setClock, times, until } from './words.js'

/** @typedef {import('../schemas.ts').RecordView} RecordView */
/** @typedef {'unknown' | 'dead' | 'running'} Tab */

const STEP = 50
/** The API's page limit. */
const PAGE_LIMIT = 1000

/** @type {Readonly<Record<Tab, { query: string, about: string, empty: string, next: string }>>} */
const TABS = {
  unknown: {
    query: 'state=unknown&deadLettered=false',
    about: 'It is unknown whether the upstream executed these. The proxy never resends them by itself.',
    empty: 'No unknown outcomes.',
    next: 'Next check',
  },
  dead: {
    query: 'deadLettered=true',
    about:
      'The proxy has used up its status queries without learning the outcome. An operator has to decide.',
    empty: 'No dead-lettered requests.',
    next: 'Asked',
  },
  running: {
    query: 'state=in_progress',
    about: 'Requests in progress at the upstream, from all replicas.',
    empty: 'Nothing is running.',
    next: 'Lease',
  },
}
const ORDER = /** @type {Tab[]} */ (Object.keys(TABS))

/** @type {Tab} */
let tab = 'unknown'
let limit = STEP
/** @type {RecordView[]} */
let shown = []
/** @type {() => void} */
let refresh = () => {}

/** @param {() => void} again refreshes the page */
export function prepareQueue(again) {
  refresh = again
  for (const one of ORDER) byId(`tab-${one}`).addEventListener('click', () => choose(one))
  byId('tabs').addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key]
    if (step === undefined) return
    event.preventDefault()
    choose(ORDER[(ORDER.indexOf(tab) + step + ORDER.length) % ORDER.length] ?? tab)
    byId(`tab-${tab}`).focus()
  })
  byId('queue-route').addEventListener('change', startOver)
  byId('more').addEventListener('click', () => {
    limit = Math.min(PAGE_LIMIT, limit + STEP)
    refresh()
  })
}

export function emptyQueue() {
  tab = 'unknown'
  limit = STEP
  shown = []
  for (const one of ORDER) write(byId(`tab-${one}`).querySelector('.count'), '')
  mark()
  draw(false)
}

/** @param {Tab} one */
function choose(one) {
  if (tab === one) return
  tab = one
  mark()
  startOver()
}

function startOver() {
  limit = STEP
  shown = []
  draw(false)
  refresh()
}

function mark() {
  for (const one of ORDER) {
    const button = byId(`tab-${one}`)
    button.setAttribute('aria-selected', String(one === tab))
    button.tabIndex = one === tab ? 0 : -1
  }
  byId('panel').setAttribute('aria-labelledby', `tab-${tab}`)
  write(byId('about'), TABS[tab].about)
  write(byId('next-title'), TABS[tab].next)
}

/** Reloads the list and the count of the other tab. @throws {import('./api.js').Refused} */
export async function refreshQueue() {
  const of = tab
  const route = byId('queue-route', HTMLSelectElement).value
  const more = route === '' ? '' : `&route=${encodeURIComponent(route)}`
  const others = ORDER.filter((one) => one !== of && one !== 'running')
  const [page, ...rest] = await Promise.all(
    [of, ...others].map((one) =>
      call('GET', `v1/records?${TABS[one].query}${more}&limit=${one === of ? limit : STEP}`),
    ),
  )
  if (of !== tab || route !== byId('queue-route', HTMLSelectElement).value) return
  setClock(page.now)
  shown = page.records.sort((/** @type {RecordView} */ a, /** @type {RecordView} */ b) =>
    a.createdAt < b.createdAt ? -1 : a.createdAt > b.createdAt ? 1 : a.id < b.id ? -1 : 1,
  )
  for (const [n, { records, next }] of [page, ...rest].entries()) {
    const name = [of, ...others][n] ?? of
    write(byId(`tab-${name}`).querySelector('.count'), `${records.length}${next === null ? '' : '+'}`)
    if (route === '' && name !== 'running') tally(name, records.length, next !== null)
  }
  if (of !== 'running') write(byId('tab-running').querySelector('.count'), '')
  show(byId('more'), page.next !== null && limit < PAGE_LIMIT)
  const unreadable = page.unreadable.join(', ')
  write(byId('unreadable'), unreadable && `This version cannot read these records: ${unreadable}`)
  draw(true)
}

/** @param {boolean} known whether the list has been read */
function draw(known) {
  const body = byId('rows').querySelector('tbody')
  if (body === null) return
  const names = new Set(shown.map(({ id }) => `row-${id}`))
  // First, so that the other rows stay in place: a moved row loses the focus.
  for (const row of body.querySelectorAll('tr')) if (!names.has(row.id)) row.remove()
  const rows = new Map([...body.children].map((row) => [row.id, row]))
  for (const [n, record] of shown.entries()) {
    const name = `row-${record.id}`
    const row = rows.get(name) ?? newRow(name, record)
    fill(row, record)
    if (body.children[n] !== row) body.insertBefore(row, body.children[n] ?? null)
  }
  show(byId('rows'), shown.length > 0 || !known)
  show(byId('empty'), known && shown.length === 0)
  write(byId('empty'), TABS[tab].empty)
}

const CELLS = ['c-age', 'c-what', 'c-route', 'c-error', 'c-next']

/** @param {string} name @param {RecordView} record */
function newRow(name, { id, method, path }) {
  const cells = CELLS.map((kind) => make('td', { role: 'cell', class: kind }, make('span', {})))
  const short = id.slice(0, 12)
  const link = make(
    'a',
    { href: `#/records/${id}`, 'aria-label': `Record ${short}: ${method} ${path}` },
    short,
  )
  return make('tr', { id: name, role: 'row' }, ...cells, make('td', { role: 'cell', class: 'c-id' }, link))
}

/** @param {Element} row @param {RecordView} record */
function fill(row, record) {
  const texts = [
    ago(record.createdAt),
    `${record.method} ${record.path}${record.label === null ? '' : ` · ${record.label}`}`,
    record.route,
    record.lastError ??
      (record.leaseUntil === null || tab === 'running'
        ? '–'
        : 'the owner stopped renewing: its lease expired'),
    nextOf(record),
  ]
  for (const [n, text] of texts.entries()) {
    const cell = /** @type {HTMLElement} */ (row.children[n])
    write(cell.firstElementChild, text)
    // Cut-off text can be read in the tooltip.
    if (n > 0 && cell.title !== text) cell.title = text
  }
  const age = /** @type {HTMLElement} */ (row.firstElementChild)
  age.title = `first claimed ${moment(record.createdAt)}`
  const next = /** @type {HTMLElement} */ (row.children[4])
  next.dataset['label'] = TABS[tab].next
}

/** @param {RecordView} record */
function nextOf(record) {
  if (tab === 'running') return record.leaseUntil === null ? '–' : until(record.leaseUntil)
  const { reconciliation } = record
  if (tab === 'dead') return times(reconciliation?.asked ?? 0)
  if (!asksUpstream(routeOf(record.route))) return 'no reconcile'
  return reconciliation === null
    ? 'now'
    : `${until(reconciliation.nextLookAt)} · asked ${reconciliation.asked}×`
}
