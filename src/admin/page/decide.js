import { call, Refused, routeOf } from './api.js'
import { announce, byId, make, show, write } from './dom.js'
import { drawRecord, notice } from './record.js'
import { asksUpstream, moment, STATES } from './words.js'

/** @typedef {import('../schemas.ts').FullView} FullView */
/** @typedef {import('../schemas.ts').RecordView} RecordView */
/** @typedef {'resolve' | 'delete'} What */

const NAME_KEPT_AS = 'idempotency-proxy-by'

/** The record as the person saw it: what is decided about. @type {FullView | null} */
let seen = null
/** @type {What} */
let what = 'resolve'
let busy = false
/** @type {(gone: boolean) => void} */
let onDone = () => {}

/** @param {typeof onDone} done hears that something was changed; `gone`: the record is no longer there */
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
  // Escape does not hide a change that is on its way.
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

/** What is typed to confirm, the button, and what is said afterwards. */
const CHOICES = {
  completed: {
    phrase: 'it was done',
    button: 'Resolve as done',
    said: 'Resolved: retries get the answer that you wrote.',
  },
  retryable: {
    phrase: 'execute again',
    button: 'Resolve as not done',
    said: 'Resolved: the next retry executes.',
  },
  delete: {
    phrase: 'delete',
    button: 'Delete the record',
    said: 'Deleted: the next request with its key is executed.',
  },
}
/** After these the record may have changed. */
const STALE =
  'version_mismatch not_unknown record_not_found still_running outcome_held unreachable store_unavailable'

/** Makes the form ask for what the choice needs, and say what it means. */
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
      return 'This is final: not even the answer of the upstream, should it come late, changes it. Retries get exactly this answer.'
    case 'retryable':
      return 'A retry will execute again, at once and without asking anybody. Choose this only if you have seen that the upstream did not do it, and is not about to.'
    case 'delete':
      if (state === 'failed_retryable') return 'The key is forgotten: any request may use it anew.'
      return state === 'unknown'
        ? `Nobody knows whether the upstream did it, and after this the proxy has forgotten that it was ever asked: the next request with the key is executed. To free the key of what was not done, resolve it instead: then the key still belongs to this request.${asksUpstream(routeOf(route)) ? ' The upstream is no longer asked.' : ''}`
        : 'It was done, and after this the proxy has forgotten it: the next request with the key executes again, and its answer is no longer there for the client.'
  }
}

/** @param {RecordView} record */
function bodyNote({ route }) {
  if (routeOf(route)?.keep === 'outcome') return 'This route keeps outcomes alone: the body is not stored.'
  const text = byId('body', HTMLTextAreaElement).value
  const json = /^content-type\s*:\s*application\/(?:[\w.-]+\+)?json\b/im.test(
    byId('headers', HTMLTextAreaElement).value,
  )
  if (text === '' || !json || byId('base64', HTMLInputElement).checked) return ''
  try {
    JSON.parse(text)
    return ''
  } catch {
    return 'The header says JSON, and this is none.'
  }
}

/** The lines as pairs, or what is wrong with them. */
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
    write(problem, 'Say why: it is what the audit log is for.')
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
    announce(CHOICES[chosen].said)
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

/** Shows what the decision met. @param {Refused} error @param {string} id */
async function refused(error, id) {
  const problem = byId('decide-problem')
  // The request may have arrived all the same: only the record can tell.
  const unclear = error.code === 'unreachable' || error.code === 'store_unavailable'
  const more = ' Whether it was done shows in the record, which is asked for again.'
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
    notice('The record is no longer there: it was deleted, or it has expired.')
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
      `The record changed while you were deciding: ${changes.join('; ')}. What you wrote was not stored, unless the history says so.`,
    )
    return leave()
  }
  seen = fresh
  byId('confirm', HTMLInputElement).value = ''
  byId('decide-changed').replaceChildren(
    make('b', {}, 'The record changed while you were deciding, so nothing was done.'),
    make('ul', {}, ...changes.map((change) => make('li', {}, change))),
    'Look again. If you still want it, confirm again.',
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
  const was = before.state === state ? 'it is still' : `it was ${STATES[before.state]}, and is`
  return [
    `it was written again at ${moment(after.updatedAt)}`,
    `${was} ${STATES[state]}`,
    ...(askedAgain ? [`the proxy has asked the upstream again${answer}`] : []),
    ...(before.fence === after.fence ? [] : ['a new attempt has begun']),
    ...(before.lastError === lastError || lastError === null ? [] : [`last error: ${lastError}`]),
  ]
}
