/*
 * Metrics by their label values, kept here and handed to prom-client when it is scraped: its own `inc` and `observe` check and
 * hash the labels each time, ten times per protected request (docs/internals/performance.md).
 */

export type Labels = Readonly<Record<string, string>>

/** A sample as prom-client prints it. */
interface Sample {
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

/** A counter or a gauge. */
export class Values {
  readonly name: string
  readonly kind: 'counter' | 'gauge'
  readonly #help: string
  readonly #values: ByLabels<{ value: number }>
  #source: (() => number) | null = null

  constructor({ name, help, labels }: Description, kind: 'counter' | 'gauge') {
    this.name = name
    this.kind = kind
    this.#help = help
    this.#values = new ByLabels(labels, () => ({ value: 0 }))
    if (labels.length === 0) this.#values.of({})
  }

  /** By 0: the series is there from then on. */
  increment(labels: Labels, by: number): void {
    this.#values.of(labels).value += by
  }

  set(labels: Labels, value: number): void {
    this.#values.of(labels).value = value
  }

  /** Takes the value from elsewhere whenever it is asked for; without labels. */
  read(source: () => number): void {
    this.#source = source
  }

  async get() {
    if (this.#source !== null) this.set({}, this.#source())
    const values = Array.from(
      this.#values.all(),
      ({ labels, value }): Sample => ({ metricName: this.name, labels, value: value.value }),
    )
    return { name: this.name, help: this.#help, type: this.kind, values, aggregator: 'sum' }
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
