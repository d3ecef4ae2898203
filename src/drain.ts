import { setTimeout as wait } from 'node:timers/promises'
import type { TrafficParts } from './compose/proxy.ts'
import type { Millis } from './core/record.ts'
import { unknownBecause } from './core/settle.ts'
import { closeServer } from './http/connections.ts'
import { within } from './runtime/scheduling.ts'

/** How often the drain checks whether everything has finished. */
const CHECK_EVERY: Millis = 20

/**
 * Announces the shutdown, keeps serving for `drain.delay` or until `unlistened`, then stops: running requests finish and are stored, up to
 * `drain.timeout` (contract §11).
 */
export async function drain(parts: TrafficParts, unlistened: Promise<unknown> | null = null): Promise<void> {
  const { log, state, settler, waiters, running, inFlight, shadow, reconciler, data, closing } = parts
  const { delay, timeout } = state.config.drain
  state.stopping = true
  state.draining = true
  const reconciled = reconciler.stop()
  log.info({ inFlight: inFlight.count, unsettled: settler.size }, 'draining')
  await (unlistened ?? wait(delay))

  const deadline = performance.now() + timeout
  const left = (): Millis => Math.max(0, deadline - performance.now())
  waiters.drain()
  data.endConnections()
  await data.closeListener()
  const closed = closeServer(data)
  const busy = (): boolean =>
    data.unanswered + data.awaiting > 0 ||
    inFlight.count + shadow.size > 0 ||
    running.size > 0 ||
    settler.size > 0
  while (busy() && left() > 0) {
    if (settler.size > 0 && running.size === 0) await settler.flush()
    await data.closeIdle()
    await wait(Math.min(CHECK_EVERY, left()))
  }

  // Nobody will see how these end: record them as unknown now, so that retries need not wait for the lease.
  const unseen = unknownBecause('the proxy was stopped before the upstream answered', null)
  await Promise.allSettled(
    [...running].map(async ([, execution]) => settler.settle(execution, unseen, () => {})),
  )
  // An execution without a claim is held first: the store may be back.
  if (settler.size > 0) await settler.flush()
  // Before connections close, duplicates that wait for other replicas are told that these are still running.
  if (waiters.size > 0) {
    waiters.close()
    await wait(CHECK_EVERY)
  }
  shadow.close()
  data.closeAllConnections()
  await closed
  // A status query that is cut off is sent again by another replica.
  await within(left(), reconciled)
  await closing.disposeAsync()
  log.info('stopped')
}
