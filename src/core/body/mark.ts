/** The body without a byte order mark, which some clients send: RFC 8259 §8.1 lets a reader skip it. */
export function withoutMark(body: Buffer): Buffer {
  return body.length >= 3 && body.readUIntBE(0, 3) === 0xefbbbf ? body.subarray(3) : body
}
