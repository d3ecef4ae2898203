import { hexPair, type Text } from './json-text.ts'

export const SPACE = 0x20
export const QUOTE = 0x22
const PLUS = 0x2b
export const COMMA = 0x2c
export const MINUS = 0x2d
export const DOT = 0x2e
const SLASH = 0x2f
export const ZERO = 0x30
export const COLON = 0x3a
export const OPEN_ARRAY = 0x5b
const BACKSLASH = 0x5c
export const CLOSE_ARRAY = 0x5d
export const LOWER_E = 0x65
export const LOWER_F = 0x66
export const LOWER_N = 0x6e
export const LOWER_T = 0x74
const LOWER_U = 0x75
export const OPEN_OBJECT = 0x7b
export const CLOSE_OBJECT = 0x7d

/** Deeper than any honest request (contract §5). */
export const MAX_DEPTH = 100

/** Canonical form would lose information. Caught within the reader. */
export class Lossy extends Error {}

/** 1: a byte that strings contain unescaped. */
export const PLAIN = Uint8Array.from({ length: 256 }, (_, byte) =>
  byte < 0x20 || byte === QUOTE || byte === BACKSLASH ? 0 : 1,
)

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

/** Stands for an escaped quote in a decoded name. Never occurs in UTF-8. */
export const QUOTE_WITHIN = 0xff

/** Continues within a string from `at`, and returns the position of its closing quote. */
export function readString(text: Text, at: number): number {
  for (;;) {
    const { memory } = text
    while (PLAIN[memory[at] as number] !== 0) at++
    if (memory[at] === QUOTE) return at
    const code = readEscape(memory, at)
    const end = at + lengthOf(memory, at, code)
    if (!isCanonical(memory, at, code)) {
      text.leaveOut(at, end)
      putCharacter(text, code)
    }
    at = end
  }
}

/** Decodes the escapes of a name in the body, in place. The name still ends with a quote, at the same place or before. */
export function takeOutEscapes(memory: Uint8Array, start: number, end: number): void {
  let to = start
  for (let at = start; at < end; ) {
    if (memory[at] !== BACKSLASH) {
      memory[to++] = memory[at++] as number
      continue
    }
    const code = readEscape(memory, at)
    at += lengthOf(memory, at, code)
    if (code === QUOTE) memory[to++] = QUOTE_WITHIN
    else for (const byte of Buffer.from(String.fromCodePoint(code))) memory[to++] = byte
  }
  memory[to] = QUOTE
}

/** The code point of the escape at `at`. */
function readEscape(memory: Uint8Array, at: number): number {
  if (memory[at] !== BACKSLASH) throw new Lossy()
  const letter = memory[at + 1] as number
  if (letter !== LOWER_U) {
    if (CHARACTERS[letter] === 0) throw new Lossy()
    return CHARACTERS[letter] as number
  }
  const unit = readUnit(memory, at)
  if (unit < 0xd800 || unit > 0xdfff) return unit
  const isPair = memory[at + 6] === BACKSLASH && memory[at + 7] === LOWER_U
  const low = isPair ? readUnit(memory, at + 6) : 0
  if (unit > 0xdbff || low < 0xdc00 || low > 0xdfff) throw new Lossy()
  return 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00)
}

/** The four hex digits of a `\u`. */
function readUnit(memory: Uint8Array, at: number): number {
  const high = hexPair(memory, at + 2)
  const low = hexPair(memory, at + 4)
  if (high < 0 || low < 0) throw new Lossy()
  return high * 256 + low
}

function lengthOf(memory: Uint8Array, at: number, code: number): number {
  return memory[at + 1] !== LOWER_U ? 2 : code > 0xffff ? 12 : 6
}

/** Whether RFC 8785 writes the character like the escape at `at`. */
function isCanonical(memory: Uint8Array, at: number, code: number): boolean {
  if (memory[at + 1] !== LOWER_U) return code !== SLASH
  const lastDigit = memory[at + 5] as number
  return code < 0x20 && LETTERS[code] === 0 && (lastDigit < 0x41 || lastDigit > 0x60)
}

/** A character of a string as RFC 8785 writes it. */
function putCharacter(text: Text, code: number): void {
  const letter = LETTERS[code] ?? 0
  if (letter !== 0) {
    text.put(BACKSLASH)
    text.put(letter)
  } else if (code < 0x20) {
    for (const digit of `\\u${code.toString(16).padStart(4, '0')}`) text.put(digit.charCodeAt(0))
  } else putUtf8(text, code)
}

