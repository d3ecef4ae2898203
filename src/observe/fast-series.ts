/*
 * Counters and histograms by their label values, counted here and handed to prom-client when it is asked: its own `inc` and
 * `observe` check and hash the labels each time, ten times per protected request (docs/internals/performance.md).
 */

export type Labels = Readonly<Record<string, string>>

/** A sample as prom-client prints it. */
export interface Sample {
  readonly metricName: string
  readonly labels: Readonly<Record<string, string | number>>
  readonly value: number
}

interface Description {
  readonly name: string
  readonly help: string
  readonly labels: readonly string[]
}

/** One value per combination of labels, made when it is first needed. */
class ByLabels<V> {
  readonly #names: readonly string[]
  readonly #values = new Map<string, { readonly labels: Labels; readonly value: V }>()
  readonly #make: () => V

  constructor(names: readonly string[], make: () => V) {
    this.#names = names
    this.#make = make
  }

  of(labels: Labels): V {
    let key = ''
    // Values have no NUL: they are names of the configuration and of this program.
    for (const name of this.#names) key += `${labels[name]}\0`
    let found = this.#values.get(key)
    if (found === undefined) {
      found = { labels: { ...labels }, value: this.#make() }
      this.#values.set(key, found)
    }
    return found.value
  }

  all(): Iterable<{ readonly labels: Labels; readonly value: V }> {
    return this.#values.values()
  }
}

export class Counts {
  readonly name: string
  readonly #help: string
  readonly #values: ByLabels<{ count: number }>
  readonly #read: (() => number) | undefined

  /** `read`: what is counted elsewhere, without labels. */
  constructor({ name, help, labels }: Description, read?: () => number) {
    this.name = name
    this.#help = help
    this.#read = read
    this.#values = new ByLabels(labels, () => ({ count: 0 }))
  }

  /** By 0: the series is there from then on. */
  increment(labels: Labels, by: number): void {
    this.#values.of(labels).count += by
  }

  async get() {
    const values: Sample[] = []
    if (this.#read !== undefined) values.push({ metricName: this.name, labels: {}, value: this.#read() })
    for (const { labels, value } of this.#values.all())
      values.push({ metricName: this.name, labels, value: value.count })
    return { name: this.name, help: this.#help, type: 'counter', values, aggregator: 'sum' }
  }
}

interface Distribution {
  /** How many values fell into each bucket alone; the last is beyond every bound. */
  readonly buckets: number[]
  sum: number
}

export class Distributions {
  readonly name: string
  readonly #help: string
  readonly #bounds: readonly number[]
  readonly #values: ByLabels<Distribution>

  /** `bounds`: upper ends of the buckets, ascending. */
  constructor({ name, help, labels }: Description, bounds: readonly number[]) {
    this.name = name
    this.#help = help
    this.#bounds = bounds
    const buckets = bounds.length + 1
    this.#values = new ByLabels(labels, () => ({ buckets: Array.from({ length: buckets }, () => 0), sum: 0 }))
  }

  observe(labels: Labels, value: number): void {
    const found = this.#values.of(labels)
    let at = 0
    while (at < this.#bounds.length && value > (this.#bounds[at] as number)) at++
    found.buckets[at] = (found.buckets[at] as number) + 1
    found.sum += value
  }

  async get() {
    const values: Sample[] = []
    const { name } = this
    for (const { labels, value } of this.#values.all()) {
      let count = 0
      for (const [at, own] of value.buckets.entries()) {
        count += own
        values.push({
          metricName: `${name}_bucket`,
          labels: { le: this.#bounds[at] ?? '+Inf', ...labels },
          value: count,
        })
      }
      values.push({ metricName: `${name}_sum`, labels, value: value.sum })
      values.push({ metricName: `${name}_count`, labels, value: count })
    }
    return { name, help: this.#help, type: 'histogram', values, aggregator: 'sum' }
  }
}
