/**
 * AssemblyScript, compiled by scripts/assembly.ts: src/core/body/json.ts for usual bodies, sixteen bytes at a time (docs/adr/0072).
 * All names mean the same as there; it also handles everything rare.
 */

// Addresses in the memory. Each part ends with room for reading and writing sixteen bytes too many.
const FRAMES: i32 = 0
const SORTED: i32 = 2048
const SHAPES: i32 = 4096
const MEMBERS: i32 = 166 * 1024
const BODY: i32 = 320 * 1024
const TEXT: i32 = 385 * 1024

/** Distance from the text to the bytes set aside behind it. */
const SLACK: i32 = 64
/** Bytes for which a loop is cheaper than a call. */
const FEW: i32 = 64

const MAX_DEPTH: i32 = 100
const FRAME: i32 = 16

/** Bytes of a member: position of its name, its start and end in the text. */
const MEMBER: i32 = 12
/** Objects with more members are sorted elsewhere. */
const MOST: i32 = 32

/** A shape: size of its members, whether they are in order, number of the body; then per member its name, length, n-th member in order. */
const HEAD: i32 = 12
const SHAPE: i32 = HEAD + MEMBER * MOST
const BESIDE: i32 = 4
const NO_SHAPE: i32 = -0x40000000

const SPACE: u32 = 0x20
const QUOTE: u32 = 0x22
const COMMA: u32 = 0x2c
const MINUS: u32 = 0x2d
const DOT: u32 = 0x2e
const SLASH: u32 = 0x2f
const ZERO: u32 = 0x30
const COLON: u32 = 0x3a
const OPEN_ARRAY: u32 = 0x5b
const BACKSLASH: u32 = 0x5c
const CLOSE_ARRAY: u32 = 0x5d
const LOWER_E: u32 = 0x65
const OPEN_OBJECT: u32 = 0x7b
const CLOSE_OBJECT: u32 = 0x7d
/** Difference between the bytes that open and close an object or array. */
const CLOSE: u32 = 2
/** From here on, UTF-8 and UTF-16 order differently. */
const DIFFERENT: u32 = 0xee
/** In little endian. */
const TRUE: u32 = 0x65757274
const NULL: u32 = 0x6c6c756e
const ALSE: u32 = 0x65736c61
/** Maximum digits, with the point, of a number that ECMAScript certainly prints alike. */
const SURE: i32 = 15

/** Bodies read so far. */
let body: i32 = 0
/** The body from here on is not yet in the text. */
let from: i32 = 0
/** Current end of the text. */
let out: i32 = 0

/** Address for bodies of at most 64 KiB. */
export function bodyAt(): i32 {
  return BODY
}

/** Address of texts. */
export function textAt(): i32 {
  return TEXT
}

/** Length of the canonical text; below 0: the body is canonical; 0: it is not of the usual kind. */
export function read(length: i32): i32 {
  const end = BODY + length
  // Ends every loop over the body.
  store<u8>(end, 0)
  body++
  from = BODY
  out = TEXT
  let at = BODY
  let depth: i32 = 0
  let first: i32 = -1
  let opened = BODY
  let isOrdered: i32 = 1
  let shape = NO_SHAPE
  let top = MEMBERS
  if (load<u8>(at) <= SPACE) at = skipSpace(at)

  while (true) {
    if (first >= 0) {
      // No body has so many members: each takes five bytes.
      if (load<u8>(at) != QUOTE || top > BODY - MEMBER) return 0
      const name = at + 1
      store<i32>(top, name)
      store<i32>(top, out - from + at, 4)
      const known = shape >= 0 ? knownEnd(shape, top - first, name) : 0
      top += MEMBER
      if (known > 0) at = known
      else {
        if (shape >= 0) {
          shape = ~shape
          isOrdered = areOrdered(first, top - MEMBER)
          if (isOrdered < 0) return 0
        }
        at = plainEnd(name)
        if (load<u8>(at) != QUOTE) return 0
        if (isOrdered > 0 && top - MEMBER > first) {
          isOrdered = isBefore(load<i32>(top - 2 * MEMBER), name)
          if (isOrdered < 0) return 0
        }
        at++
        if (load<u8>(at) != COLON) {
          at = skipSpace(at)
          if (load<u8>(at) != COLON) return 0
        }
        at++
      }
      if (load<u8>(at) <= SPACE) at = skipSpace(at)
    }
    const byte: u32 = load<u8>(at)
    if (byte == QUOTE) {
      at = stringEnd(at + 1)
      if (at == 0) return 0
    } else if (byte == OPEN_OBJECT || byte == OPEN_ARRAY) {
      if (depth == MAX_DEPTH) return 0
      at++
      if (load<u8>(at) <= SPACE) at = skipSpace(at)
      if (load<u8>(at) != byte + CLOSE) {
        const frame = FRAMES + FRAME * depth++
        store<i32>(frame, first)
        store<i32>(frame, opened, 4)
        store<i32>(frame, isOrdered, 8)
        store<i32>(frame, shape, 12)
        const isOne = byte == OPEN_ARRAY || depth == 1 || (first >= 0 && shape == NO_SHAPE)
        shape = isOne ? NO_SHAPE : shapeOf(depth, first < 0 ? 0 : (top - first) / MEMBER)
        first = byte == OPEN_OBJECT ? top : -1
        opened = from
        isOrdered = 1
        continue
      }
      at++
    } else if (byte == 0x74) {
      if (load<u32>(at) != TRUE) return 0
      at += 4
    } else if (byte == 0x66) {
      if (load<u32>(at + 1) != ALSE) return 0
      at += 5
    } else if (byte == 0x6e) {
      if (load<u32>(at) != NULL) return 0
      at += 4
    } else {
      at = numberEnd(at, byte)
      if (at == 0) return 0
    }
    // A value has ended; so may its parents.
    while (true) {
      if (load<u8>(at) <= SPACE) at = skipSpace(at)
      if (depth == 0) {
        if (at != end) return 0
        if (from == BODY) return -length
        keep(end)
        return out - TEXT
      }
      const closing: u32 = load<u8>(at)
      if (first >= 0) store<i32>(top - MEMBER, out - from + at, 8)
      if (closing == COMMA) {
        at++
        if (load<u8>(at) <= SPACE) at = skipSpace(at)
        break
      }
      if (closing != (first < 0 ? CLOSE_ARRAY : CLOSE_OBJECT)) return 0
      if (first >= 0) {
        const size = top - first
        if (shape >= 0 && load<i32>(shape) == size) {
          if (load<i32>(shape, 4) == 0) {
            for (let n: i32 = 0, field = shape + HEAD; n < size; n += MEMBER, field += MEMBER)
              store<i32>(SORTED + n / 3, first + load<i32>(field, 8))
            rearrange(first, size, opened, at)
          }
        } else {
          if (shape >= 0) {
            shape = ~shape
            isOrdered = areOrdered(first, top)
            if (isOrdered < 0) return 0
          }
          if (isOrdered == 0) {
            if (!sort(first, size)) return 0
            rearrange(first, size, opened, at)
          }
          if (shape != NO_SHAPE) keepShape(~shape, first, size, isOrdered)
        }
        top = first
      }
      at++
      const frame = FRAMES + FRAME * --depth
      first = load<i32>(frame)
      opened = load<i32>(frame, 4)
      isOrdered = load<i32>(frame, 8)
      shape = load<i32>(frame, 12)
    }
  }
}

