/** What a PromQL query names. No parser: promtool and a real Prometheus are those. */
export interface Named {
  /** Metrics, each with the labels that its selectors compare, and the values where they are compared with. */
  readonly selectors: readonly { readonly metric: string; readonly labels: readonly Comparison[] }[]
  /** Labels of `by (…)` and `on (…)`. */
  readonly grouped: readonly string[]
}
interface Comparison {
  readonly label: string
  readonly value: string
}

const SELECTOR = /\b((?:idempotency|process|nodejs)_\w+|up)\b(?:\{([^}]*)\})?/g

export function named(query: string): Named {
  const selectors = [...query.matchAll(SELECTOR)].map(([, metric = '', inside = '']) => ({
    metric,
    labels: [...inside.matchAll(/(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"/g)].map(([, label = '', value = '']) => ({
      label,
      value,
    })),
  }))
  const grouped = [...query.matchAll(/\b(?:by|on)\s*\(([^)]*)\)/g)].flatMap(([, list = '']) =>
    list.split(',').map((label) => label.trim()),
  )
  return { selectors, grouped }
}
