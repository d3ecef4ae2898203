/**
 * Preloaded into the proxy (`--import`, with `--expose-gc`): reports over IPC what only the process itself knows. The channel
 * keeps nothing alive and is not counted.
 */
import { IncomingMessage } from 'node:http'
import { Socket } from 'node:net'
import { setImmediate as turn } from 'node:timers/promises'
import { queryObjects, writeHeapSnapshot } from 'node:v8'

/** The proxy process's own figures, after a full collection. */
export interface Inside {
  readonly heapUsed: number
  /** Outside the heap, `arrayBuffers` included. */
  readonly external: number
  readonly arrayBuffers: number
  /** What keeps the event loop alive, by kind. */
  readonly resources: Readonly<Record<string, number>>
  /** Reachable objects by kind, including timers that keep nothing alive. */
  readonly objects: Readonly<Record<string, number>>
}

/** Collections until objects released by finalizers are gone, too. */
const COLLECTIONS = 4

const timer = setTimeout(() => {}, 0)
clearTimeout(timer)
const KINDS = { Timeout: timer.constructor, Socket, IncomingMessage, AbortSignal, Promise }

process.on('message', (question: { readonly snapshot: string | null }) => {
  void tell(question.snapshot)
})
process.channel?.unref()

async function tell(snapshot: string | null): Promise<void> {
  const resources: Record<string, number> = {}
  for (const kind of process.getActiveResourcesInfo()) resources[kind] = (resources[kind] ?? 0) + 1
  for (let n = 0; n < COLLECTIONS; n++) {
    await turn()
    ;(globalThis as { gc?: () => void }).gc?.()
  }
  const { heapUsed, external, arrayBuffers } = process.memoryUsage()
  // To count, V8 collects all it can and returns pages, so that resident memory varies little.
  const objects = Object.fromEntries(
    Object.entries(KINDS).map(([kind, made]) => [kind, queryObjects(made, { format: 'count' })]),
  )
  if (snapshot !== null) writeHeapSnapshot(snapshot)
  process.send?.({ heapUsed, external, arrayBuffers, resources, objects } satisfies Inside)
}
