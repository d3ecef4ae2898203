import type { Metrics } from './metrics.ts'

/** The counters of this program as they stand, without Node's. */
export async function countersOf({
  registry,
}: Metrics): Promise<
  { readonly name: string; readonly labels: Readonly<Record<string, string>>; readonly value: number }[]
> {
  const metrics = await registry.getMetricsAsJSON()
  return metrics
    .filter(({ name, type }) => String(type) === 'counter' && name.startsWith('idempotency_'))
    .flatMap(({ name, values }) =>
      values.map(({ labels, value }) => ({ name, labels: labels as Record<string, string>, value })),
    )
}
