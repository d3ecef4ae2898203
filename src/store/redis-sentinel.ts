import type { Millis } from '../core/record.ts'
import {
  askAll,
  type ConnectionSettings,
  RedisConnection,
  type SoughtTarget,
  type Unanswered,
} from './redis-connection.ts'
import { type HostPort, hostPortText, type Login, Refused, repliesMismatch, wordsOf } from './redis-link.ts'
import { Misconfigured, type SentinelUrl } from './redis-url.ts'
import { StoreUnavailable } from './register.ts'
import type { RespReply } from './resp.ts'

const SWITCH = '+switch-master'
/** How long to wait for the others once one Sentinel has answered: the first may have slept through a failover. */
const OTHERS: Millis = 250

type FollowedConnection = Pick<RedisConnection, 'leadsTo' | 'reconnect'>

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
export class Sentinels implements SoughtTarget {
  readonly isMaster = true
  readonly login: Login
  readonly #url: SentinelUrl
  /** One connection to each. RESP3: it takes commands while it is subscribed. */
  readonly #all: readonly RedisConnection[]
  /** What follows the announcements, if anything does. */
  #server: FollowedConnection | null = null
  /** Their latest answer, and how many gave it. */
  #latest: MasterReport | null = null
  #answers = 0
  /** The highest epoch reported by any of them. */
  #epoch = 0
  /** Number of announcements of the master's address. */
  #news = 0
  /** Set if every server answered that it knows no such master, or is no Sentinel: only a person can fix that. */
  misconfigured: Misconfigured | null = null

  constructor(url: SentinelUrl, { timeoutMs, client }: ConnectionSettings) {
    this.#url = url
    this.login = url.server
    this.#all = url.sentinels.map((address) => {
      const settings: ConnectionSettings = { timeoutMs, client: { ...client, protocol: 3 } }
      const connection: RedisConnection = new RedisConnection({ place: address, login: address }, settings, {
        onReady: () => this.#listen(connection),
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
      const { errors, message } = error as Unanswered
      const named = `the master ${JSON.stringify(this.#url.master)}`
      const hosts = this.#all.map(({ leadsTo }) => leadsTo).join(', ')
      const why = errors.every(isNoSentinel)
        ? `no Sentinel at ${hosts}, but a Redis; allowed: the addresses of Sentinels, or redis:// for one server`
        : errors.every((one) => one instanceof UnknownMaster)
          ? `no Sentinel of ${hosts} knows ${named}; allowed: a name listed by SENTINEL MASTERS`
          : null
      if (why === null) throw new StoreUnavailable(`no Sentinel names ${named}: ${message}`, false)
      this.misconfigured = new Misconfigured(`store.url: ${why}`)
      throw this.misconfigured
    }
  }

  /** How many replicas of the master they know, including those that are down; the highest of differing answers. */
  async replicas(): Promise<number> {
    const { master } = this.#url
    const counts = await askAll(this.#all, OTHERS, (one) =>
      one.ask('sentinel', ['replicas', master], lengthOf),
    )
    return Math.max(...counts)
  }

  /** For people, once a master is found. */
  topology(): string {
    const { place, epoch } = this.#latest as MasterReport
    return `of ${this.#all.length} Sentinels ${this.#answers} answered; the latest configuration (epoch ${epoch}) names ${hostPortText(place)} as the master ${JSON.stringify(this.#url.master)}`
  }

  /**
   * Reconnects `server` when a Sentinel names another master, since the old one may still answer. Announcements are lost while the proxy
   * is not subscribed, so it asks each Sentinel after subscribing.
   */
  watch(server: FollowedConnection): void {
    this.#server = server
    for (const connection of this.#all) if (connection.isReady) this.#listen(connection)
  }

  async close(): Promise<void> {
    await Promise.all(this.#all.map((connection) => connection.close()))
  }

  #listen(sentinel: RedisConnection): void {
    if (this.#server === null) return
    const subscribed = sentinel.redis.subscribe(SWITCH).then(async () => {
      const [answer] = (await this.#ask([sentinel])) as [MasterReport]
      if (answer.epoch >= this.#epoch) this.#follow(answer.place)
    })
    // It refuses, or has disconnected.
    subscribed.catch(() => {})
  }

  async #ask(sentinels: readonly RedisConnection[]): Promise<MasterReport[]> {
    const { master } = this.#url
    const all = await askAll(sentinels, OTHERS, async (sentinel) => {
      // During a failover the epoch changes before the address: asked in this order, an address never gets a later epoch.
      const [epoch, place] = await Promise.all([
        sentinel.ask('sentinel', ['master', master], epochIn).catch(unknown),
        sentinel.ask('sentinel', ['get-master-addr-by-name', master], placeIn),
      ])
      if (epoch === null || place === null) throw new UnknownMaster('it knows no such master')
      return { place, epoch }
    })
    this.#epoch = Math.max(this.#epoch, ...all.map(({ epoch }) => epoch))
    return all
  }

  #take(text: string): void {
    const [master, , , host = '', port] = text.split(' ')
    if (master === this.#url.master) this.#follow({ host, port: Number(port) })
  }

  #follow(place: HostPort): void {
    this.#news++
    if (hostPortText(place) !== this.#server?.leadsTo) this.#server?.reconnect()
  }
}

class UnknownMaster extends Error {}

function isNoSentinel(error: Error): boolean {
  return error instanceof Refused && error.reply.includes('unknown command')
}

function unknown(error: Error): null {
  if (error.message.includes('No such master')) return null
  throw error
}

/** The reply alternates fields and values. */
function epochIn(reply: RespReply): number {
  const words = wordsOf(reply)
  const epoch = Number(words[words.indexOf('config-epoch') + 1])
  if (words.length % 2 !== 0 || !Number.isSafeInteger(epoch)) throw repliesMismatch()
  return epoch
}

function placeIn(reply: RespReply): HostPort | null {
  if (reply === null) return null
  const [host = '', port] = wordsOf(reply)
  if (host === '' || port === undefined) throw repliesMismatch()
  return { host, port: Number(port) }
}

function lengthOf(reply: RespReply): number {
  if (!Array.isArray(reply)) throw repliesMismatch()
  return reply.length
}
