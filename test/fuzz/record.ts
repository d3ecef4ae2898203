interface Parts {
  readonly schema: number
  readonly state: number
  /** Version, fence, when it was made and changed, when it is due and dropped. */
  readonly numbers: readonly number[]
  readonly token: Buffer
  /** Its head and its payload. */
  readonly rest: readonly Buffer[]
}

/** A record put together by docs/record-format.md alone, to compare with what a store makes of its columns. */
export function recordBytes({ schema, state, numbers, token, rest }: Parts): Buffer {
  const [version, fence, ...times] = numbers.map((number) => {
    const bytes = Buffer.alloc(6)
    bytes.writeUIntBE(number, 0, 6)
    return bytes
  }) as [Buffer, Buffer, ...Buffer[]]
  const begins = [Buffer.from('IP'), Buffer.from([schema, state])]
  return Buffer.concat([...begins, version, fence, token, ...times, ...rest])
}
