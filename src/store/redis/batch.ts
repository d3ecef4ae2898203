import type { Millis } from '../../core/record.ts'
import { U48 } from '../record/codec.ts'
import { InGrace, StoreFull, type WriteReply } from '../register.ts'
import { type Link, redisFailure, unanswered } from './connection.ts'
import type { RedisOptions } from './keys.ts'
import { Mismatch, type RespArg, type RespReply, type Script, script, source } from './resp.ts'
import type { Servers } from './servers.ts'

const OPERATIONS = ['put', 'swap', 'get', 'renew', 'remove', 'due', 'throttle', 'note', 'notes', 'places']
/** One function for all: creating a closure per operation would take as long as an operation. */
const SOURCE = [
  source('epoch'),
  source('shared'),
  'local function apply(op, key, head, body)\n',
  ...OPERATIONS.map(source),
  'end\n',
  source('batch'),
].join('')
export const BATCH = script(SOURCE)
export const BATCH_THOUGH_FULL = script(`#!lua flags=allow-oom\n${SOURCE}`)

/** By the letter of an operation, the other keys of its shard (or, `h`, of its record) that it uses: a cluster requires all. */
const OTHERS: Readonly<Record<string, string>> = { p: 'ue', s: 'ue', r: 'u', d: 'uh', u: 'u', n: 'h', h: 'h' }

/** Operations per batch: a script blocks the server. */
const MAX_ITEMS = 64
/** Bytes after which a batch is full. */
const LARGE = 1024 * 1024
const NOTHING = Buffer.of()
/** Refusals after which nothing was applied, and which may concern one operation only: its slot is moving, or it is the only write. */
const OF_ONE = /^Redis refuses: (TRYAGAIN|NOREPLICAS|MISCONF)/
/** How often a batch that arrived too late is sent again. */
const MAX_LATE = 2

/** Number of elements of a result, by its first element. */
const LENGTHS = [2, 4, 3, 2, 1, 1, 2, 2]
export const YES = 4
const [FOUND, HELD, FAILED, LINES] = [0, 2, 3, 7]

/** Converts the result of an operation, which begins in the reply of its batch at `at`. */
export type ReadResult<T> = (reply: readonly RespReply[], at: number, now: Millis, link: Link) => T

export interface Operation<T> {
  readonly shard: number
  /** Key of the record or bucket. */
  readonly key: string
  /** See the files in lua/. */
  readonly head: Buffer
  readonly body?: Buffer
  /** A full store must accept it, too: outcomes, lease renewals, and rewritten records in a grace. */
  readonly thoughFull?: boolean
  readonly read: ReadResult<T>
}

interface Pending {
  readonly operation: Operation<unknown>
  readonly resolve: (value: unknown) => void
  readonly reject: (error: unknown) => void
}

type BatchOptions = Pick<RedisOptions, 'grace' | 'skew' | 'timeoutMs'>

/**
 * Sends all operations of a turn of the event loop in one call of a script; in a cluster one for each shard (ADR 125). Each call carries
 * the last instant, by the server's clock, at which it may be applied: however it is delayed or resent, it does nothing after its caller
 * has given up.
 */
export class Batches {
  readonly #options: BatchOptions
  readonly #servers: Pick<Servers, 'run' | 'isCluster'>
  /** Operations of this turn, by shard; outside a cluster under one key. */
  #open = new Map<number, Pending[]>()
  #size = 0
  /** By the same key: a lower bound of the server's clock minus this process's. */
  readonly #clocks = new Map<number, Millis>()

  constructor(options: BatchOptions, servers: Pick<Servers, 'run' | 'isCluster'>) {
    this.#options = options
    this.#servers = servers
  }

