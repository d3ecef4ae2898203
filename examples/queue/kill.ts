/**
 * Kills each part at each point of a message's way, while every message is sent twice, out of order, to two consumers; then prints how
 * often the work of each was done. See README.md.
 */
import { type Part, until } from '../parts.ts'
import { BROKERS, type BrokerKind, bodyOf, lack, type Row, World } from './world.ts'

/** Where the victim is when it dies. It kills itself, or stands by while another, stopped there, waits. */
export const POINTS = [
  ['outbox', 'has read the row', 'SIGKILL outbox read'],
  ['outbox', 'has sent it', 'SIGKILL outbox published'],
  ['outbox', 'has updated the row', 'SIGKILL outbox updated'],
  ['outbox', 'has committed', 'SIGKILL outbox committed'],
  ['PostgreSQL', 'has not committed', 'SIGSTOP outbox published'],
  ['broker', 'has the message', 'SIGSTOP outbox published'],
  ['consumer', 'has the message', 'SIGKILL consumer received'],
  ['consumer', 'waits, nothing is done', 'SIGSTOP orders received'],
  ['consumer', 'waits, the work is done', 'SIGSTOP orders done'],
  ['consumer', 'has the answer', 'SIGKILL consumer answered'],
  ['consumer', 'has put it with the poison', 'SIGKILL consumer failed'],
  ['consumer', 'has acknowledged', 'SIGKILL consumer acked'],
  ['broker', 'waits, nothing is done', 'SIGSTOP orders received'],
  ['broker', 'waits, the work is done', 'SIGSTOP orders done'],
  ['proxy', 'waits, nothing is done', 'SIGSTOP orders received'],
  ['proxy', 'waits, the work is done', 'SIGSTOP orders done'],
  ['service', 'has done nothing', 'SIGSTOP orders received'],
  ['service', 'has done the work', 'SIGSTOP orders done'],
] as const
type Point = (typeof POINTS)[number]

export interface Killed {
  readonly broker: BrokerKind
  readonly who: string
  readonly where: string
  /** `once`, or what went wrong. */
  readonly ended: string
}

/** Soon, so that nobody waits; on a slow machine no message is poison for being slow. */
const WAITS = {
  LEASE: '1s',
  RECONCILE_AFTER: '1ms',
  RECONCILE_EVERY: '50ms',
  ACK_WAIT: '1000',
  MOST_TRIES: '1000',
  MOST_DELIVERIES: '1000',
}

/** The messages of one death. */
interface Sent {
  readonly point: Point
  readonly good: readonly string[]
  readonly refused: string
}

class Killing {
  readonly #world: World
  /** Ids in `orders-failed`. */
  readonly failed = new Set<string | null>()

  constructor(world: World) {
    this.#world = world
  }

  async at(point: Point): Promise<Sent> {
    const world = this.#world
    const [who, where, demo] = point
    const actor = world.part(demo.includes('outbox') ? 'outbox' : 'consumer')
    const other = world.part('other consumer')
    await actor.kill()
    await other.kill()
    await actor.start({ DEMO: demo })
    const sent = {
      point,
      good: [await world.order(), await world.order(), await world.order()],
      refused: await world.order('orders'),
    }
    const stopped = world.part(actor.name === 'outbox' ? 'outbox' : 'service')
    await until(async () => {
      // A part may have noticed only now who died the last time.
      await world.supervise(actor, other)
      return demo.startsWith('SIGKILL') ? !actor.isRunning : stopped.isStopped
    })
    if (stopped.isStopped) await this.#kill(who, where, stopped)
    await actor.kill()
    // Twice, out of order, beside what is there already. One has no second copy: if it is lost, this never ends.
    await this.#publish([sent.refused, ...sent.good.slice(1).toReversed()], sent.refused)
    await this.#settled(sent)
    await this.#drain()
    return sent
  }

  async #kill(who: Point[0], where: string, stopped: Part): Promise<void> {
    const { postgres } = this.#world
    const done = stopped.count('done orders')
    await (who === 'PostgreSQL' ? postgres.kill() : this.#world.part(who).kill())
    stopped.resume()
    // Whoever is not killed goes on, and may finish what nobody waits for any more.
    if (where === 'waits, nothing is done') await until(() => stopped.count('done orders') > done)
    if (who === 'PostgreSQL') await postgres.start()
  }

