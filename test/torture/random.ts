import { mulberry32 } from '../support/random.ts'

/** The same draws for the same seed. */
export class Random {
  /** From 0 to below 1. */
  readonly next: () => number

  constructor(seed: number) {
    this.next = mulberry32(seed)
  }

  /** A whole number from `from` to `to`. */
  between(from: number, to: number): number {
    return from + Math.floor(this.next() * (to - from + 1))
  }

  chance(share: number): boolean {
    return this.next() < share
  }

  pick<T>(of: readonly T[]): T {
    return of[Math.floor(this.next() * of.length)] as T
  }
}
