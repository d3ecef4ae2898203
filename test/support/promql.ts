/** The names in a PromQL query. Not a parser: promtool and a real Prometheus check the syntax. */
export interface Named {
  /** Metrics, each with the labels in its selectors and the values they are compared with. */
  readonly selectors: readonly { readonly metric: string; readonly labels: readonly Comparison[] }[]
  /** Labels in `by (…)` and `on (…)`. */
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
