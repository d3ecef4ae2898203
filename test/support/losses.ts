import { randomInt } from 'node:crypto'
import { setTimeout as wait } from 'node:timers/promises'

/** Ways to take from a store what it acknowledged last. Each resolves when the servers are whole again. */
export type Losses = Readonly<Record<string, () => Promise<void>>>

/** A store of several servers. */
export interface Losing extends AsyncDisposable {
  readonly url: string
  readonly losses: Losses
}

/** Waits for writes that will be lost. */
export function unheard(): Promise<void> {
  return wait(randomInt(300))
}