function putUtf8(text: Text, code: number): void {
  if (code < 0x80) return text.put(code)
  if (code < 0x800) text.put(0xc0 | (code >> 6))
  else {
    if (code < 0x10000) text.put(0xe0 | (code >> 12))
    else {
      text.put(0xf0 | (code >> 18))
      text.put(0x80 | ((code >> 12) & 0x3f))
    }
    text.put(0x80 | ((code >> 6) & 0x3f))
  }
  text.put(0x80 | (code & 0x3f))
}

/** Maximum number of digits of a printed double. */
const MAX_DIGITS = 17
/** A decimal of up to this many digits survives as a double, except near the limits of doubles. */
export const SURE_DIGITS = 15

/** Scales of the largest and the smallest double. */
const LARGEST = 309
const SMALLEST = -323

const DIGITS = new Uint8Array(MAX_DIGITS)

/** The output of {@link printNumber}. */
const PRINTED = Buffer.alloc(32)

/** Reads `-? (0 | [1-9][0-9]*) (\.[0-9]+)? ([eE][+-]?[0-9]+)?` and returns its end. */
export function readNumber(text: Text, start: number): number {
  const { memory } = text
  const isNegative = memory[start] === MINUS
  const whole = isNegative ? start + 1 : start
  const point = digitsEnd(memory, whole)
  if (point === whole || (memory[whole] === ZERO && point > whole + 1)) throw new Lossy()
  let end = point
  if (memory[end] === DOT) {
    end = digitsEnd(memory, point + 1)
    if (end === point + 1) throw new Lossy()
  }
  const mantissaEnd = end
  let exponent = 0
  if (((memory[end] as number) | 0x20) === LOWER_E) {
    const sign = memory[end + 1]
    const power = sign === PLUS || sign === MINUS ? end + 2 : end + 1
    end = digitsEnd(memory, power)
    if (end === power) throw new Lossy()
    for (let at = power; at < end; at++) exponent = exponent * 10 + (memory[at] as number) - ZERO
    if (sign === MINUS) exponent = -exponent
  }
  let first = whole
  while (first < mantissaEnd && isFiller(memory[first])) first++
  if (first === mantissaEnd) {
    if (isNegative) text.leaveOut(start, whole)
    if (end > whole + 1) text.leaveOut(whole + 1, end)
    return end
  }
  let last = mantissaEnd - 1
  while (isFiller(memory[last])) last--
  const isShort = mantissaEnd - whole <= SURE_DIGITS + 1 && first - point <= 6
  if (isShort && end === mantissaEnd && mantissaEnd > point) {
    const kept = last > point ? last + 1 : point
    if (kept < end) text.leaveOut(kept, end)
    return end
  }
  const scale = (first < point ? point : point + 1) - first + exponent
  const length = printNumber(memory, isNegative, first, last, scale)
  if (isPrinted(memory, start, end, length)) return end
  text.leaveOut(start, end)
  text.putAll(PRINTED, length)
  return end
}

/** End of the digits at `at`. */
function digitsEnd(memory: Uint8Array, at: number): number {
  while ((memory[at] as number) >= ZERO && (memory[at] as number) <= ZERO + 9) at++
  return at
}

function isPrinted(memory: Uint8Array, start: number, end: number, length: number): boolean {
  if (end - start !== length) return false
  for (let n = 0; n < length; n++) if (memory[start + n] !== PRINTED[n]) return false
  return true
}

/** A zero or the point. */
function isFiller(byte: number | undefined): boolean {
  return byte === ZERO || byte === DOT
}

/**
 * Prints the double of a non-zero decimal as ECMAScript does, if that is the same decimal: `0.` and the digits from `first` to
 * `last` (neither zero; a point among them is skipped), times ten to the power of `scale`. Returns the length.
 */
function printNumber(
  memory: Uint8Array,
  isNegative: boolean,
  first: number,
  last: number,
  scale: number,
): number {
  if (last - first > MAX_DIGITS || scale > LARGEST || scale < SMALLEST) throw new Lossy()
  let count = 0
  for (let at = first; at <= last; at++) {
    const byte = memory[at] as number
    if (byte === DOT) continue
    if (count === MAX_DIGITS) throw new Lossy()
    DIGITS[count++] = byte
  }
  if (isNegative) PRINTED[0] = MINUS
  const length = print(isNegative ? 1 : 0, count, scale)
  if (count <= SURE_DIGITS && scale > SMALLEST + MAX_DIGITS && scale < LARGEST) return length
  const text = PRINTED.toString('latin1', 0, length)
  if (String(Number(text)) !== text) throw new Lossy()
  return length
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
