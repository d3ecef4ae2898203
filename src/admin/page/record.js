import { call, Refused } from './api.js'
import { announce, byId, make, write } from './dom.js'
import { routeOf } from './routes.js'
import { ago, asksUpstream, detailsOf, localised, moment, now, STATES, size, times, until } from './words.js'

/** @typedef {import('../schemas.ts').FullView} FullView */

/**
 * What is on the page now: an element's text is written anew where it differs, a part is made anew where it looks different.
 * @type {{ id: string, record: FullView | null, parts: Map<string, HTMLElement> } | null}
 */
let open = null
/** @type {(record: FullView, what: 'resolve' | 'delete') => void} */
let onDecide = () => {}

/** @param {typeof onDecide} decide */
export function whenDeciding(decide) {
  onDecide = decide
}

/** @param {string} id */
export function openRecord(id) {
  if (open?.id === id) return
  const part = (/** @type {string} */ name, /** @type {string} */ tag = 'div') =>
    make(tag, { class: `part-${name}` })
  const parts = new Map(
    /** @type {[string, HTMLElement][]} */ ([
      ['state', part('state', 'span')],
      ['said', part('said', 'p')],
      ['more', part('more')],
      ['next', part('next')],
      ['notice', make('p', { class: 'changed', role: 'alert', hidden: true })],
      ['actions', part('actions')],
      ['facts', make('dl', { class: 'facts' })],
      ['response', part('response')],
      ['history', make('ol', { class: 'history' })],
    ]),
  )
  const at = (/** @type {string} */ name) => /** @type {HTMLElement} */ (parts.get(name))
  byId('record').replaceChildren(
    make(
      'p',
      { class: 'back' },
      make('a', { href: '#/' }, '← Unresolved requests'),
      make('kbd', { 'aria-hidden': 'true' }, 'Esc'),
    ),
    make(
      'header',
      {},
      make('h1', { id: 'record-title', tabindex: -1 }, 'Record ', make('code', {}, id.slice(0, 12))),
      at('state'),
    ),
    make(
      'p',
      { class: 'whole' },
      make('code', {}, id),
      make('button', { type: 'button', class: 'quiet', click: () => void copy(id) }, 'Copy'),
    ),
    at('notice'),
    make('div', { class: 'sentences' }, at('said'), at('more'), at('next')),
    at('actions'),
    make(
      'div',
      { class: 'columns' },
      make(
        'section',
        { 'aria-label': 'The record' },
        make('h2', {}, 'The record'),
        at('facts'),
        at('response'),
      ),
      make('section', { 'aria-label': 'History' }, make('h2', {}, 'History'), at('history')),
    ),
  )
  open = { id, record: null, parts }
}

export function closeRecord() {
  open = null
}

/** Says something about the record that is shown, until it is left. @param {string} text */
export function notice(text) {
  const element = open?.parts.get('notice')
  if (element === undefined) return
  element.hidden = text === ''
  write(element, text)
}

/** Asks for the record that is open and draws it. @throws {Refused} */
export async function refreshRecord() {
  if (open === null) return
  const { id } = open
  try {
    const record = await call('GET', `v1/records/${id}`)
    if (open?.id === id) drawRecord(record)
  } catch (error) {
    if (open?.id !== id) return
    if (
      !(error instanceof Refused) ||
      !['record_not_found', 'record_unreadable', 'not_found'].includes(error.code)
    )
      throw error
    gone(error.code === 'not_found' ? 'This is no record id.' : error.message)
  }
}

/** @param {string} words */
function gone(words) {
  if (open === null) return
  open.record = null
  put('state', STATE_GONE)
  text('said', words)
  for (const name of ['more', 'next', 'actions', 'facts', 'response', 'history'])
    open.parts.get(name)?.replaceChildren()
}
const STATE_GONE = 'gone'

/** @param {string} name @param {string} words */
function text(name, words) {
  const element = open?.parts.get(name)
  if (element !== undefined) write(element, words)
}

/** @param {string} name @param {string} state */
function put(name, state) {
  const element = open?.parts.get(name)
  if (element === undefined) return
  element.className = `badge ${state}`
  write(element, state === STATE_GONE ? 'not there' : STATES[/** @type {FullView['state']} */ (state)])
}

/** @param {FullView} record */
export function drawRecord(record) {
  if (open === null || open.id !== record.id) return
  const before = open.record
  open.record = record
  const { verdict, next } = record.explanation
  const [said = '', ...more] = verdict
  put('state', record.state)
  text('said', localised(said))
  sentences('more', '', more)
  sentences('next', 'What to do', next)
  facts(record)
  if (before === null || before.state !== record.state) actions(record.state)
  if (JSON.stringify(before?.response) !== JSON.stringify(record.response)) response(record)
  if (JSON.stringify(before?.history) !== JSON.stringify(record.history)) history(record)
}

