import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { setImmediate as immediately } from 'node:timers/promises'
import type { Millis } from '../core/record.ts'
import { within } from '../runtime/scheduling.ts'
import { reconnectDelay } from './reconnect.ts'
import {
  CONNECT_TIMEOUT,
  hostPortText,
  type LinkEvents,
  type Reader,
  type RedisAddress,
  RedisLink,
  repliesMismatch,
  type Script,
  wordsOf,
} from './redis-link.ts'
import { StoreUnavailable } from './register.ts'
import { commandHead, type RespArg, type RespReply } from './resp.ts'

export const CONNECTION_NAME = 'idempotency-proxy'
/** The server needs no password; sending one does no harm. */
const NEEDLESS_PASSWORD = /no password is set|without any password configured for the default user/

export type OnEvent = (kind: 'connected' | 'disconnected' | 'error', detail: string) => void

/** Where a connection leads. */
export interface RedisTarget {
  /** Called before each attempt. */
  find(): RedisAddress | Promise<RedisAddress>
  /** Rejects replicas, which may miss records. */
  readonly isMaster?: boolean
}

export interface ConnectionEvents {
  readonly onEvent: OnEvent
  /** Ready for commands. */
  readonly onReady: () => void
  /** An attempt has failed, or the connection has ended. */
  readonly onLost?: () => void
  readonly onMessage?: LinkEvents['onMessage']
  /**
   * `store.grace`; 0 or absent: none. Each link reads the identity of the process it reaches, for scripts that `admit`. A proxy that connects
   * later than the grace after a failover has lost its claims, so an attempt takes at most half of it.
   */
  readonly grace?: Millis
}

export function script(name: string, header = ''): Script {
  return scriptOf(header + sourceOf(name), false)
}

/** A script that grants claims, or checks whether the server may. */
export function admittingScript(name: string, header = ''): Script {
  return scriptOf(header + sourceOf('epoch') + sourceOf(name), true)
}

function sourceOf(name: string): string {
  return readFileSync(new URL(`../store/lua/${name}.lua`, import.meta.url), 'utf8')
}

function scriptOf(source: string, admits: boolean): Script {
  return { source, admits, head: commandHead('evalsha', createHash('sha1').update(source).digest('hex')) }
}

/** Keeps a link open for commands and scripts. A command is never sent again on another link. */
export class RedisConnection {
  readonly #target: RedisTarget
  readonly #timeoutMs: Millis
  readonly #events: ConnectionEvents
  #link: RedisLink | null = null
  /** The link once greeted: only then may commands use it. */
  #ready: RedisLink | null = null
  /** Why the last link failed; until the next one is ready. */
  #trouble: string | null = null
  #attempts = 0
  #isTrying = false
  /** Host and port of the latest link; '' before the first. */
  leadsTo = ''
  #reconnecting: NodeJS.Timeout | undefined
  #isClosed = false

  constructor(target: RedisTarget, timeoutMs: Millis, events: ConnectionEvents) {
    this.#target = target
    this.#timeoutMs = timeoutMs
    this.#events = events
  }

  /** Resolves after the first attempt, whatever its outcome: the process also starts without Redis. */
  open(): Promise<void> {
    return this.#connect()
  }

  async close(): Promise<void> {
    this.#isClosed = true
    clearTimeout(this.#reconnecting)
    await this.#link?.end()
  }

  /** The server may have been replaced. Commands in flight may have been applied. */
  reconnect(): void {
    this.#link?.destroy()
  }

  get isReady(): boolean {
    return this.#ready?.isOpen === true
  }

  /** It is about to be ready, or lost. */
  get isTrying(): boolean {
    return this.#isTrying
  }

  run<T>(what: Script, args: RespArg[], read: Reader<T>): Promise<T> {
    return this.#ready?.isOpen ? this.#ready.run(what, args, read) : this.#refuse()
  }

  ask<T>(name: string, args: readonly RespArg[], read: Reader<T>): Promise<T> {
    return this.#ready?.isOpen ? this.#ready.ask(name, args, read) : this.#refuse()
  }

  #refuse(): Promise<never> {
    const why = this.#isClosed ? 'closed' : (this.#trouble ?? 'connecting')
    return Promise.reject(new StoreUnavailable(`Redis is not connected: ${why}`, false))
  }

  /** Resolves when it is ready or lost. */
  async #connect(): Promise<void> {
    this.#isTrying = true
    let address: RedisAddress
    try {
      address = await this.#target.find()
    } catch (error) {
      this.#fail((error as Error).message)
      return this.#lose('')
    }
    if (!this.#isClosed) await new Promise<void>((attempted) => this.#begin(address, attempted))
  }

