import { setTimeout as wait } from 'node:timers/promises'
import type { Parts } from './compose.ts'
import type { Millis } from './core/record.ts'
import { closeServer } from './http/connections.ts'
import { unknownBecause } from './protect/classify.ts'

/** How often the drain checks whether everything has finished. */
const CHECK_EVERY: Millis = 20

/** Announces, serves on for `drain.delay`, then ends: running requests finish and are stored, up to `drain.timeout` (contract §11). */
export async function drain(parts: Parts): Promise<void> {
  const { log, state, settler, waiters, running, inFlight, shadow, reconciler, data, closing } = parts
  const { delay, timeout } = state.config.drain
  state.draining = true
  const reconciled = reconciler.stop()
  log.info({ inFlight: inFlight.count, unsettled: settler.size }, 'draining')
  await wait(delay)

  const deadline = performance.now() + timeout
  const left = (): Millis => Math.max(0, deadline - performance.now())
  waiters.drain()
  data.endConnections()
  const closed = closeServer(data)
  const busy = (): boolean =>
    data.unanswered > 0 || inFlight.count + shadow.size > 0 || running.size > 0 || settler.size > 0
  while (busy() && left() > 0) {
    if (settler.size > 0 && running.size === 0) await settler.flush()
    data.closeIdleConnections()
    await wait(Math.min(CHECK_EVERY, left()))
  }

  // Nobody will see how these end: recorded now, so that retries need not wait for the lease.
  const unseen = unknownBecause('the proxy was stopped before the upstream answered', null)
  await Promise.allSettled([...running].map(([, execution]) => settler.settle(execution, unseen, () => {})))
  // An execution without a claim is held first: the store may be back.
  if (settler.size > 0) await settler.flush()
  // Who waits for an execution elsewhere is told that it is still running, before the connections end.
  if (waiters.size > 0) {
    waiters.close()
    await wait(CHECK_EVERY)
  }
  shadow.close()
  data.closeAllConnections()
  await closed
  // A question that is cut off is asked again by another replica.
  await Promise.race([reconciled, wait(left(), undefined, { ref: false })])
  await closing.disposeAsync()
  log.info('stopped')
}