/** @param {string} name @param {string} heading @param {readonly string[]} texts */
function sentences(name, heading, texts) {
  const element = open?.parts.get(name)
  if (element === undefined || element.textContent === heading + texts.map(localised).join('')) return
  element.replaceChildren(
    ...(heading === '' ? [] : [make('h2', {}, heading)]),
    ...texts.map((one) => make('p', {}, localised(one))),
  )
}

/** @param {FullView['state']} state */
function actions(state) {
  const decide = (/** @type {'resolve' | 'delete'} */ what) => () => {
    if (open !== null && open.record !== null) onDecide(open.record, what)
  }
  const buttons = [
    state === 'unknown'
      ? make(
          'button',
          { type: 'button', class: 'primary', id: 'resolve', click: decide('resolve') },
          'Resolve…',
        )
      : null,
    state === 'in_progress'
      ? null
      : make('button', { type: 'button', id: 'delete', click: decide('delete') }, 'Delete…'),
  ]
  const hadFocus = open?.parts.get('actions')?.contains(document.activeElement) === true
  open?.parts.get('actions')?.replaceChildren(...buttons.filter((button) => button !== null))
  if (hadFocus) byId('record-title').focus()
}

/** @param {FullView} record */
function facts(record) {
  const asking = record.reconciliation
  /** @type {[string, string | null][]} */
  const rows = [
    ['Request', `${record.method} ${record.path}`],
    ['Route', record.route],
    ['First claimed', `${moment(record.createdAt)} (${ago(record.createdAt)} ago)`],
    ['Last written', moment(record.updatedAt)],
    ['Unknown since', asking && moment(asking.since)],
    ['Last error', record.lastError],
    ['Upstream asked', asking && asksUpstream(routeOf(record.route)) ? times(asking.asked) : null],
    ['It said', asking && asking.answer],
    [
      'Next look',
      asking && !asking.deadLettered && asksUpstream(routeOf(record.route)) ? until(asking.nextLookAt) : null,
    ],
    [
      'Lease',
      record.leaseUntil &&
        (Date.parse(record.leaseUntil) > now()
          ? `until ${moment(record.leaseUntil)}`
          : `lapsed ${moment(record.leaseUntil)}`),
    ],
    [record.state === 'completed' ? 'Answers until' : 'Kept until', moment(record.expiresAt)],
    ['Attempts', String(record.attempts)],
    ['Version', String(record.version)],
    ['Fence', String(record.fence)],
    ['Fingerprint', record.fingerprint],
  ]
  const list = open?.parts.get('facts')
  if (list === undefined) return
  const there = new Map([...list.children].map((row) => [row.getAttribute('data-name'), row]))
  for (const [name, value] of rows) {
    if (value === null) continue
    const row = there.get(name) ?? make('div', { 'data-name': name }, make('dt', {}, name), make('dd'))
    there.delete(name)
    write(row.lastElementChild, value)
    list.append(...(row.parentElement === list ? [] : [row]))
  }
  for (const row of there.values()) row.remove()
}

/** @param {FullView} record */
function response({ response: kept }) {
  const part = open?.parts.get('response')
  if (kept === null) return part?.replaceChildren()
  part?.replaceChildren(
    make('h3', {}, 'What retries are answered'),
    make(
      'p',
      {},
      kept.size === null
        ? `It was ${kept.status}; its body was not kept`
        : `${kept.status}, with a body of ${size(kept.size)}`,
    ),
    make(
      'ul',
      { class: 'headers' },
      ...kept.headers.map(([name = '', value = '']) => make('li', {}, make('b', {}, name), `: ${value}`)),
    ),
  )
}

/** @param {FullView} record */
function history({ history: entries }) {
  const items = entries.map((entry) => {
    const details = detailsOf(entry.detail, entry.event)
    const when = make('time', { datetime: entry.first, title: entry.first }, moment(entry.first))
    const again =
      entry.count === 1
        ? null
        : make('span', { class: 'again' }, ` ${entry.count}×, the last at ${moment(entry.last)}`)
    return make(
      'li',
      { class: entry.event === 'resolved' ? 'person' : entry.mood },
      make('p', { class: 'when' }, when, again),
      make('p', { class: 'event' }, entry.text),
      details.length === 0 ? null : make('p', { class: 'note' }, details.join(' · ')),
    )
  })
  const none = make(
    'li',
    { class: 'none' },
    'Nothing is noted yet. It is written now and then, a moment after it happens, and not where the store is too busy.',
  )
  open?.parts.get('history')?.replaceChildren(...(items.length === 0 ? [none] : items))
}

/** @param {string} id */
async function copy(id) {
  try {
    await navigator.clipboard.writeText(id)
    announce('The record id is copied.')
  } catch {
    announce('The browser does not let this page copy: select the id instead.')
  }
}
