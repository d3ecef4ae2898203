import { call, keepToken, open, Refused, readRoutes, token } from './api.js'
import { count, drawCounters } from './counters.js'
import { askFor, close as closeDecision, deciding, prepareDecisions } from './decide.js'
import { announce, byId, show, write } from './dom.js'
import { emptyQueue, prepareQueue, refreshQueue } from './queue.js'
import { closeRecord, openRecord, refreshRecord, whenDeciding } from './record.js'
import { emptySearch, fillRoutes, prepareSearch } from './search.js'
import { CLOCK } from './words.js'

/** How long the page rests between two refreshes. */
const EVERY = 5000
/** A history is written down a moment after what it tells. */
const WRITTEN_BY = 700

let paused = false
/** Counts the tokens in use: an answer to an earlier one is no longer shown. */
let session = 0
let routesRead = false
/** @type {string | null} */
let refreshedAt = null
/** @type {ReturnType<typeof setTimeout> | undefined} */
let timer
/** @type {Promise<void> | null} */
let refreshing = null
/** Where the reader came from, to go back to. @type {{ row: string, top: number } | null} */
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
    .catch(() => write(byId('problem'), 'Something went wrong on this page: load it anew.'))
  return refreshing.finally(() => {
    clearTimeout(timer)
    if (mine === session && !paused && !document.hidden) timer = setTimeout(refresh, EVERY)
  })
}

/** @param {number} mine */
async function refreshOnce(mine) {
  const record = !byId('record').hidden
  const asked = await Promise.allSettled([
    open('readyz').then(({ text }) => JSON.parse(text)),
    (async () => {
      if (!routesRead) {
        await readRoutes()
        routesRead = true
        fillRoutes('route', 'found by method and path')
        fillRoutes('queue-route', 'all')
      }
      await refreshQueue()
      // Its times are told by the clock that came with the queue.
      if (record && !deciding()) await refreshRecord()
    })(),
  ])
  // After the queue, which has counted what it shows.
  const [counted] = await Promise.allSettled([open('metrics')])
  if (mine !== session) return
  if (counted.status === 'fulfilled') count(counted.value.text)
  const failed = [...asked, counted].find(({ status }) => status === 'rejected')
  const error = failed?.status === 'rejected' ? failed.reason : null
  if (error instanceof Refused && error.code === 'unauthorized')
    return leave('The proxy no longer takes the token.')
  const words =
    error === null ? '' : error instanceof Refused ? error.message : 'The page could not read the answer.'
  const asOf = refreshedAt === null ? '' : ` What is shown is as of ${refreshedAt}.`
  write(byId('problem'), words === '' ? '' : words + asOf)
  if (error !== null) return pulse('bad', refreshedAt === null ? 'Not loaded' : `As of ${refreshedAt}`)
  refreshedAt = CLOCK.format(new Date())
  const [ready] = asked
  const { draining, store } = ready.status === 'fulfilled' ? ready.value : { draining: false, store: {} }
  if (store.up === false) pulse('bad', 'The store is down')
  else if (draining) pulse('bad', `Draining · ${refreshedAt}`)
  else pulse(paused ? 'paused' : 'live', paused ? `Paused at ${refreshedAt}` : `Live · ${refreshedAt}`)
}

/** What the address says is shown: a record, or the queue. */
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
    // At once, whatever is being refreshed; what fails is told by the refresh.
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

/** Forgets the token and everything that it showed. @param {string} why */
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
  write(byId('pause'), paused ? 'Go on' : 'Pause')
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
  setTimeout(() => void refresh(), WRITTEN_BY)
})

window.addEventListener('unhandledrejection', () =>
  announce('Something went wrong on this page: load it anew.'),
)

if (token() === null) {
  show(byId('gate'), true)
  byId('token').focus()
} else enter()
