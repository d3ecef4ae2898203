type Value = string | number | Buffer | null | Value[]

/** Reads replies, or commands, from a stream; calls `take` with each as soon as its last byte is there. */
export function repliesTo(take: (reply: Value) => void): (bytes: Buffer) => void {
  let rest = Buffer.alloc(0)
  return (bytes) => {
    rest = Buffer.concat([rest, bytes])
    for (let read = valueAt(rest, 0); read !== null; read = valueAt(rest, 0)) {
      rest = rest.subarray(read.end)
      take(read.value)
    }
  }
}

/** Null: it has not arrived as a whole. */
function valueAt(bytes: Buffer, at: number): { readonly value: Value; readonly end: number } | null {
  const lineEnd = bytes.indexOf('\r\n', at)
  if (lineEnd < 0) return null
  const [type, line] = [bytes.toString('latin1', at, at + 1), bytes.toString('latin1', at + 1, lineEnd)]
  let end = lineEnd + 2
  if (type === ':') return { value: Number(line), end }
  if (type !== '$' && type !== '*') return { value: line, end }
  const count = Number(line)
  if (count < 0) return { value: null, end }
  if (type === '$') {
    const value = bytes.subarray(end, end + count)
    return bytes.length < end + count + 2 ? null : { value, end: end + count + 2 }
  }
  const values: Value[] = []
  while (values.length < count) {
    const read = valueAt(bytes, end)
    if (read === null) return null
    values.push(read.value)
    end = read.end
  }
  return { value: values, end }
}
