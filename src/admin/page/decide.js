import { call, Refused, routeOf } from './api.js'
import { announce, byId, make, show, write } from './dom.js'
import { drawRecord, notice } from './record.js'
import { asksUpstream, moment, STATES } from './words.js'

/** @typedef {import('../schemas.ts').FullView} FullView */
/** @typedef {import('../schemas.ts').RecordView} RecordView */
/** @typedef {'resolve' | 'delete'} What */

const NAME_KEPT_AS = 'idempotency-proxy-by'

/** The record as the operator saw it. @type {FullView | null} */
let seen = null
/** @type {What} */
let what = 'resolve'
let busy = false
/** @type {(gone: boolean) => void} */
let onDone = () => {}

/** @param {typeof onDone} done called after a change; `gone`: the record no longer exists */
export function prepareDecisions(done) {
  onDone = done
  const dialog = byId('decide', HTMLDialogElement)
  const form = byId('decide-form', HTMLFormElement)
  form.addEventListener('input', fit)
  form.addEventListener('submit', (event) => {
    event.preventDefault()
    void decide()
  })
  for (const id of ['decide-close', 'decide-cancel']) byId(id).addEventListener('click', () => close())
  // Escape does not hide a change in flight.
  dialog.addEventListener('cancel', (event) => {
    if (busy) event.preventDefault()
  })
  dialog.addEventListener('close', () => {
    seen = null
  })
}

export function deciding() {
  return byId('decide', HTMLDialogElement).open
}

/** @param {FullView} record @param {What} which */
export function askFor(record, which) {
  what = which
  seen = record
  const form = byId('decide-form', HTMLFormElement)
  form.reset()
  byId('by', HTMLInputElement).value = sessionStorage.getItem(NAME_KEPT_AS) ?? ''
  write(byId('decide-title'), which === 'resolve' ? 'Resolve an unknown outcome' : 'Delete a record')
  const { method, path, route, id } = record
  write(byId('decide-what'), `${method} ${path} · route ${route} · record ${id.slice(0, 12)}`)
  show(byId('outcomes'), which === 'resolve')
  byId('outcomes', HTMLFieldSetElement).disabled = which !== 'resolve'
  show(byId('decide-changed'), false)
  write(byId('decide-problem'), '')
  fit()
  byId('decide', HTMLDialogElement).showModal()
  if (which === 'delete') byId('reason').focus()
  else byId('outcomes').querySelector('input')?.focus()
}

export function close() {
  if (!busy) byId('decide', HTMLDialogElement).close()
}

/** @returns {'completed' | 'retryable' | 'delete' | null} */
function choice() {
  if (what === 'delete') return 'delete'
  const chosen = new FormData(byId('decide-form', HTMLFormElement)).get('outcome')
  return chosen === 'completed' || chosen === 'retryable' ? chosen : null
}

/** The phrase to type, the button, and the message afterwards. */
const CHOICES = {
  completed: {
    phrase: 'it was done',
    button: 'Resolve as done',
    done: 'Resolved: retries get the response you entered.',
  },
  retryable: {
    phrase: 'execute again',
    button: 'Resolve as not done',
    done: 'Resolved: the next retry executes.',
  },
  delete: {
    phrase: 'delete',
    button: 'Delete the record',
    done: 'Deleted: the next request with its key is executed.',
  },
}
/** Errors after which the record may have changed. */
const STALE =
  'version_mismatch not_unknown record_not_found still_running outcome_held unreachable store_unavailable'

/** Shows the fields and the warning of the choice. */
function fit() {
  if (seen === null) return
  const chosen = choice()
  show(byId('answer'), chosen === 'completed')
  byId('status', HTMLInputElement).required = chosen === 'completed'
  write(byId('warning'), warning(chosen, seen))
  byId('warning').dataset['of'] = chosen ?? ''
  write(byId('phrase'), chosen === null ? '…' : CHOICES[chosen].phrase)
  write(byId('decide-do'), chosen === null ? 'Resolve' : CHOICES[chosen].button)
  write(byId('body-note'), bodyNote(seen))
  byId('decide-do', HTMLButtonElement).disabled = busy || chosen === null || !confirmed(chosen)
}

/** @param {keyof typeof CHOICES} chosen */
function confirmed(chosen) {
  const typed = byId('confirm', HTMLInputElement).value.trim().replace(/\s+/g, ' ').toLowerCase()
  return typed === CHOICES[chosen].phrase
}

/** @param {ReturnType<typeof choice>} chosen @param {RecordView} record */
function warning(chosen, { state, route }) {
  switch (chosen) {
    case null:
      return ''
    case 'completed':
      return 'This is final: a late response from the upstream does not change it. Retries get exactly this response.'
    case 'retryable':
      return 'The next retry executes at once. Choose this only if you have verified that the upstream did not do it and is not about to.'
    case 'delete':
      if (state === 'failed_retryable') return 'The proxy forgets the key: any request may use it again.'
      return state === 'unknown'
        ? `It is unknown whether the upstream did it. After deletion the proxy forgets the attempt and executes the next request with the key. If it was not done, resolve the record instead: that keeps the key for this request.${asksUpstream(routeOf(route)) ? ' The proxy stops asking the upstream.' : ''}`
        : 'It was done. After deletion the proxy forgets it: the next request with the key executes again, and the client can no longer get the stored response.'
  }
}

