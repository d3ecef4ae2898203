import { byteAt, DOT, digitsEnd, LOWER_E, MINUS, PLUS, ZERO } from './json-bytes.ts'
import type { Pieces } from './json-pieces.ts'

/** More are never printed of a double. */
const MOST_DIGITS = 17
/** A decimal of so many digits is what its double is printed as, except near the limits of doubles. */
const SURE_DIGITS = 15

/** The scales of the largest double and of the smallest. */
const LARGEST = 309
const SMALLEST = -323

const DIGITS = new Uint8Array(MOST_DIGITS)

/** What {@link printNumber} printed. */
const PRINTED = Buffer.alloc(32)

/**
 * Reads a number: `-? (0 | [1-9][0-9]*) (\.[0-9]+)? ([eE][+-]?[0-9]+)?`. Returns where it ends; -1: there is none, or its
 * decimal value is not what ECMAScript prints for the double.
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
 * Prints the double of a decimal that is not zero as ECMAScript does: the digits from `first` to `last` (neither of them zero; a
 * point among them aside), times ten to the power of `scale` where they are read as `0.…`. Returns the length; 0: the double is
 * printed as another decimal.
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

/** ECMAScript's Number::toString(10) with its `k` and `n`; returns where it ends. */
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