/** Omits the blanks at `at`, and returns their end. */
function skipSpace(at: i32): i32 {
  let end = at
  while (true) {
    const byte: u32 = load<u8>(end)
    if (byte != SPACE && byte != 0x0a && byte != 0x0d && byte != 0x09) break
    end++
  }
  if (end > at) leaveOut(at, end)
  return end
}

/** The next byte that strings do not contain unescaped. */
function plainEnd(start: i32): i32 {
  let at = start
  while (true) {
    const bytes = v128.load(at)
    const special = v128.or(
      v128.or(i8x16.eq(bytes, i8x16.splat(QUOTE as i8)), i8x16.eq(bytes, i8x16.splat(BACKSLASH as i8))),
      i8x16.eq(i8x16.min_u(bytes, i8x16.splat(0x1f)), bytes),
    )
    const mask = i8x16.bitmask(special)
    if (mask != 0) return at + ctz(mask)
    at += 16
  }
}

/** End of a string whose bytes begin at `start`; 0: it has an escape that RFC 8785 may write differently. */
function stringEnd(start: i32): i32 {
  let at = start
  while (true) {
    at = plainEnd(at)
    if (load<u8>(at) == QUOTE) return at + 1
    if (load<u8>(at) != BACKSLASH) return 0
    switch (load<u8>(at, 1)) {
      case SLASH as u8:
        leaveOut(at, at + 1)
        break
      case QUOTE as u8:
      case BACKSLASH as u8:
      case 0x62:
      case 0x66:
      case 0x6e:
      case 0x72:
      case 0x74:
        break
      default:
        return 0
    }
    at += 2
  }
}

/** End of a number whose first byte is `byte`; 0: it may be printed differently, or is not a number. */
function numberEnd(start: i32, byte: u32): i32 {
  const whole = byte == MINUS ? start + 1 : start
  const isZero = load<u8>(whole) == ZERO
  let at = digitsEnd(whole)
  if (at == whole || (isZero && at > whole + 1)) return 0
  if (load<u8>(at) == DOT) {
    at = digitsEnd(at + 1)
    if (at - whole > SURE || (isZero && load<u8>(whole, 2) <= ZERO)) return 0
    if (load<u8>(at - 1) <= ZERO) {
      if (load<u8>(at - 1) == DOT) return 0
      let kept = at - 1
      while (load<u8>(kept - 1) == ZERO) kept--
      if (load<u8>(kept - 1) == DOT) kept--
      leaveOut(kept, at)
    }
  } else if (at - whole > SURE || (isZero && whole > start)) return 0
  return (load<u8>(at) | 0x20) == LOWER_E ? 0 : at
}

