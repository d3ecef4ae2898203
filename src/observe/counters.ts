import type { MetricName, Metrics } from './metrics.ts'

const AGES: MetricName = 'idempotency_retry_age_seconds'

/** The counters of this program that have counted anything, without Node's; and the ages of retries, by their buckets. */
export async function countersOf({
  registry,
}: Metrics): Promise<
  { readonly name: string; readonly labels: Readonly<Record<string, string>>; readonly value: number }[]
> {
  const metrics = await registry.getMetricsAsJSON()
  return metrics
    .filter(
      ({ name, type }) => name === AGES || (String(type) === 'counter' && name.startsWith('idempotency_')),
    )
    .flatMap(({ name, values }) =>
      (values as { metricName?: string; labels: Record<string, string | number>; value: number }[])
        .filter(({ value }) => value > 0)
        .map(({ metricName = name, labels, value }) => ({ name: metricName, labels: texts(labels), value })),
    )
}

/** The bound of a bucket is a number. */
function texts(labels: Readonly<Record<string, string | number>>): Record<string, string> {
  return Object.fromEntries(Object.entries(labels).map(([label, value]) => [label, String(value)]))
}
