import type { Address } from '../../config/urls.ts'
import type { Millis } from '../../core/record.ts'
import { CHECKS } from '../epochs.ts'
import { everySlotOf, type SlotRange } from './cluster.ts'
import { askAll, type ConnectionSettings, RedisConnection } from './connection.ts'
import { any, list, Mismatch, type RespReply, text, tuple } from './resp.ts'
import type { RedisUrl } from './url.ts'

/** How long to wait for the others once one Sentinel has answered: the first may have missed a failover. */
const OTHERS: Millis = 250
/** How often they are asked without a grace; with one, as often as the servers. */
const EVERY: Millis = 500

const MISTAKES = [
  [/unknown command/, 'the addresses of Sentinels, or redis:// for one server'],
  [/No such master/, 'a name listed by SENTINEL MASTERS'],
] as const

/**
 * The Sentinels, which know where their master is. They are polled: ioredis's own connector believes the first that answers, and
 * announcements are lost while the connection is down (ADR 124).
 */
export class Sentinels {
  /** How often they are asked. */
  readonly every: Millis
  readonly #master: string
  /** One connection to each. */
  readonly #all: readonly RedisConnection[]
  /** The highest configuration epoch that any of them has reported: each failover increases it. */
  #epoch = 0

  constructor(
    { hosts, sentinel: { master, login } }: RedisUrl,
    { grace, timeoutMs, client = {} }: ConnectionSettings,
  ) {
    this.#master = master
    this.every = grace ? grace / CHECKS : EVERY
    this.#all = hosts.map((place) => {
      const connection = new RedisConnection({ place, login }, { timeoutMs, client })
      void connection.open()
      return connection
    })
  }

  /** Asks all at once, since any may be down or silent. The latest configuration counts. */
  async find([current]: readonly RedisConnection[]): Promise<readonly SlotRange[]> {
    const report = async (sentinel: RedisConnection) => {
      // During a failover the epoch changes before the address: asked in this order, an address never gets a later epoch.
      const [epoch, place] = await Promise.all([
        sentinel.ask('sentinel', ['master', this.#master], epochIn),
        sentinel.ask('sentinel', ['get-master-addr-by-name', this.#master], placeIn),
      ])
      return { place, epoch }
    }
    const none = `no Sentinel names the master ${JSON.stringify(this.#master)}`
    const all = await askAll(this.#all, none, OTHERS, report, MISTAKES)
    const { place, epoch } = all.reduce((latest, answer) => (answer.epoch > latest.epoch ? answer : latest))
    // Whoever has missed a failover is not believed while the master answers.
    const isBelieved = epoch >= this.#epoch || current === undefined
    this.#epoch = Math.max(this.#epoch, epoch)
    return everySlotOf([isBelieved ? place : current.target.place])
  }

  /** Number of its replicas, including those that are down; the highest of differing answers. */
  async replicasOf(): Promise<number> {
    const ask = (one: RedisConnection) => one.ask('sentinel', ['replicas', this.#master], list(any))
    const all = await askAll(this.#all, 'no Sentinel knows the replicas', OTHERS, ask)
    return Math.max(...all.map(({ length }) => length))
  }

  async close(): Promise<void> {
    await Promise.all(this.#all.map((connection) => connection.close()))
  }
}

/** The reply alternates fields and values. */
function epochIn(reply: RespReply): number {
  const words = list(text())(reply)
  const epoch = Number(words[words.indexOf('config-epoch') + 1])
  if (words.length % 2 !== 0 || !Number.isSafeInteger(epoch)) throw new Mismatch()
  return epoch
}

function placeIn(reply: RespReply): Address {
  if (reply === null) throw new Error('No such master')
  const [host, port] = tuple(text(/./), text(/^\d+$/))(reply)
  return { host, port: Number(port) }
}
