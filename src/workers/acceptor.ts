import { Server, type Socket } from 'node:net'
import { closeListener } from '../http/close-listener.ts'
import type { Member } from './member.ts'

/** Connections that wait for a worker, as many as the kernel would keep for a listener that is busy; further ones are closed unread. */
const MAX_WAITING = 4096

/**
 * The traffic port of several processes. Each worker is given one connection at a time, in turn: the kernel's own choice would give most of
 * them to one worker, and a worker that is stopped would keep what it was given (docs/adr/0130).
 */
export class Acceptor {
  readonly server: Server
  /** Workers ready for a connection, the longest idle first. */
  #free: Member[] = []
  readonly #members = new Set<Member>()
  #waiting: Socket[] = []
  /** Resolved once no connection waits for a worker. */
  #emptied = Promise.withResolvers<void>()

  constructor() {
    this.server = new Server({ pauseOnConnect: true }, (connection) => {
      connection.on('error', () => connection.destroy())
      if (this.#waiting.length >= MAX_WAITING) connection.destroy()
      else this.#waiting.push(connection)
      this.#handOver()
    })
  }

  /** Gives it connections from now on. */
  add(member: Member): void {
    this.#members.add(member)
    this.#free.push(member)
    this.#handOver()
  }

  remove(member: Member): void {
    this.#members.delete(member)
    this.#free = this.#free.filter((one) => one !== member)
  }

  /** Stops accepting; resolves once every accepted connection has been handed over. */
  async close(): Promise<void> {
    await closeListener(this.server, () => this.server.close())
    if (this.#waiting.length === 0) return
    this.#emptied = Promise.withResolvers()
    await this.#emptied.promise
  }

  /** Closes the connections that no worker has taken. */
  destroy(): void {
    for (const connection of this.#waiting) connection.destroy()
    this.#waiting = []
  }

  #handOver(): void {
    while (this.#waiting.length > 0 && this.#free.length > 0) {
      const connection = this.#waiting.shift() as Socket
      if (connection.destroyed) continue
      const member = this.#free.shift() as Member
      const took = (): void => {
        if (this.#members.has(member)) this.#free.push(member)
        this.#handOver()
      }
      const failed = (): void => {
        this.#waiting.unshift(connection)
        this.#handOver()
      }
      member.give(connection, took, failed)
    }
    if (this.#waiting.length === 0) this.#emptied.resolve()
  }
}
