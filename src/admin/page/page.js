import { call, keepToken, open, Refused, readRoutes, token } from './api.js'
import { count, drawCounters } from './counters.js'
import { askFor, close as closeDecision, deciding, prepareDecisions } from './decide.js'
import { announce, byId, show, write } from './dom.js'
import { emptyQueue, prepareQueue, refreshQueue } from './queue.js'
import { closeRecord, openRecord, refreshRecord, whenDeciding } from './record.js'
import { emptySearch, fillRoutes, prepareSearch } from './search.js'
import { CLOCK } from './words.js'

const REFRESH_MS = 5000
/** A record's history is written shortly after the event. */
const HISTORY_MS = 700

let paused = false
/** Grows with each token: responses to an earlier one are dropped. */
let session = 0
let routesRead = false
/** @type {string | null} */
let refreshedAt = null
/** @type {ReturnType<typeof setTimeout> | undefined} */
let timer
/** @type {Promise<void> | null} */
let refreshing = null
/** Row and scroll position to restore. @type {{ row: string, top: number } | null} */
let cameFrom = null

/** @param {'live' | 'wait' | 'paused' | 'bad'} mood @param {string} text */
function pulse(mood, text) {
  byId('pulse').dataset['mood'] = mood
  write(byId('pulse-text'), text)
}

function refresh() {
  clearTimeout(timer)
  const mine = session
  refreshing = (refreshing ?? Promise.resolve())
    .then(async () => {
      if (mine === session && !byId('app').hidden) await refreshOnce(mine)
    })
    .catch(() => write(byId('problem'), 'Something went wrong on this page: reload it.'))
  return refreshing.finally(() => {
    clearTimeout(timer)
    if (mine === session && !paused && !document.hidden) timer = setTimeout(refresh, REFRESH_MS)
  })
}

/** @param {number} mine */
async function refreshOnce(mine) {
  const record = !byId('record').hidden
  const results = await Promise.allSettled([
    open('readyz').then(({ text }) => JSON.parse(text)),
    (async () => {
      if (!routesRead) {
        await readRoutes()
        routesRead = true
        fillRoutes('route', 'match by method and path')
        fillRoutes('queue-route', 'all')
      }
      await refreshQueue()
      // After the queue, which sets the clock.
      if (record && !deciding()) await refreshRecord()
    })(),
  ])
  // After the queue, whose counts override the metrics.
  const [metrics] = await Promise.allSettled([open('metrics')])
  if (mine !== session) return
  if (metrics.status === 'fulfilled') count(metrics.value.text)
  const failed = [...results, metrics].find(({ status }) => status === 'rejected')
  const error = failed?.status === 'rejected' ? failed.reason : null
  if (error instanceof Refused && error.code === 'unauthorized')
    return leave('The proxy no longer accepts the token.')
  const message =
    error === null ? '' : error instanceof Refused ? error.message : 'The page could not read the response.'
  const asOf = refreshedAt === null ? '' : ` Data as of ${refreshedAt}.`
  write(byId('problem'), message === '' ? '' : message + asOf)
  if (error !== null) return pulse('bad', refreshedAt === null ? 'Not loaded' : `As of ${refreshedAt}`)
  refreshedAt = CLOCK.format(new Date())
  const [ready] = results
  const { draining, store } = ready.status === 'fulfilled' ? ready.value : { draining: false, store: {} }
  if (store.up === false) pulse('bad', 'The store is down')
  else if (draining) pulse('bad', `Draining · ${refreshedAt}`)
  else pulse(paused ? 'paused' : 'live', paused ? `Paused at ${refreshedAt}` : `Live · ${refreshedAt}`)
}

