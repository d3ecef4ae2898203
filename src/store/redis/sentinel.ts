import type { Millis } from '../../core/record.ts'
import { CHECKS } from '../epochs.ts'
import { StoreUnavailable } from '../register.ts'
import {
  askAll,
  type ConnectionSettings,
  type HostPort,
  hostPortText,
  type Login,
  RedisConnection,
  type RedisTarget,
} from './connection.ts'
import { any, list, Mismatch, type RespReply, text, tuple } from './resp.ts'
import { Misconfigured, type SentinelUrl } from './url.ts'

/** How long to wait for the others once one Sentinel has answered: the first may have missed a failover. */
const OTHERS: Millis = 250
/** How often they are asked without a grace; with one, as often as the servers. */
const EVERY: Millis = 500
const UNKNOWN = 'No such master'

/** What a Sentinel reports about the master. */
interface MasterReport {
  readonly place: HostPort
  /** Its configuration epoch: each failover increases it. */
  readonly epoch: number
}

/**
 * The master that the Sentinels monitor, wherever it is. They are polled: ioredis's own connector believes the first that answers, and
 * announcements are lost while the connection is down (ADR 124).
 */
export class Sentinels implements RedisTarget {
  readonly login: Login
  readonly place: HostPort = { host: '', port: 0 }
  /** Set if every server answered that it knows no such master, or is not a Sentinel: only an operator can fix that. */
  misconfigured: Misconfigured | null = null
  readonly #master: string
  /** One connection to each. */
  readonly #all: readonly RedisConnection[]
  readonly #every: Millis
  /** Their latest answer, and how many gave it. */
  #latest: MasterReport | null = null
  #answers = 0
  /** The highest epoch that any of them has reported. */
  #epoch = 0
  #timer: NodeJS.Timeout | undefined

  constructor(url: SentinelUrl, { grace, timeoutMs, client = {} }: ConnectionSettings) {
    this.#master = url.master
    this.login = url.server
    this.#every = grace ? grace / CHECKS : EVERY
    this.#all = url.sentinels.map((address) => {
      const connection = new RedisConnection({ place: address, login: address }, { timeoutMs, client })
      void connection.open()
      return connection
    })
  }

  /** Asks all at once, since any may be down or silent. The latest configuration counts. */
  async find(): Promise<HostPort> {
    try {
      const all = await askAll(this.#all, OTHERS, async (sentinel) => {
        // During a failover the epoch changes before the address: asked in this order, an address never gets a later epoch.
        const [epoch, place] = await Promise.all([
          sentinel.ask('sentinel', ['master', this.#master], epochIn),
          sentinel.ask('sentinel', ['get-master-addr-by-name', this.#master], placeIn),
        ])
        return { place, epoch }
      })
      this.#answers = all.length
      this.#latest = all.reduce((latest, answer) => (answer.epoch > latest.epoch ? answer : latest))
      this.#epoch = Math.max(this.#epoch, this.#latest.epoch)
      return this.#latest.place
    } catch (error) {
      const { errors, message } = error as AggregateError
      const all = (what: string) => (errors as Error[]).every((one) => one.message.includes(what))
      const named = `the master ${JSON.stringify(this.#master)}`
      const hosts = this.#all.map(({ leadsTo }) => leadsTo).join(', ')
      const why = all('unknown command')
        ? `no Sentinel at ${hosts}, but a Redis; allowed: the addresses of Sentinels, or redis:// for one server`
        : all(UNKNOWN)
          ? `no Sentinel of ${hosts} knows ${named}; allowed: a name listed by SENTINEL MASTERS`
          : null
      if (why === null) throw new StoreUnavailable(`no Sentinel names ${named}: ${message}`, false)
      this.misconfigured = new Misconfigured(`store.url: ${why}`)
      throw this.misconfigured
    }
  }

  /** Reconnects `server` when another master is named, since the old one may still answer. */
  watch(server: RedisConnection): void {
    const look = async (): Promise<void> => {
      const epoch = this.#epoch
      const place = await this.find()
      if ((this.#latest as MasterReport).epoch >= epoch && hostPortText(place) !== server.leadsTo)
        server.reconnect()
    }
    this.#timer = setInterval(() => void look().catch(() => {}), this.#every).unref()
  }

  /** How many replicas of the master they know, including those that are down; the highest of differing answers. */
  async replicas(): Promise<number> {
    const args = ['replicas', this.#master]
    return Math.max(
      ...(await askAll(this.#all, OTHERS, (one) => one.ask('sentinel', args, list(any)))).map(
        ({ length }) => length,
      ),
    )
  }

  /** For people, once a master is found. */
  topology(): string {
    const { place, epoch } = this.#latest as MasterReport
    return `of ${this.#all.length} Sentinels ${this.#answers} answered; the latest configuration (epoch ${epoch}) names ${hostPortText(place)} as the master ${JSON.stringify(this.#master)}`
  }

  async close(): Promise<void> {
    clearInterval(this.#timer)
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

function placeIn(reply: RespReply): HostPort {
  if (reply === null) throw new Error(UNKNOWN)
  const [host, port] = tuple(text(/./), text(/^\d+$/))(reply)
  return { host, port: Number(port) }
}
