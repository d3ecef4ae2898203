import type { Millis, RecordId } from '../core/record.ts'
import { StoreUnavailable } from '../store/register.ts'
import type { ReconcilePorts } from './ports.ts'

export interface RoundsOptions {
  /** One round. True: there may be more to do. */
  readonly round: () => Promise<boolean>
  /** Pauses, ±25 %: between rounds, while there is more to do, and at most while the store does not answer. */
  readonly every: Millis
  readonly soon: Millis
  readonly most: Millis
  /** For the log: a round failed although the store was available. */
  readonly trouble: string
  readonly ports: Pick<ReconcilePorts, 'observer' | 'random'>
}

/** Repeats work that every replica does, at irregular intervals so that they do not collide each time. */
export class Rounds {
  readonly #options: RoundsOptions
  #timer: NodeJS.Timeout | null = null
  #running: Promise<unknown> = Promise.resolve()
  #stopped = false

  constructor(options: RoundsOptions) {
    this.#options = options
  }

  get stopped(): boolean {
    return this.#stopped
  }

  start(): void {
    this.#later(this.#options.every)
  }

  /** Starts no other round; resolves when the current one has ended. */
  async stop(): Promise<void> {
    this.#stopped = true
    if (this.#timer !== null) clearTimeout(this.#timer)
    await this.#running
  }

  #later(pause: Millis): void {
    if (this.#stopped) return
    const { round, every, soon, most, trouble, ports } = this.#options
    this.#timer = setTimeout(
      () => {
        this.#running = round().then(
          (more) => this.#later(more ? soon : every),
          (error) => {
            if (!(error instanceof StoreUnavailable))
              ports.observer.trouble(trouble, { error: String(error) })
            this.#later(Math.min(Math.max(pause, every) * 2, most))
          },
        )
      },
      pause * (0.75 + 0.5 * ports.random()),
    ).unref()
  }
}

/** Processes the ids, several at once, until the list is empty. Waits for running work before it throws. */
export async function each(
  ids: RecordId[],
  atOnce: number,
  isStopped: () => boolean,
  work: (id: RecordId) => Promise<void>,
): Promise<void> {
  const worker = async (): Promise<void> => {
    for (let id = ids.pop(); id !== undefined && !isStopped(); id = ids.pop()) await work(id)
  }
  const ended = await Promise.allSettled(Array.from({ length: atOnce }, worker))
  for (const one of ended) if (one.status === 'rejected') throw one.reason
}

/** So that each replica finds work that no other has started. */
export function shuffled<T>(items: readonly T[], random: () => number): T[] {
  return items
    .map((item) => ({ item, at: random() }))
    .sort((a, b) => a.at - b.at)
    .map(({ item }) => item)
}
