/* Commands and replies of Redis (https://redis.io/docs/latest/develop/reference/protocol-spec/). ioredis reads the replies. */

/** Strings must be ASCII: names, ids, numbers. Send other text as bytes. */
export type RespArg = string | number | Buffer

/** Strings of either kind come as buffers. */
export type RespReply = number | Buffer | null | Error | RespReply[]

/** Larger arguments are not copied but sent as they are. */
const COPIED = 4096

/** The constant first parts of a command, encoded. */
export interface CommandHead {
  readonly name: string
  readonly parts: number
  readonly text: string
}

export function commandHead(...parts: readonly [string, ...string[]]): CommandHead {
  const text = parts.map((part) => `$${part.length}\r\n${part}\r\n`).join('')
  return { name: parts[0], parts: parts.length, text }
}

/** Encodes a command for `write`, as latin1: one byte per character keeps the lengths right for any input. Returns its last piece. */
export function encoded(
  { parts, text }: CommandHead,
  args: readonly RespArg[],
  write: (piece: string | Buffer) => void,
): string {
  let command = `*${parts + args.length}\r\n${text}`
  for (const arg of args) {
    const value = typeof arg === 'number' ? String(arg) : arg
    command += `$${value.length}\r\n`
    if (typeof value === 'string') command += value
    else if (value.length <= COPIED) command += value.toString('latin1')
    else {
      write(command)
      write(value)
      command = ''
    }
    command += '\r\n'
  }
  return command
}
