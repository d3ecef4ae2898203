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

/** A reply that cannot belong to its command: no later one can be trusted. */
export class Mismatch extends Error {
  constructor() {
    super('replies do not match their commands')
  }
}

/**
 * Converts a reply; throws a {@link Mismatch} at one of another form. Mixing up two replies of one form does no harm: any time is current,
 * keys are parsed, and what a script replies ends with a number.
 */
export type Read<T> = (reply: RespReply) => T

export const any: Read<RespReply> = (reply) => reply
export const number = of((reply) => typeof reply === 'number')
const bytes = of((reply) => Buffer.isBuffer(reply))
const array = of((reply) => Array.isArray(reply))

export function text(pattern = /^/): Read<string> {
  return (reply) => {
    const found = String(bytes(reply))
    if (!pattern.test(found)) throw new Mismatch()
    return found
  }
}

export function list<T>(each: Read<T>): Read<T[]> {
  return (reply) => array(reply).map(each)
}

export function tuple<T extends readonly unknown[]>(...each: { [N in keyof T]: Read<T[N]> }): Read<T> {
  return (reply) => {
    const parts = array(reply)
    if (parts.length !== each.length) throw new Mismatch()
    return each.map((read, n) => read(parts[n] as RespReply)) as unknown as T
  }
}

function of<T extends RespReply>(isOfForm: (reply: RespReply) => reply is T): Read<T> {
  return (reply) => {
    if (!isOfForm(reply)) throw new Mismatch()
    return reply
  }
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
