/*
 * Metrics by their label values, kept here and handed to prom-client when it is scraped: its own `inc` and `observe` check and
 * hash the labels each time, ten times per protected request (docs/internals/performance.md).
 */

export type Labels = Readonly<Record<string, string>>

/** As prom-client prints it. */
interface Sample {
  readonly metricName: string
  readonly labels: Labels
  readonly value: number
}

interface Description {
  readonly name: string
  readonly kind: 'counter' | 'gauge' | 'histogram'
  readonly help: string
  readonly labels: readonly string[]
}

/** One metric, with one value per combination of labels. Its name and `get` are all that prom-client's registry needs. */
abstract class Series<V> {
  readonly name: string
  readonly kind: string
  readonly #about: Description
  readonly #make: () => V
  readonly #values = new Map<string, { readonly labels: Labels; readonly value: V }>()

  constructor(about: Description, make: () => V) {
    this.name = about.name
    this.kind = about.kind
    this.#about = about
    this.#make = make
    if (about.labels.length === 0) this.of({})
  }

  protected abstract samples(labels: Labels, value: V): Sample[]

  protected of(labels: Labels): V {
    let key = ''
    // Label values have no NUL: they come from the configuration and from this program.
    for (const name of this.#about.labels) key += `${labels[name]}\0`
    let found = this.#values.get(key)
    if (found === undefined) {
      found = { labels: { ...labels }, value: this.#make() }
      this.#values.set(key, found)
    }
    return found.value
  }

  async get() {
    const values = [...this.#values.values()].flatMap(({ labels, value }) => this.samples(labels, value))
    return { name: this.name, help: this.#about.help, type: this.kind, values, aggregator: 'sum' }
  }
}

/** A counter or a gauge. */
export class Values extends Series<{ current: number }> {
  #source: (() => number) | null = null

  constructor(about: Description) {
    super(about, () => ({ current: 0 }))
  }

  /** By 0: the series exists from then on. */
  increment(labels: Labels, by: number): void {
    this.of(labels).current += by
  }

  set(labels: Labels, value: number): void {
    this.of(labels).current = value
  }

  /** Reads the value from elsewhere at each scrape; for metrics without labels. */
  read(source: () => number): void {
    this.#source = source
  }

  protected override samples(labels: Labels, { current }: { current: number }): Sample[] {
    return [{ metricName: this.name, labels, value: this.#source?.() ?? current }]
  }
}

interface Distribution {
  /** Counts per bucket, not cumulative; the last is beyond every bound. */
  readonly buckets: number[]
  sum: number
}

export class Distributions extends Series<Distribution> {
  readonly #bounds: readonly number[]

  /** `bounds`: upper ends of the buckets, ascending. */
  constructor(about: Description, bounds: readonly number[]) {
    super(about, () => ({ buckets: [...bounds.map(() => 0), 0], sum: 0 }))
    this.#bounds = bounds
  }

  observe(labels: Labels, value: number): void {
    const found = this.of(labels)
    let at = 0
    while (at < this.#bounds.length && value > (this.#bounds[at] as number)) at++
    found.buckets[at] = (found.buckets[at] as number) + 1
    found.sum += value
  }

  protected override samples(labels: Labels, { buckets, sum }: Distribution): Sample[] {
    const { name } = this
    let count = 0
    const counts = buckets.map((own, at) => {
      count += own
      return {
        metricName: `${name}_bucket`,
        labels: { le: String(this.#bounds[at] ?? '+Inf'), ...labels },
        value: count,
      }
    })
    return [
      ...counts,
      { metricName: `${name}_sum`, labels, value: sum },
      { metricName: `${name}_count`, labels, value: count },
    ]
  }
}
