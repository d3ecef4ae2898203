import type { Millis } from '../core/record.ts'

/** What `work` resolves to, or null after `limit`; the work goes on then. */
export function within<T>(limit: Millis, work: Promise<T>): Promise<T | null> {
  let timer: NodeJS.Timeout | undefined
  const late = new Promise<null>((resolve) => {
    timer = setTimeout(resolve, limit, null)
  })
  return Promise.race([work, late]).finally(() => clearTimeout(timer))
}
