/*
 * PromQL of the dashboards. A metric that the proxy does not have is a compile error here.
 */
import { METRICS, type MetricName } from '../../src/observe/metrics.ts'
import { namesOf, REQUEST_OUTCOMES, type RequestOutcome } from '../../src/protect/outcomes.ts'

/** The selected replicas. */
const REPLICAS = 'job=~"$job", namespace=~"$namespace", instance=~"$instance"'

/** Labels that all replicas of a deployment share. */
const DEPLOYMENT = 'job, namespace'

/** A selector for the selected replicas, and routes if the metric has that label. `matchers`: further ones. */
export function of(metric: MetricName, matchers = '', suffix = ''): string {
  const labels: readonly string[] = METRICS[metric].labels
  const all = [REPLICAS, ...(labels.includes('route') ? ['route=~"$route"'] : []), matchers]
  return `${metric}${suffix}{${all.filter((part) => part !== '').join(', ')}}`
}

/** A selector of a metric of Node or Prometheus. */
export function ofProcess(metric: string, matchers = ''): string {
  return `${metric}{${[REPLICAS, matchers].filter((part) => part !== '').join(', ')}}`
}

/** Per second. `by`: labels to keep; none: the sum. */
export function rate(metric: MetricName, by = '', matchers = '', suffix = ''): string {
  return `sum${kept(by)} (rate(${of(metric, matchers, suffix)}[$__rate_interval]))`
}

/** Count in the selected time range. */
export function increase(metric: MetricName, by = '', matchers = ''): string {
  return `sum${kept(by)} (increase(${of(metric, matchers)}[$__range]))`
}

export function quantile(share: number, metric: MetricName, by: string, matchers = ''): string {
  const labels = by === '' ? 'le' : `le, ${by}`
  return `histogram_quantile(${share}, ${rate(metric, labels, matchers, '_bucket')})`
}

/** The matcher of a group of outcomes of `idempotency_requests_total`. */
export function anyOf(group: 'client' | 'error', except?: RequestOutcome): string {
  const names = namesOf(REQUEST_OUTCOMES).filter(
    (name) => REQUEST_OUTCOMES[name].group === group && name !== except,
  )
  return `outcome=~"${names.join('|')}"`
}

/** Hides series at 0, where every counter starts. */
export function some(query: string): string {
  return `${query} > 0`
}

/** A gauge that every replica reports about the same store: the maximum of each deployment, summed. */
export function shared(selector: string): string {
  return `sum (max by (${DEPLOYMENT}) (${selector}))`
}

function kept(by: string): string {
  return by === '' ? '' : ` by (${by})`
}
