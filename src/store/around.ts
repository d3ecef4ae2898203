import type { Store } from './register.ts'

/** Operations as metrics and spans name them. `watch` is none: it never fails and says nothing about the store. */
export const OPERATIONS = [
  'put',
  'swap',
  'get',
  'renew',
  'due',
  'remove',
  'list',
  'note',
  'notes',
  'throttle',
  'ping',
  'traits',
] as const
export type StoreOperation = (typeof OPERATIONS)[number]

/**
 * Runs an operation, or refuses to. A hook that only observes attaches to the promise of `run` and returns that same promise:
 * each one in between costs the request a turn of the microtask queue.
 */
export type Hook = <T>(operation: StoreOperation, run: () => Promise<T>) => Promise<T>

/** `store`, every operation run by `hook`. */
export function around(store: Store, hook: Hook): Store {
  const { history, limits } = store
  return {
    name: store.name,
    put: (id, bytes, spans) => hook('put', () => store.put(id, bytes, spans)),
    swap: (id, condition, bytes, spans, nextFence) =>
      hook('swap', () => store.swap(id, condition, bytes, spans, nextFence)),
    get: (id) => hook('get', () => store.get(id)),
    renew: (items) => hook('renew', () => store.renew(items)),
    due: (limit) => hook('due', () => store.due(limit)),
    remove: (id, version) => hook('remove', () => store.remove(id, version)),
    list: (which, cursor, limit) => hook('list', () => store.list(which, cursor, limit)),
    ping: () => hook('ping', () => store.ping()),
    history: {
      append: (id, notes) => hook('note', () => history.append(id, notes)),
      read: (id) => hook('notes', () => history.read(id)),
    },
    limits: {
      take: (bucket, rate, units) => hook('throttle', () => limits.take(bucket, rate, units)),
    },
    watch: (id, changed) => store.watch(id, changed),
    traits: () => hook('traits', () => store.traits()),
    close: () => store.close(),
  }
}