/** Shows the record in the URL, or the queue. */
function route() {
  const id = /^#\/records\/([A-Za-z0-9_-]+)$/.exec(location.hash)?.[1] ?? null
  if (deciding()) closeDecision()
  const wasRecord = !byId('record').hidden
  if (id !== null && !wasRecord)
    cameFrom = {
      row: `row-${document.activeElement?.closest('tr')?.id.replace(/^row-/, '') ?? ''}`,
      top: scrollY,
    }
  show(byId('queue'), id === null)
  show(byId('record'), id !== null)
  byId('app').dataset['view'] = id === null ? 'queue' : 'record'
  document.title =
    id === null ? 'idempotency-proxy: operators' : `Record ${id.slice(0, 12)} · idempotency-proxy`
  if (id === null) {
    closeRecord()
    if (wasRecord && cameFrom !== null) {
      scrollTo({ top: cameFrom.top })
      const link = document.getElementById(cameFrom.row)?.querySelector('a') ?? byId('content')
      link.focus({ preventScroll: true })
    }
  } else {
    openRecord(id)
    byId('record-title').focus({ preventScroll: true })
    scrollTo({ top: 0 })
    // Without waiting for a running refresh. The next one reports failures.
    if (routesRead) refreshRecord().catch(() => {})
  }
  void refresh()
}

function enter() {
  session++
  routesRead = false
  refreshedAt = null
  show(byId('gate'), false)
  show(byId('app'), true)
  drawCounters()
  emptyQueue()
  emptySearch()
  pulse('wait', 'Loading')
  route()
}

/** Forgets the token and everything shown with it. @param {string} why */
function leave(why) {
  session++
  clearTimeout(timer)
  keepToken(null)
  if (deciding()) closeDecision()
  byId('decide-form', HTMLFormElement).reset()
  show(byId('app'), false)
  show(byId('record'), false)
  closeRecord()
  byId('counters').replaceChildren()
  emptyQueue()
  emptySearch()
  write(byId('problem'), '')
  show(byId('gate'), true)
  write(byId('gate-problem'), why)
  byId('token').focus()
}

byId('gate-form').addEventListener('submit', (event) => {
  event.preventDefault()
  void tryToken()
})

async function tryToken() {
  const input = byId('token', HTMLInputElement)
  const problem = byId('gate-problem')
  write(problem, '')
  keepToken(input.value.trim())
  try {
    await call('GET', 'v1/config')
    input.value = ''
    enter()
  } catch (error) {
    keepToken(null)
    if (!(error instanceof Refused)) throw error
    write(problem, error.message)
    input.select()
  }
}

byId('leave').addEventListener('click', () => leave(''))

byId('pause').addEventListener('click', () => {
  paused = !paused
  byId('pause').setAttribute('aria-pressed', String(paused))
  write(byId('pause'), paused ? 'Resume' : 'Pause')
  if (paused) {
    clearTimeout(timer)
    pulse('paused', refreshedAt === null ? 'Paused' : `Paused at ${refreshedAt}`)
  } else void refresh()
})

document.addEventListener('visibilitychange', () => {
  if (!document.hidden && !paused && !byId('app').hidden) void refresh()
})

document.addEventListener('keydown', (event) => {
  if (
    byId('app').hidden ||
    deciding() ||
    event.ctrlKey ||
    event.metaKey ||
    event.altKey ||
    event.defaultPrevented
  )
    return
  const typing = event.target instanceof HTMLElement && event.target.matches('input, textarea, select')
  if (event.key === '/' && !typing) {
    event.preventDefault()
    byId('find').focus()
    byId('find', HTMLInputElement).select()
  } else if (event.key === 'Escape') {
    if (typing && event.target instanceof HTMLElement) event.target.blur()
    else if (!byId('record').hidden) location.hash = '#/'
  }
})

window.addEventListener('hashchange', () => {
  if (!byId('app').hidden) route()
})

prepareQueue(() => void refresh())
prepareSearch((id) => {
  if (location.hash === `#/records/${id}`) void refresh()
  location.hash = `#/records/${id}`
})
whenDeciding(askFor)
prepareDecisions((gone) => {
  if (gone) location.hash = '#/'
  else void refresh()
  setTimeout(() => void refresh(), HISTORY_MS)
})

window.addEventListener('unhandledrejection', () => announce('Something went wrong on this page: reload it.'))

if (token() === null) {
  show(byId('gate'), true)
  byId('token').focus()
} else enter()
