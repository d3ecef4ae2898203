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

/** Beyond the end 0, which stands nowhere in JSON. Once code has read there, V8 makes it slower for good. */
export function byteAt(body: Buffer, at: number): number {
  return at < body.length ? (body[at] as number) : 0
}

export function isSpace(byte: number): boolean {
  return byte <= 0x20 && (byte === 0x20 || byte === 0x0a || byte === 0x0d || byte === 0x09)
}

/** Where the digits end that begin at `at`. */
export function digitsEnd(body: Buffer, at: number): number {
  while (at < body.length && (body[at] as number) >= ZERO && (body[at] as number) <= NINE) at++
  return at
}
