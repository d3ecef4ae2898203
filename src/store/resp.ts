/** Strings must be ASCII: names, ids, numbers. Send other text as bytes. */
export type RespArg = string | number | Buffer

/** Strings come as buffers. */
export type RespReply = number | Buffer | null | Error | RespReply[]

/** The constant first parts of a command, encoded. */
export interface CommandHead {
  readonly name: string
  readonly parts: number
  readonly text: string
}

export function commandHead(...parts: readonly [name: string, ...string[]]): CommandHead {
  const text = parts.map((part) => `$${part.length}\r\n${part}\r\n`).join('')
  return { name: parts[0], parts: parts.length, text }
}

/** As latin1: one byte per character keeps the lengths right for any input. */
export function encoded({ parts, text }: CommandHead, args: readonly RespArg[]): Buffer {
  let command = `*${parts + args.length}\r\n${text}`
  for (const arg of args) {
    const value = Buffer.isBuffer(arg) ? arg.toString('latin1') : String(arg)
    command += `$${value.length}\r\n${value}\r\n`
  }
  return Buffer.from(command, 'latin1')
}
