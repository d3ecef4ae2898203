import { randomFillSync } from 'node:crypto'

const TOKEN_BYTES = 16
/** Drawn at once: a draw from the system costs as much as twenty tokens (docs/internals/performance.md). */
const TOKENS_DRAWN = 256

/** Owners' tokens: 16 random bytes, other ones with every call. */
export function tokens(): () => Buffer {
  const drawn = Buffer.alloc(TOKENS_DRAWN * TOKEN_BYTES)
  let at = drawn.length
  return () => {
    if (at === drawn.length) {
      randomFillSync(drawn)
      at = 0
    }
    at += TOKEN_BYTES
    // A copy: the block is drawn anew while tokens of it are in use.
    return Buffer.from(drawn.subarray(at - TOKEN_BYTES, at))
  }
}
