import { call, Refused, routeOf } from './api.js'
import { announce, byId, make, show, write } from './dom.js'
import { ago, asksUpstream, detailsOf, localised, moment, now, STATES, size, times, until } from './words.js'

/** @typedef {import('../schemas.ts').FullView} FullView */

/** The record on the page. @type {{ id: string, record: FullView | null } | null} */
let open = null
/** @type {(record: FullView, what: 'resolve' | 'delete') => void} */
let onDecide = () => {}

/** @param {typeof onDecide} decide */
export function whenDeciding(decide) {
  onDecide = decide
  byId('copy').addEventListener('click', () => void copy())
  for (const what of /** @type {const} */ (['resolve', 'delete']))
    byId(what).addEventListener('click', () => {
      if (open?.record) onDecide(open.record, what)
    })
}

/** @param {string} id */
export function openRecord(id) {
  if (open?.id === id) return
  closeRecord()
  open = { id, record: null }
  write(byId('short-id'), id.slice(0, 12))
  write(byId('whole-id'), id)
}

export function closeRecord() {
  open = null
  for (const id of ['state', 'short-id', 'whole-id']) write(byId(id), '')
  notice('')
  empty('')
}

/** Shows a notice until the reader leaves the record. @param {string} text */
export function notice(text) {
  show(byId('notice'), text !== '')
  write(byId('notice'), text)
}

/** Fetches and draws the open record. @throws {Refused} */
export async function refreshRecord() {
  if (open === null) return
  const { id } = open
  try {
    const record = await call('GET', `v1/records/${id}`)
    if (open?.id === id) drawRecord(record)
  } catch (error) {
    if (open?.id !== id) return
    if (!(error instanceof Refused)) throw error
    if (!['record_not_found', 'record_unreadable', 'not_found'].includes(error.code)) throw error
    open.record = null
    badge('gone', 'not found')
    empty(error.code === 'not_found' ? 'This is not a record id.' : error.message)
  }
}

/** @param {string} why shown in place of the record */
function empty(why) {
  write(byId('said'), why)
  for (const id of ['resolve', 'delete']) show(byId(id), false)
  for (const id of ['verdict', 'next', 'facts', 'response', 'history']) byId(id).replaceChildren()
}

/** @param {string} state @param {string} text */
function badge(state, text) {
  byId('state').className = `badge ${state}`
  write(byId('state'), text)
}

/** @param {FullView} record */
export function drawRecord(record) {
  if (open?.id !== record.id) return
  const before = open.record
  open.record = record
  const { verdict, next } = record.explanation
  const [said = '', ...more] = verdict
  badge(record.state, STATES[record.state])
  write(byId('said'), localised(said))
  sentences('verdict', more)
  sentences('next', ['What to do:', ...next])
  facts(record)
  actions(record.state)
  if (JSON.stringify(before?.response) !== JSON.stringify(record.response)) response(record)
  if (JSON.stringify(before?.history) !== JSON.stringify(record.history)) history(record)
}

/** @param {string} id @param {readonly string[]} texts */
function sentences(id, texts) {
  const said = texts.map(localised)
  if ([...byId(id).children].map(({ textContent }) => textContent).join() === said.join()) return
  byId(id).replaceChildren(...said.map((text) => make('p', {}, text)))
}

/** @param {FullView['state']} state */
function actions(state) {
  const focused = document.activeElement
  show(byId('resolve'), state === 'unknown')
  show(byId('delete'), state !== 'in_progress')
  // A hidden button would lose the focus.
  if (focused instanceof HTMLElement && focused.hidden) byId('record-title').focus()
}

/** @param {FullView} record */
function facts(record) {
  const { reconciliation, leaseUntil } = record
  const asks = reconciliation !== null && asksUpstream(routeOf(record.route)) ? reconciliation : null
  const lapsed = leaseUntil !== null && Date.parse(leaseUntil) <= now()
  /** @type {[string, string | null][]} */
  const rows = [
    ['Request', `${record.method} ${record.path}`],
    ['Route', record.route],
    ['Label', record.label],
    ['First claimed', `${moment(record.createdAt)} (${ago(record.createdAt)} ago)`],
    ['Last written', moment(record.updatedAt)],
    ['Unknown since', reconciliation && moment(reconciliation.since)],
    ['Last error', record.lastError],
    ['Upstream asked', asks && times(asks.asked)],
    ['Last answer', reconciliation && reconciliation.answer],
    ['Next check', asks && !asks.deadLettered ? until(asks.nextLookAt) : null],
    ['Lease', leaseUntil && `${lapsed ? 'expired' : 'until'} ${moment(leaseUntil)}`],
    [record.state === 'completed' ? 'Answers retries until' : 'Kept until', moment(record.expiresAt)],
    ['Attempts', String(record.attempts)],
    ['Version', String(record.version)],
    ['Fence', String(record.fence)],
    ['Fingerprint', record.fingerprint],
  ]
  const list = byId('facts')
  const existing = new Map([...list.children].map((row) => [row.getAttribute('data-name'), row]))
  for (const [name, value] of rows) {
    if (value === null) continue
    const row = existing.get(name) ?? make('div', { 'data-name': name }, make('dt', {}, name), make('dd'))
    existing.delete(name)
    write(row.lastElementChild, value)
    list.append(...(row.parentElement === list ? [] : [row]))
  }
  for (const row of existing.values()) row.remove()
}

/** @param {FullView} record */
function response({ response: kept }) {
  if (kept === null) return byId('response').replaceChildren()
  const gone = kept.notKept === 'past_ttl' ? 'body dropped after ttl.body' : 'body not stored'
  const body = kept.size === null ? gone : `body of ${size(kept.size)}`
  const lines = kept.headers.map(([name = '', value = '']) =>
    make('li', {}, make('b', {}, name), `: ${value}`),
  )
  byId('response').replaceChildren(
    make('h3', {}, 'Response to retries'),
    make('p', {}, `${kept.status}, ${body}`),
    make('ul', {}, ...lines),
  )
}

/** @param {FullView} record */
function history({ history: entries }) {
  const items = entries.map(({ event, text, mood, first, last, count, detail }) => {
    const details = detailsOf(detail, event)
    const again = count === 1 ? '' : ` ${count}×, the last at ${moment(last)}`
    const when = make('time', { datetime: first, title: first }, moment(first))
    return make(
      'li',
      { class: event === 'resolved' ? 'person' : mood },
      make('p', { class: 'when' }, when, again),
      make('p', { class: 'event' }, text),
      make('p', { class: 'note' }, details.join(' · ')),
    )
  })
  const none = make('li', {}, 'Nothing yet. Entries appear after a moment and may be lost under load.')
  byId('history').replaceChildren(...(items.length === 0 ? [none] : items))
}

async function copy() {
  try {
    await navigator.clipboard.writeText(open?.id ?? '')
    announce('Record id copied.')
  } catch {
    announce('The browser blocks copying. Select the id instead.')
  }
}
