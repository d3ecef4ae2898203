import type { Millis } from '../core/record.ts'
import type { Io } from './command.ts'

const DRAW_EVERY: Millis = 100
const TELL_EVERY: Millis = 10_000
const BAR = 30

/** Shows the progress of a long command on standard error: a bar on a terminal, otherwise a line now and then. */
export class ProgressBar {
  readonly #io: Io
  /** Null: unknown. */
  readonly #total: number | null
  readonly #startedAt = performance.now()
  #done = 0
  #drawnAt = this.#startedAt

  constructor(io: Io, total: number | null) {
    this.#io = io
    this.#total = total
  }

  add(): void {
    this.#done++
    const now = performance.now()
    if (now - this.#drawnAt < (this.#io.columns === null ? TELL_EVERY : DRAW_EVERY)) return
    this.#drawnAt = now
    this.#draw()
  }

  /** Prints a separate line. */
  tell(line: string): void {
    this.#io.err(this.#io.columns === null ? `${line}\n` : `\r${line}\x1b[K\n`)
  }

  /** Leaves the last state on the screen. */
  end(): void {
    if (this.#io.columns === null) return
    this.#draw()
    this.#io.err('\n')
  }

  #draw(): void {
    const { columns } = this.#io
    const seconds = (performance.now() - this.#startedAt) / 1000
    const pace = `${counted(this.#done)} records, ${counted(Math.round(this.#done / seconds))}/s`
    if (columns === null) this.#io.err(`${pace}\n`)
    else this.#io.err(`\r${`${this.#bar()}${pace}`.slice(0, columns - 1)}\x1b[K`)
  }

  #bar(): string {
    if (this.#total === null) return ''
    // Records come and go, and a store may name one twice.
    const share = Math.min(1, this.#done / Math.max(1, this.#total))
    const filled = Math.round(share * BAR)
    return `[${'#'.repeat(filled)}${'-'.repeat(BAR - filled)}] ${Math.floor(share * 100)} %  `
  }
}

function counted(n: number): string {
  return n.toLocaleString('en')
}