/** End of up to sixteen digits. */
function digitsEnd(at: i32): i32 {
  const digits = i8x16.sub(v128.load(at), i8x16.splat(ZERO as i8))
  return at + ctz(~i8x16.bitmask(i8x16.eq(i8x16.min_u(digits, i8x16.splat(9)), digits)))
}

/** 1: the name at `one` goes before the name at `other`; 0: it does not; -1: they are equal, or hard to compare. */
function isBefore(one: i32, other: i32): i32 {
  for (let n: i32 = 0; ; n += 16) {
    const bytes = v128.load(one + n)
    const differing = i8x16.bitmask(i8x16.ne(bytes, v128.load(other + n)))
    const quotes = i8x16.bitmask(i8x16.eq(bytes, i8x16.splat(QUOTE as i8)))
    if ((differing | quotes) == 0) continue
    const place = ctz(differing | quotes)
    if (((differing >> place) & 1) == 0) return -1
    const a: u32 = load<u8>(one + n + place)
    const b: u32 = load<u8>(other + n + place)
    if (a == QUOTE) return 1
    if (b == QUOTE) return 0
    return a >= DIFFERENT || b >= DIFFERENT ? -1 : a < b ? 1 : 0
  }
}

/** Whether the members from `first` to `top` are in order; results as of {@link isBefore}. */
function areOrdered(first: i32, top: i32): i32 {
  for (let member = first + MEMBER; member < top; member += MEMBER) {
    const ordered = isBefore(load<i32>(member - MEMBER), load<i32>(member))
    if (ordered <= 0) return ordered
  }
  return 1
}

/** Sorts the object's members; false: they are too many, or hard to compare. */
function sort(first: i32, size: i32): bool {
  if (size > MEMBER * MOST) return false
  for (let n: i32 = 0; n < size / MEMBER; n++) {
    const member = first + n * MEMBER
    const name = load<i32>(member)
    let to = SORTED + 4 * n
    for (; to > SORTED; to -= 4) {
      const other = load<i32>(to - 4)
      const ordered = isBefore(load<i32>(other), name)
      if (ordered < 0) return false
      if (ordered > 0) break
      store<i32>(to, other)
    }
    store<i32>(to, member)
  }
  return true
}

function shapeOf(depth: i32, nth: i32): i32 {
  const shape = SHAPES + SHAPE * (depth * BESIDE + (nth & (BESIDE - 1)))
  return load<i32>(shape, 8) == body ? shape : ~shape
}

/** Where a member's value begins if its name, at `name`, matches the shape; else 0. */
function knownEnd(shape: i32, nth: i32, name: i32): i32 {
  if (nth >= load<i32>(shape)) return 0
  const known = load<i32>(shape + HEAD + nth)
  const length = load<i32>(shape + HEAD + nth, 4)
  let n: i32 = 0
  for (; n + 16 < length; n += 16)
    if (i8x16.bitmask(i8x16.ne(v128.load(known + n), v128.load(name + n))) != 0) return 0
  const differing = i8x16.bitmask(i8x16.ne(v128.load(known + n), v128.load(name + n)))
  return differing << (32 - (length - n)) == 0 ? name + length : 0
}

/** Remembers the shape of an object that was read, and sorted if needed. */
function keepShape(shape: i32, first: i32, size: i32, isOrdered: i32): void {
  store<i32>(shape, 0)
  store<i32>(shape, body, 8)
  if (size > MEMBER * MOST) return
  for (let n: i32 = 0; n < size; n += MEMBER) {
    const name = load<i32>(first + n)
    const end = plainEnd(name)
    if (load<u8>(end, 1) != COLON) return
    const field = shape + HEAD + n
    store<i32>(field, name)
    store<i32>(field, end + 2 - name, 4)
    store<i32>(field, isOrdered > 0 ? n : load<i32>(SORTED + n / 3) - first, 8)
  }
  store<i32>(shape, size)
  store<i32>(shape, isOrdered, 4)
}

/** Adds the body up to `at` to the text. */
function keep(at: i32): void {
  copy(out, from, at - from)
  out += at - from
  from = at
}

function leaveOut(start: i32, end: i32): void {
  keep(start)
  from = end
}

/** Copies up to fifteen bytes too many. */
function copy(to: i32, start: i32, length: i32): void {
  if (length > FEW) memory.copy(to, start, length)
  else for (let n: i32 = 0; n < length; n += 16) v128.store(to + n, v128.load(start + n))
}

/** Puts the members of an object that ends at `at` in order, separated by commas. `opened`: {@link from} at its beginning. */
function rearrange(first: i32, size: i32, opened: i32, at: i32): void {
  const begin = load<i32>(first, 4)
  let shift = from - out
  if (opened == from) keep(begin + shift)
  else {
    keep(at)
    const aside = out + SLACK
    memory.copy(aside, begin, out - begin)
    out = begin
    shift = aside - begin
  }
  let to = out
  for (let place = SORTED; place < SORTED + size / 3; place += 4) {
    const member = load<i32>(place)
    const start = load<i32>(member, 4)
    const length = load<i32>(member, 8) - start
    if (to > begin) store<u8>(to++, COMMA as u8)
    copy(to, start + shift, length)
    to += length
  }
  out = to
  from = at
}