/** @param {RecordView} record */
function bodyNote({ route }) {
  if (routeOf(route)?.keep === 'outcome') return 'This route keeps only outcomes: the body is not stored.'
  const text = byId('body', HTMLTextAreaElement).value
  const json = /^content-type\s*:\s*application\/(?:[\w.-]+\+)?json\b/im.test(
    byId('headers', HTMLTextAreaElement).value,
  )
  if (text === '' || !json || byId('base64', HTMLInputElement).checked) return ''
  try {
    JSON.parse(text)
    return ''
  } catch {
    return 'The header says JSON, but the body is not JSON.'
  }
}

/** The lines as pairs, or an error message. */
function headerLines() {
  /** @type {string[][]} */
  const pairs = []
  for (const line of byId('headers', HTMLTextAreaElement).value.split('\n')) {
    if (line.trim() === '') continue
    const [, name = '', value = ''] = /^([^\s:]+)\s*:(.*)$/.exec(line.trim()) ?? []
    if (name === '') return `Not a header: “${line.trim()}”. Write Name: value.`
    pairs.push([name, value.trim()])
  }
  return pairs
}

async function decide() {
  const chosen = choice()
  if (seen === null || busy || chosen === null || !confirmed(chosen)) return
  const { id, version } = seen
  const problem = byId('decide-problem')
  write(problem, '')
  const reason = byId('reason', HTMLTextAreaElement).value.trim()
  if (reason === '') {
    write(problem, 'Give a reason for the audit log.')
    return byId('reason').focus()
  }
  const by = byId('by', HTMLInputElement).value.trim()
  const decider = { reason, ...(by === '' ? {} : { by }) }
  let response = {}
  if (chosen === 'completed') {
    const headers = headerLines()
    if (typeof headers === 'string') {
      write(problem, headers)
      return byId('headers').focus()
    }
    const text = byId('body', HTMLTextAreaElement).value
    const body = byId('base64', HTMLInputElement).checked
      ? { bodyBase64: text.replace(/\s+/g, '') }
      : { body: text }
    response = { response: { status: Number(byId('status', HTMLInputElement).value), headers, ...body } }
  }
  if (by !== '') sessionStorage.setItem(NAME_KEPT_AS, by)
  busy = true
  fit()
  let done = false
  try {
    if (chosen === 'delete') await call('DELETE', `v1/records/${id}`, { version, body: decider })
    else
      await call('POST', `v1/records/${id}/resolve`, {
        version,
        body: { outcome: chosen, ...response, ...decider },
      })
    announce(CHOICES[chosen].done)
    done = true
  } catch (error) {
    if (!(error instanceof Refused)) throw error
    await refused(error, id)
  } finally {
    busy = false
    fit()
  }
  if (!done) return
  close()
  notice('')
  onDone(chosen === 'delete')
}

/** Shows why the decision was refused. @param {Refused} error @param {string} id */
async function refused(error, id) {
  const problem = byId('decide-problem')
  // The request may have arrived: only the record can tell.
  const unclear = error.code === 'unreachable' || error.code === 'store_unavailable'
  const more = ' The reloaded record shows whether it was applied.'
  write(problem, error.message + (unclear ? more : ''))
  if (!STALE.split(' ').includes(error.code)) return
  /** @type {FullView | null} */
  let fresh = null
  try {
    fresh = await call('GET', `v1/records/${id}`)
  } catch (again) {
    if (!(again instanceof Refused)) throw again
    if (again.code !== 'record_not_found') return
  }
  if (fresh === null) {
    notice('The record no longer exists: it was deleted or has expired.')
    return leave()
  }
  const before = seen
  if (before === null) return
  drawRecord(fresh)
  if (fresh.version === before.version && fresh.state === before.state) return
  const changes = difference(before, fresh)
  const over = what === 'resolve' ? fresh.state !== 'unknown' : fresh.state === 'in_progress'
  if (over) {
    notice(
      `The record changed while you were deciding: ${changes.join('; ')}. Your decision was not applied, unless the history shows it.`,
    )
    return leave()
  }
  seen = fresh
  byId('confirm', HTMLInputElement).value = ''
  byId('decide-changed').replaceChildren(
    make('b', {}, 'The record changed while you were deciding, so nothing was done.'),
    make('ul', {}, ...changes.map((change) => make('li', {}, change))),
    'Review the changes. To go ahead anyway, confirm again.',
  )
  show(byId('decide-changed'), true)
  write(problem, '')
  byId('decide-changed').scrollIntoView({ block: 'nearest' })
  byId('confirm').focus()
}

function leave() {
  busy = false
  close()
  onDone(false)
}

/** @param {FullView} before @param {FullView} after @returns {string[]} */
function difference(before, after) {
  const { state, reconciliation, lastError } = after
  const answer = reconciliation?.answer ? `: ${reconciliation.answer}` : ''
  const askedAgain = (before.reconciliation?.asked ?? 0) !== (reconciliation?.asked ?? 0)
  const was = before.state === state ? 'it is still' : `it was ${STATES[before.state]} and is now`
  return [
    `it was last written at ${moment(after.updatedAt)}`,
    `${was} ${STATES[state]}`,
    ...(askedAgain ? [`the proxy has asked the upstream again${answer}`] : []),
    ...(before.fence === after.fence ? [] : ['a new attempt has started']),
    ...(before.lastError === lastError || lastError === null ? [] : [`last error: ${lastError}`]),
  ]
}
