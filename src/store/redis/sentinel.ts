import type { Millis } from '../../core/record.ts'
import { StoreUnavailable } from '../register.ts'
import {
  askAll,
  type ConnectionSettings,
  type HostPort,
  hostPortText,
  type Login,
  RedisConnection,
  repliesMismatch,
  wordsOf,
} from './connection.ts'
import type { RespReply } from './resp.ts'
import { Misconfigured, type SentinelUrl } from './url.ts'

const SWITCH = '+switch-master'
/** How long to wait for the others once one Sentinel has answered: the first may have slept through a failover. */
const OTHERS: Millis = 250
const UNKNOWN = 'No such master'

/** What a Sentinel reports about the master. */
interface MasterReport {
  readonly place: HostPort
  /** Its configuration epoch: each failover increases it. */
  readonly epoch: number
}

/**
 * The master that the Sentinels monitor, wherever it is. ioredis's own connector believes the first Sentinel that answers, and misses
 * what is announced while it does not listen (ADR 124).
 */
export class Sentinels {
  readonly isMaster = true
  readonly login: Login
  /** Set if every server answered that it knows no such master, or is no Sentinel: only a person can fix that. */
  misconfigured: Misconfigured | null = null
  readonly #master: string
  /** One connection to each. RESP3: it takes commands while it is subscribed. */
  readonly #all: readonly RedisConnection[]
  /** Their latest answer, and how many gave it. */
  #latest: MasterReport | null = null
  #answers = 0
  /** The highest epoch reported by any of them. */
  #epoch = 0
  /** Number of announcements of the master's address. */
  #news = 0
  /** What follows the announcements, if anything does. */
  #server: RedisConnection | null = null

  constructor({ sentinels, master, server }: SentinelUrl, { timeoutMs, client }: ConnectionSettings) {
    this.#master = master
    this.login = server
    this.#all = sentinels.map((address) => {
      const settings: ConnectionSettings = { timeoutMs, client: { ...client, protocol: 3 } }
      const connection: RedisConnection = new RedisConnection({ place: address, login: address }, settings, {
        onReady: () => void this.#listen(connection),
      })
      connection.redis.on('message', (_channel, text) => this.#take(text))
      void connection.open()
      return connection
    })
  }

  /** Asks all at once, since any may be down or silent. The latest configuration counts. */
  async find(): Promise<HostPort> {
    const news = this.#news
    try {
      const all = await this.#ask(this.#all)
      // A Sentinel announced a change meanwhile, perhaps after it had answered.
      if (news !== this.#news) return this.find()
      this.#answers = all.length
      this.#latest = all.reduce((latest, answer) => (answer.epoch > latest.epoch ? answer : latest))
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

  /** How many replicas of the master they know, including those that are down; the highest of differing answers. */
  async replicas(): Promise<number> {
    const args = ['replicas', this.#master]
    return Math.max(...(await askAll(this.#all, OTHERS, (one) => one.ask('sentinel', args, lengthOf))))
  }

  /** For people, once a master is found. */
  topology(): string {
    const { place, epoch } = this.#latest as MasterReport
    return `of ${this.#all.length} Sentinels ${this.#answers} answered; the latest configuration (epoch ${epoch}) names ${hostPortText(place)} as the master ${JSON.stringify(this.#master)}`
  }

  /** Reconnects `server` when a Sentinel names another master, since the old one may still answer. */
  watch(server: RedisConnection): void {
    this.#server = server
    for (const connection of this.#all) if (connection.isReady) void this.#listen(connection)
  }

  async close(): Promise<void> {
    await Promise.all(this.#all.map((connection) => connection.close()))
  }

  /** Announcements are lost while the proxy is not subscribed, so it asks after subscribing. */
  async #listen(sentinel: RedisConnection): Promise<void> {
    if (this.#server === null) return
    try {
      await sentinel.redis.subscribe(SWITCH)
      const [answer] = (await this.#ask([sentinel])) as [MasterReport]
      if (answer.epoch >= this.#epoch) this.#follow(answer.place)
    } catch {
      // It refuses, or has disconnected.
    }
  }

  async #ask(sentinels: readonly RedisConnection[]): Promise<MasterReport[]> {
    const all = await askAll(sentinels, OTHERS, async (sentinel) => {
      // During a failover the epoch changes before the address: asked in this order, an address never gets a later epoch.
      const [epoch, place] = await Promise.all([
        sentinel.ask('sentinel', ['master', this.#master], epochIn),
        sentinel.ask('sentinel', ['get-master-addr-by-name', this.#master], placeIn),
      ])
      return { place, epoch }
    })
    this.#epoch = Math.max(this.#epoch, ...all.map(({ epoch }) => epoch))
    return all
  }

  #take(text: string): void {
    const [master, , , host = '', port] = text.split(' ')
    if (master !== this.#master) return
    this.#news++
    this.#follow({ host, port: Number(port) })
  }

  #follow(place: HostPort): void {
    if (hostPortText(place) !== this.#server?.leadsTo) this.#server?.reconnect()
  }
}

/** The reply alternates fields and values. */
function epochIn(reply: RespReply): number {
  const words = wordsOf(reply)
  const epoch = Number(words[words.indexOf('config-epoch') + 1])
  if (words.length % 2 !== 0 || !Number.isSafeInteger(epoch)) throw repliesMismatch()
  return epoch
}

function placeIn(reply: RespReply): HostPort {
  if (reply === null) throw new Error(UNKNOWN)
  const [host = '', port] = wordsOf(reply)
  if (host === '' || port === undefined) throw repliesMismatch()
  return { host, port: Number(port) }
}

function lengthOf(reply: RespReply): number {
  if (!Array.isArray(reply)) throw repliesMismatch()
  return reply.length
}
