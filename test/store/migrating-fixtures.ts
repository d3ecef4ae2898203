import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import type { Store } from '../../src/store/register.ts'

/** A memory store that answers later, as a server does. */
export function answeringLater(clock: () => number): Store {
  const store = memoryStore({ clock, maxBytes: MEMORY_BYTES })
  return {
    ...store,
    put: async (...args) => store.put(...args),
    swap: async (...args) => store.swap(...args),
  }
}
