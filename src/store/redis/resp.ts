import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { fileOf } from '../files.ts'

/** Strings must be ASCII: names, ids, numbers. Send other text as bytes. */
export type RespArg = string | number | Buffer
export type RespArgs = readonly RespArg[]

/** Strings come as buffers. */
export type RespReply = number | Buffer | null | Error | RespReply[]

export interface Script {
  readonly source: string
  readonly sha: string
}

export function script(text: string): Script {
  return { source: text, sha: createHash('sha1').update(text).digest('hex') }
}

/** The source of a script or of a part of one. */
export function source(name: string): string {
  return readFileSync(fileOf(`redis/lua/${name}.lua`), 'utf8')
}

/** Encodes in latin1: one byte per character keeps the lengths right for any input. */
export function encoded(name: string, args: RespArgs): Buffer {
  let command = `*${1 + args.length}\r\n$${name.length}\r\n${name}\r\n`
  for (const arg of args) {
    const value = Buffer.isBuffer(arg) ? arg.toString('latin1') : String(arg)
    command += `$${value.length}\r\n${value}\r\n`
  }
  return Buffer.from(command, 'latin1')
}
