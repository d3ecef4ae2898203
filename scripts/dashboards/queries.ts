/*
 * PromQL of the dashboards. A metric that the proxy does not have is a compile error here.
 */
import { METRICS, type MetricName } from '../../src/observe/metrics.ts'
import { namesOf, REQUEST_OUTCOMES, type RequestOutcome } from '../../src/protect/outcomes.ts'

/** Which replicas the viewer looks at. */
const REPLICAS = 'job=~"$job", namespace=~"$namespace", instance=~"$instance"'

/** The label sets that are one for all replicas of one deployment. */
const DEPLOYMENT = 'job, namespace'

/** A selector of what the viewer has chosen; by route where the metric has that label. `matchers`: further ones. */
export function of(metric: MetricName, matchers = '', suffix = ''): string {
  const labels: readonly string[] = METRICS[metric].labels
  const all = [REPLICAS, ...(labels.includes('route') ? ['route=~"$route"'] : []), matchers]
  return `${metric}${suffix}{${all.filter((part) => part !== '').join(', ')}}`
}

/** A selector of a metric that Node's runtime or Prometheus brings. */
export function ofProcess(metric: string, matchers = ''): string {
  return `${metric}{${[REPLICAS, matchers].filter((part) => part !== '').join(', ')}}`
}

/** Per second. `by`: labels to keep, none for the sum. */
export function rate(metric: MetricName, by = '', matchers = '', suffix = ''): string {
  return `sum${kept(by)} (rate(${of(metric, matchers, suffix)}[$__rate_interval]))`
}

/** How many in the time that the viewer looks at. */
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

/** Series that have something to say: every counter begins at 0. */
export function some(query: string): string {
  return `${query} > 0`
}

/** Of a gauge that every replica tells of the same store: the largest of each deployment, then their sum. */
export function shared(selector: string): string {
  return `sum (max by (${DEPLOYMENT}) (${selector}))`
}

function kept(by: string): string {
  return by === '' ? '' : ` by (${by})`
}
