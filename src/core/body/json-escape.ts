import { BACKSLASH, LOWER_U, QUOTE, SLASH } from './json-bytes.ts'
import type { Pieces } from './json-pieces.ts'

const SHORT = Object.entries({ '"': '"', '\\': '\\', b: '\b', f: '\f', n: '\n', r: '\r', t: '\t' })

/** What follows the backslash → the character; 0: no escape. */
const CHARACTERS = new Uint8Array(256)
/** The other way round; 0: written as it is, or with `\u` where it is a control character. */
const LETTERS = new Uint8Array(256)
for (const [letter, character] of SHORT) {
  CHARACTERS[letter.charCodeAt(0)] = character.charCodeAt(0)
  LETTERS[character.charCodeAt(0)] = letter.charCodeAt(0)
}
CHARACTERS[SLASH] = SLASH

/** The character of a short escape; 0: there is no such escape. */
export function shortEscape(letter: number): number {
  return CHARACTERS[letter] as number
}

/** Whether RFC 8785 writes the character as the escape at `at` does. */
export function isCanonicalEscape(body: Buffer, at: number, code: number): boolean {
  if (body[at + 1] !== LOWER_U) return code !== SLASH
  const lastDigit = body[at + 5] as number
  return code < 0x20 && LETTERS[code] === 0 && (lastDigit < 0x41 || lastDigit > 0x60)
}

/** A character of a string as RFC 8785 writes it. */
export function putEscaped(code: number, pieces: Pieces): void {
  const letter = LETTERS[code] ?? 0
  if (letter !== 0) {
    pieces.put(BACKSLASH)
    pieces.put(letter)
  } else if (code < 0x20) {
    pieces.put(BACKSLASH)
    pieces.put(LOWER_U)
    const digits = code.toString(16).padStart(4, '0')
    for (let n = 0; n < 4; n++) pieces.put(digits.charCodeAt(n))
  } else putUtf8(code, pieces)
}

export function putUtf8(code: number, pieces: Pieces): void {
  if (code < 0x80) return pieces.put(code)
  if (code < 0x800) pieces.put(0xc0 | (code >> 6))
  else {
    if (code < 0x10000) pieces.put(0xe0 | (code >> 12))
    else {
      pieces.put(0xf0 | (code >> 18))
      pieces.put(0x80 | ((code >> 12) & 0x3f))
    }
    pieces.put(0x80 | ((code >> 6) & 0x3f))
  }
  pieces.put(0x80 | (code & 0x3f))
}

/** What ends a run of plain characters in a string: quote, backslash, control characters. */
export const STOPS = Uint8Array.from({ length: 256 }, (_, byte) =>
  byte < 0x20 || byte === QUOTE || byte === BACKSLASH ? 1 : 0,
)
