import { call } from './api.js'
import { byId, make } from './dom.js'

/** @typedef {import('./words.js').Route} Route */

/** @type {readonly Route[]} */
let routes = []
/** @type {Route | null} */
let fallback = null
let protectsUnmatched = false

/** Reads the configuration in force: what records can be found by, and which routes settle by themselves. */
export async function readRoutes() {
  const config = await call('GET', 'v1/config')
  routes = config.routes
  fallback = config.defaults
  protectsUnmatched = config.unmatched === 'protect'
}

/** What no route is called any more is as `defaults` say. @param {string} name */
export function routeOf(name) {
  return routes.find((route) => route.name === name) ?? fallback
}

/** @returns {Route[]} those that a record may be of */
export function allRoutes() {
  return [
    ...routes,
    ...(protectsUnmatched && fallback !== null ? [{ ...fallback, name: 'default', match: null }] : []),
  ]
}

/** @param {string} id of a select @param {string} first what the empty choice is called */
export function fillRoutes(id, first) {
  const select = byId(id, HTMLSelectElement)
  const chosen = select.value
  select.replaceChildren(
    make('option', { value: '' }, first),
    ...allRoutes().map(({ name }) => make('option', { value: name }, name)),
  )
  select.value = allRoutes().some(({ name }) => name === chosen) ? chosen : ''
}