  #begin(address: RedisAddress, attempted: () => void): void {
    const name = hostPortText(address)
    this.leadsTo = name
    const { grace, onMessage } = this.#events
    const events: LinkEvents = {
      onConnected: () => {
        this.#greet(link, address).then(
          () => {
            if (link.isOpen) this.#succeed(link, name)
            attempted()
          },
          (error: Error) => {
            // A link that has ended has said why, or there never was one.
            if (link.isOpen || this.#trouble === null) this.#fail(error.message)
            link.destroy()
          },
        )
      },
      onError: (message) => this.#fail(message),
      onClosed: () => {
        this.#lose(name)
        attempted()
      },
      onMessage,
    }
    const connectWithin = grace ? Math.min(grace / 2, CONNECT_TIMEOUT) : CONNECT_TIMEOUT
    const link = new RedisLink(address, this.#timeoutMs, events, connectWithin)
    this.#link = link
  }

  #succeed(link: RedisLink, name: string): void {
    this.#isTrying = false
    this.#ready = link
    this.#trouble = null
    this.#attempts = 0
    this.#events.onReady()
    this.#events.onEvent('connected', name)
  }

  #lose(name: string): void {
    if (this.#ready !== null && this.#trouble === null) this.#events.onEvent('disconnected', name)
    this.#isTrying = false
    this.#ready = null
    this.#events.onLost?.()
    if (this.#isClosed) return
    this.#reconnecting = setTimeout(() => void this.#connect(), reconnectDelay(++this.#attempts))
  }

  #fail(message: string): void {
    // All attempts to reconnect fail alike: one report is enough.
    if (message !== this.#trouble) this.#events.onEvent('error', message)
    this.#trouble = message
  }

  /** Rejects if the link is useless: wrong user, wrong database, or the server is still loading its data. */
  async #greet(link: RedisLink, address: RedisAddress): Promise<void> {
    const { username, password, db } = address
    const steps: Promise<unknown>[] = []
    if (username || password) {
      const credentials = (username ? [username, password] : [password]).map((text) => Buffer.from(text))
      steps.push(link.ask('auth', credentials, exactly('OK')).catch(unless(NEEDLESS_PASSWORD)))
    }
    if (db !== 0) steps.push(link.ask('select', [db], exactly('OK')))
    if (this.#target.isMaster) steps.push(link.ask('role', [], ofMaster(hostPortText(address))))
    steps.push(link.ask('ping', [], exactly('PONG')).catch(unless(/NOPERM/)))
    if (this.#events.grace)
      steps.push(
        link.ask('info', ['server'], runIdOf).then(
          (id) => {
            link.identity = id
          },
          unless(/NOPERM/),
        ),
      )
    // Shown by CLIENT LIST.
    link.ask('client', ['setname', CONNECTION_NAME], exactly('OK')).catch(() => {})
    await Promise.all(steps)
  }
}

/** No server answered; their errors. */
export class Unanswered extends Error {
  readonly errors: readonly Error[]

  constructor(addresses: readonly RedisAddress[], errors: readonly Error[]) {
    super(
      errors.map(({ message }, n) => `${hostPortText(addresses[n] as RedisAddress)}: ${message}`).join('; '),
    )
    this.errors = errors
  }
}

/**
 * Asks several servers at once, each on its own connection. Resolves with all answers that arrive within `others` of the first.
 * @throws {Unanswered} if there was none.
 */
export async function askAll<T>(
  addresses: readonly RedisAddress[],
  timeoutMs: Millis,
  others: Millis,
  ask: (server: RedisConnection, address: RedisAddress) => Promise<T>,
): Promise<T[]> {
  const connections: RedisConnection[] = []
  const answers: T[] = []
  const attempts = addresses.map(async (address) => {
    const events = { onEvent() {}, onReady() {} }
    const connection = new RedisConnection({ find: () => address }, timeoutMs, events)
    connections.push(connection)
    await connection.open()
    answers.push(await ask(connection, address))
  })
  return (
    Promise.any(attempts)
      .catch((error: AggregateError) => {
        throw new Unanswered(addresses, error.errors as Error[])
      })
      .then(() => within(others, Promise.allSettled(attempts)))
      // Only after pending input was read: a busy event loop does not mean a silent server.
      .then(() => immediately())
      .then(() => [...answers])
      .finally(() => {
        // Not awaited: one of them may hang.
        for (const connection of connections) void connection.close()
      })
  )
}

/** Expects this reply. */
export function exactly(expected: string) {
  return (reply: RespReply): void => {
    if (reply !== expected) throw repliesMismatch()
  }
}

/** Identifies the process: new after each start. '': the server does not report it. */
export function runIdOf(reply: RespReply): string {
  if (!Buffer.isBuffer(reply)) throw repliesMismatch()
  return /^run_id:([0-9a-f]+)\r?$/m.exec(String(reply))?.[1] ?? ''
}

function ofMaster(name: string) {
  return (reply: RespReply): void => {
    const [role] = wordsOf(reply)
    if (role !== 'master') throw new Error(`${name} is a replica, not a master (its ROLE is ${role})`)
  }
}

function unless(harmless: RegExp) {
  return (error: Error): void => {
    if (!harmless.test(error.message)) throw error
  }
}
