import {
  type CollectedMetrics,
  type CountedSample,
  type Exposition,
  type Metrics,
  START_TIME,
  samplesOf,
} from '../observe/metrics.ts'
import type { Member } from './member.ts'

/** The metrics of all processes of a proxy, including workers that have ended: a sum that fell would look like a restart. */
export class MergedMetrics {
  /** The latest metrics of each worker, for when it does not answer or ends. */
  readonly #last = new Map<Member, CollectedMetrics>()
  /** Counters of workers that have ended, as they were last seen. */
  #ended: CollectedMetrics[] = []
  readonly #left = new WeakSet<Member>()
  #turn: Promise<unknown> = Promise.resolve()

  async exposition(own: Metrics, members: Iterable<Member>): Promise<Exposition> {
    const ours = await own.collected()
    const registry = await merged([ours, ...(await this.#collect(members))])
    // The first process's.
    for (const metric of ours)
      if (metric.name === START_TIME) registry.registerMetric({ ...metric, get: () => metric } as never)
    return { contentType: registry.contentType, text: await registry.metrics() }
  }

  /** As {@link Metrics.samples}. */
  async samples(own: Metrics, members: Iterable<Member>): Promise<CountedSample[]> {
    const registry = await merged([await own.collected(), ...(await this.#collect(members))])
    return samplesOf((await registry.getMetricsAsJSON()) as unknown as CollectedMetrics)
  }

  leave(member: Member): void {
    this.#left.add(member)
    const last = this.#last.get(member)
    this.#last.delete(member)
    if (last !== undefined)
      this.#ended.push(last.filter(({ type }) => type === 'counter' || type === 'histogram'))
  }

  /** One collection at a time: while counters of ended workers are merged, they are not in the list. */
  #collect(members: Iterable<Member>): Promise<CollectedMetrics[]> {
    const collected = this.#turn.then(() => this.#collectNow(members))
    this.#turn = collected.catch(() => {})
    return collected
  }

  async #collectNow(members: Iterable<Member>): Promise<CollectedMetrics[]> {
    const asked = [...members].map(async (member) => {
      const found = await member.ask('metrics', null).catch(() => null)
      if (found !== null && !this.#left.has(member)) this.#last.set(member, found)
    })
    await Promise.all(asked)
    if (this.#ended.length > 1) {
      const registry = await merged(this.#ended.splice(0))
      this.#ended.push((await registry.getMetricsAsJSON()) as unknown as CollectedMetrics)
    }
    return [...this.#last.values(), ...this.#ended]
  }
}

async function merged(all: readonly CollectedMetrics[]) {
  const { AggregatorRegistry } = await import('prom-client')
  return AggregatorRegistry.aggregate(all as never)
}
