import { RE2JS, RE2JSException } from 're2js'

/** An RE2 regular expression, matched in linear time (ADR 0035). */
export interface KeyPattern {
  /** Anchored at both ends. */
  readonly source: string
  /** Whether the whole of `key` matches. */
  test(key: string): boolean
}

export type PatternReading =
  | { readonly kind: 'pattern'; readonly pattern: KeyPattern }
  /** `why`: invalid, unsupported or too large. */
  | { readonly kind: 'refused'; readonly why: string }

/** Matching a character of a key may visit every instruction. The largest count of RE2 takes 2001. */
const MAX_INSTRUCTIONS = 2048

export function readPattern(text: string): PatternReading {
  try {
    const whole = RE2JS.compile(text)
    if (whole.programSize() > MAX_INSTRUCTIONS) return { kind: 'refused', why: 'a pattern of that size' }
    const test = (key: string): boolean => whole.matches(key)
    return { kind: 'pattern', pattern: { source: `^(?:${text})$`, test } }
  } catch (error) {
    if (!(error instanceof RE2JSException)) throw error
    return { kind: 'refused', why: error.message.replace('error parsing regexp: ', '') }
  }
}
