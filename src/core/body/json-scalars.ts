import type { Pieces } from './json-pieces.ts'

export const QUOTE = 0x22
export const PLUS = 0x2b
export const COMMA = 0x2c
export const MINUS = 0x2d
export const DOT = 0x2e
export const SLASH = 0x2f
export const ZERO = 0x30
export const NINE = 0x39
export const COLON = 0x3a
export const OPEN_ARRAY = 0x5b
export const BACKSLASH = 0x5c
export const CLOSE_ARRAY = 0x5d
export const LOWER_E = 0x65
export const LOWER_U = 0x75
export const OPEN_OBJECT = 0x7b
export const CLOSE_OBJECT = 0x7d

/** 0, which is no byte of JSON, beyond the end. A read out of bounds would slow the code down for good in V8. */
export function byteAt(body: Buffer, at: number): number {
  return at < body.length ? (body[at] as number) : 0
}

export function isSpace(byte: number): boolean {
  return byte <= 0x20 && (byte === 0x20 || byte === 0x0a || byte === 0x0d || byte === 0x09)
}

/** End of the digits at `at`. */
export function digitsEnd(body: Buffer, at: number): number {
  while (at < body.length && (body[at] as number) >= ZERO && (body[at] as number) <= NINE) at++
  return at
}

const SHORT = Object.entries({ '"': '"', '\\': '\\', b: '\b', f: '\f', n: '\n', r: '\r', t: '\t' })

/** Letter after the backslash → character; 0: no escape. */
const CHARACTERS = new Uint8Array(256)
/** Character → letter; 0: written as is, or with `\u` if it is a control character. */
const LETTERS = new Uint8Array(256)
for (const [letter, character] of SHORT) {
  CHARACTERS[letter.charCodeAt(0)] = character.charCodeAt(0)
  LETTERS[character.charCodeAt(0)] = letter.charCodeAt(0)
}
CHARACTERS[SLASH] = SLASH

/** The character of a short escape; 0: no such escape. */
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

/** Bytes that end a run of plain characters in a string. */
export const STOPS = Uint8Array.from({ length: 256 }, (_, byte) =>
  byte < 0x20 || byte === QUOTE || byte === BACKSLASH ? 1 : 0,
)

/** Most digits of a printed double. */
const MOST_DIGITS = 17
/** A decimal of up to so many digits survives as a double, except near the limits of doubles. */
const SURE_DIGITS = 15

/** Scales of the largest and the smallest double. */
const LARGEST = 309
const SMALLEST = -323

const DIGITS = new Uint8Array(MOST_DIGITS)

/** What {@link printNumber} printed. */
const PRINTED = Buffer.alloc(32)

/**
 * Reads `-? (0 | [1-9][0-9]*) (\.[0-9]+)? ([eE][+-]?[0-9]+)?` and returns its end; -1: no number, or its decimal value is not
 * what ECMAScript prints for the double.
 */
export function readNumber(body: Buffer, start: number, pieces: Pieces): number {
  const isNegative = byteAt(body, start) === MINUS
  const whole = isNegative ? start + 1 : start
  const point = digitsEnd(body, whole)
  const isZero = byteAt(body, whole) === ZERO
  if (point === whole || (isZero && point > whole + 1)) return -1
  let end = point
  if (byteAt(body, end) === DOT) {
    end = digitsEnd(body, point + 1)
    if (end === point + 1) return -1
  }
  const mantissaEnd = end
  let exponent = 0
  if ((byteAt(body, end) | 0x20) === LOWER_E) {
    const sign = byteAt(body, end + 1)
    const power = sign === PLUS || sign === MINUS ? end + 2 : end + 1
    end = digitsEnd(body, power)
    if (end === power) return -1
    for (let at = power; at < end; at++) exponent = exponent * 10 + (body[at] as number) - ZERO
    if (sign === MINUS) exponent = -exponent
  }
  if (end === point && point - whole <= SURE_DIGITS && !(isZero && isNegative)) return end
  let first = whole
  while (first < mantissaEnd && isFiller(body[first])) first++
  if (first === mantissaEnd) {
    pieces.leaveOut(start, whole)
    pieces.leaveOut(whole + 1, end)
    return end
  }
  let last = mantissaEnd - 1
  while (isFiller(body[last])) last--
  const isShort = mantissaEnd > point && mantissaEnd - whole <= SURE_DIGITS + 1 && first - point <= 6
  if (isShort && end === mantissaEnd) {
    pieces.leaveOut(Math.max(last + 1, point), end)
    return end
  }
  const scale = (first < point ? point : point + 1) - first + exponent
  const length = printNumber(body, isNegative, first, last, scale)
  if (length === 0) return -1
  if (isPrinted(body, start, end, length)) return end
  const made = pieces.madeLength
  pieces.putAll(PRINTED, length)
  pieces.replace(start, end, made)
  return end
}

function isPrinted(body: Buffer, start: number, end: number, length: number): boolean {
  if (end - start !== length) return false
  for (let n = 0; n < length; n++) if (body[start + n] !== PRINTED[n]) return false
  return true
}

/** A zero or the point. */
function isFiller(byte: number | undefined): boolean {
  return byte === ZERO || byte === DOT
}

/**
 * Prints the double of a non-zero decimal as ECMAScript does: `0.` and the digits from `first` to `last` (neither zero; a point
 * among them is skipped), times ten to the power of `scale`. Returns the length; 0: the double is printed as another decimal.
 */
function printNumber(body: Buffer, isNegative: boolean, first: number, last: number, scale: number): number {
  if (last - first > MOST_DIGITS || scale > LARGEST || scale < SMALLEST) return 0
  let count = 0
  for (let at = first; at <= last; at++) {
    const byte = body[at] as number
    if (byte === DOT) continue
    if (count === MOST_DIGITS) return 0
    DIGITS[count++] = byte
  }
  if (isNegative) PRINTED[0] = MINUS
  const length = print(isNegative ? 1 : 0, count, scale)
  if (count <= SURE_DIGITS && scale > SMALLEST + MOST_DIGITS && scale < LARGEST) return length
  const text = PRINTED.toString('latin1', 0, length)
  return String(Number(text)) === text ? length : 0
}

/** ECMAScript's Number::toString(10), with its `k` and `n`; returns the end. */
function print(at: number, k: number, n: number): number {
  if (n > 21 || n < -5) {
    PRINTED[at++] = DIGITS[0] as number
    if (k > 1) PRINTED[at++] = DOT
    for (let digit = 1; digit < k; digit++) PRINTED[at++] = DIGITS[digit] as number
    PRINTED[at++] = LOWER_E
    PRINTED[at++] = n > 0 ? PLUS : MINUS
    const power = Math.abs(n - 1)
    if (power > 99) PRINTED[at++] = ZERO + Math.floor(power / 100)
    if (power > 9) PRINTED[at++] = ZERO + (Math.floor(power / 10) % 10)
    PRINTED[at++] = ZERO + (power % 10)
    return at
  }
  if (n <= 0) {
    PRINTED[at++] = ZERO
    PRINTED[at++] = DOT
    for (let zeros = n; zeros < 0; zeros++) PRINTED[at++] = ZERO
  }
  for (let digit = 0; digit < k; digit++) {
    if (digit === n && n > 0) PRINTED[at++] = DOT
    PRINTED[at++] = DIGITS[digit] as number
  }
  for (let digit = k; digit < n; digit++) PRINTED[at++] = ZERO
  return at
}
