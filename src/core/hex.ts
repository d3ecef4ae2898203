/** The byte that two hex digits stand for; NaN: they are none. */
export function hexPair(bytes: Buffer, at: number): number {
  return nibble(bytes[at]) * 16 + nibble(bytes[at + 1])
}

/** What a hex digit stands for; NaN: it is none. */
function nibble(byte = 0): number {
  if (byte >= 0x30 && byte <= 0x39) return byte - 0x30
  const lower = byte | 0x20
  return lower >= 0x61 && lower <= 0x66 ? lower - 0x57 : Number.NaN
}