  async #publish(ids: readonly string[], refused: string): Promise<void> {
    await this.#world.supervise()
    await using broker = await this.#world.broker()
    for (const id of ids)
      await broker.publish('orders', { id, body: Buffer.from(bodyOf(id, id === refused ? 'orders' : '')) })
  }

  /** Until the work of all is done, whatever has to be started again for that. */
  async #settled({ good, refused }: Pick<Sent, 'good' | 'refused'>): Promise<void> {
    await until(async () => {
      await this.#world.supervise()
      await this.#collect()
      const rows = await this.#world.work().catch((): Row[] => [])
      return (
        [...good, refused].every((id) => rows.some(({ about }) => about === id)) && this.failed.has(refused)
      )
    })
  }

  /** Takes what is in `orders-failed`. */
  async #collect(): Promise<void> {
    try {
      await using broker = await this.#world.broker()
      const ended = broker.consume('orders-failed', async (delivery) => {
        this.failed.add(delivery.id)
        await delivery.ack()
      })
      await Promise.race([until(async () => (await broker.left('orders-failed')).messages === 0), ended])
    } catch {
      // The broker is down, and asked again.
    }
  }

  /** Until no copy of any message is left, for the next death to be that of a new one. */
  async #drain(): Promise<void> {
    for (;;) {
      await this.#world.supervise()
      await until(async () => (await this.#world.unsent()) === 0)
      await using broker = await this.#world.broker()
      await until(async () => (await broker.left('orders')).messages === 0)
      for (const name of ['consumer', 'other consumer']) await this.#world.part(name).kill()
      await until(async () => (await broker.left('orders')).consumers === 0)
      // What a killed consumer had waits again.
      if ((await broker.left('orders')).messages === 0) break
    }
    await this.#collect()
  }
}

/** Each good message worked on once, the refused one refused once and among the poison. */
export function verdict(rows: readonly Row[], failed: ReadonlySet<string | null>, sent: Sent): string {
  const wrong: string[] = []
  for (const id of [...sent.good, sent.refused]) {
    const statuses = rows.filter(({ about }) => about === id).map(({ status }) => status)
    const expected = id === sent.refused ? 402 : 201
    if (statuses.length !== 1 || statuses[0] !== expected)
      wrong.push(`${statuses.length}× ${statuses.join()}`)
    if (failed.has(id) !== (id === sent.refused)) wrong.push(failed.has(id) ? 'among the poison' : 'lost')
  }
  return wrong.length === 0 ? 'once' : wrong.join(', ')
}

export async function killEverywhere(
  broker: BrokerKind,
  points: readonly Point[] = POINTS,
): Promise<Killed[]> {
  await using world = await World.start(broker, WAITS)
  const killing = new Killing(world)
  const sent: Sent[] = []
  for (const point of points) sent.push(await killing.at(point))
  const rows = await world.work()
  return sent.map((one) => {
    const [who, where] = one.point
    return { broker, who, where, ended: verdict(rows, killing.failed, one) }
  })
}

/** Markdown. */
export function table(killed: readonly Killed[]): string {
  const brokers = [...new Set(killed.map((one) => one.broker))]
  const lines = [
    ['killed', 'when it', ...brokers],
    ['-', '-', ...brokers.map(() => '-')],
  ]
  for (const [name, both] of Map.groupBy(killed, ({ who, where }) => `${who}|${where}`))
    lines.push([name, ...brokers.map((broker) => both.find((one) => one.broker === broker)?.ended ?? '')])
  return lines.map((cells) => `|${cells.join('|')}|\n`).join('')
}

if (import.meta.main) {
  try {
    const killed: Killed[] = []
    for (const broker of BROKERS) {
      const why = lack(broker)
      if (why === false) killed.push(...(await killEverywhere(broker)))
      else process.stdout.write(`${broker} is skipped: ${why}\n`)
    }
    process.stdout.write(table(killed))
    process.exitCode = killed.every(({ ended }) => ended === 'once') ? 0 : 1
  } catch (error) {
    process.stderr.write(`${(error as Error).message}\n`)
    process.exitCode = 1
  }
}
