import type { Millis } from '../core/record.ts'

/** Short enough to resume traffic soon after the server is back, long enough not to hammer a dead host. */
const FROM: Millis = 50
/** A proxy that reconnects later than the grace after a failover has lost its claims; the shortest grace is a second. */
const TO: Millis = 500

/** Delay before the nth attempt in a row. */
export function reconnectDelay(attempt: number): Millis {
  return Math.min(FROM * 2 ** (attempt - 1), TO)
}