  run<T>(operation: Operation<T>): Promise<T> {
    return new Promise((resolve, reject) => this.#add({ operation, resolve, reject } as Pending))
  }

  /** The server may be another one, with another clock. */
  forget(): void {
    this.#clocks.clear()
  }

  readonly flush = (): void => {
    const open = this.#open
    if (open.size === 0) return
    this.#open = new Map()
    this.#size = 0
    const until = performance.now() + this.#options.timeoutMs
    for (const [group, items] of open) this.#send(group, items, BATCH, until, 0)
  }

  #add(pending: Pending): void {
    const { shard, body = NOTHING } = pending.operation
    const group = this.#servers.isCluster ? shard : 0
    if (this.#open.size === 0) setImmediate(this.flush)
    const items = this.#open.get(group)
    if (items === undefined) this.#open.set(group, [pending])
    else items.push(pending)
    this.#size += body.length
    if (items?.length === MAX_ITEMS || this.#size > LARGE) this.flush()
  }

  /** `until`: when the callers give up. `late`: how often it has arrived too late. */
  #send(group: number, items: readonly Pending[], what: Script, until: Millis, late: number): void {
    const { grace = 0, skew } = this.#options
    const travelled = skew?.() ?? 0
    const clock = this.#clocks.get(group)
    // While the clock is unknown the batch is late, and the reply brings the time.
    const notAfter = clock === undefined ? 0 : Math.floor(clock + until) + travelled
    const head = Buffer.allocUnsafe(3 * U48)
    head.writeUIntBE(grace, 0, U48)
    head.writeIntBE(travelled, U48, U48)
    head.writeUIntBE(notAfter, 2 * U48, U48)
    const args: RespArg[] = [0]
    for (const { operation } of items) args.push(operation.key)
    if (this.#servers.isCluster) for (const { operation } of items) args.push(...othersOf(operation))
    args[0] = args.length - 1
    args.push(head)
    for (const { operation } of items) args.push(operation.head, operation.body ?? NOTHING)
    const read = (reply: RespReply[], link: Link): boolean => {
      const isLate = Buffer.isBuffer(reply[0])
      const now = Number(reply[isLate ? 1 : 0])
      this.#clocks.set(group, now - travelled - performance.now())
      if (!isLate) {
        const full = settle(items, reply, now, link, what === BATCH)
        if (full.length > 0) this.#send(group, full, BATCH_THOUGH_FULL, until, late)
      }
      return isLate
    }
    this.#servers.run(what, args, read, until).then(
      (isLate) => {
        if (!isLate) return
        if (late < MAX_LATE && performance.now() < until) this.#send(group, items, what, until, late + 1)
        else
          for (const { reject } of items)
            reject(unanswered('it arrived too late by the server’s clock', false))
      },
      (error: Error) => {
        const mayBeOfOne = items.length > 1 && OF_ONE.test(error.message)
        for (const one of items)
          if (mayBeOfOne) this.#send(group, [one], what, until, 0)
          else one.reject(error)
      },
    )
  }
}

function othersOf({ key, head }: Operation<unknown>): string[] {
  const own = key.indexOf('}') + 2
  const others = OTHERS[String.fromCharCode(head[0] as number)] ?? ''
  return others
    .split('')
    .map((letter) => key.slice(0, own) + letter + (letter === 'h' ? key.slice(own + 1) : ''))
}

/** Gives each operation its result. Returns those to send again to a full store. */
function settle(
  items: readonly Pending[],
  reply: readonly RespReply[],
  now: Millis,
  link: Link,
  mayRepeat: boolean,
): readonly Pending[] {
  let end = 1
  for (const _ of items) end += lengthAt(reply, end)
  if (end !== reply.length) throw new Mismatch()
  const full: Pending[] = []
  let at = 1
  for (const item of items) {
    const kind = reply[at] as number
    try {
      if (kind === FAILED) throw redisFailure((reply[at + 1] as Buffer).toString())
      item.resolve(item.operation.read(reply, at, now, link))
    } catch (error) {
      if (mayRepeat && item.operation.thoughFull && error instanceof StoreFull) full.push(item)
      else item.reject(error)
    }
    at += lengthAt(reply, at)
  }
  return full
}

/** @throws {InGrace} */
export function writeReply<Found>(reply: readonly RespReply[], at: number, now: Millis): WriteReply<Found> {
  const [kind, first, second, third] = [reply[at], reply[at + 1], reply[at + 2], reply[at + 3]]
  if (kind === FOUND) return { done: false, now, bytes: first as Found }
  if (kind === HELD) throw new InGrace(now, first as Millis, second as Millis)
  return {
    done: true,
    now,
    stamp: { version: first as number, fence: second as number, createdAt: third as Millis },
  }
}

/** NaN: not a result of a batch. */
function lengthAt(reply: readonly RespReply[], at: number): number {
  const kind = reply[at] as number
  return (LENGTHS[kind] as number) + (kind === LINES ? (reply[at + 1] as number) : 0)
}
