/** Prometheus' text format, as far as this proxy writes it. */

/** @typedef {{ name: string, labels: Record<string, string>, value: number }} Sample */

/**
 * @param {string} text
 * @returns {Sample[]}
 */
export function parse(text) {
  /** @type {Sample[]} */
  const samples = []
  for (const line of text.split('\n')) {
    const found = /^(idempotency_[a-z_]+)(?:\{(.*)\})? (\S+)/.exec(line)
    if (found === null) continue
    const [, name = '', labels = '', value] = found
    samples.push({ name, labels: labelsOf(labels), value: Number(value) })
  }
  return samples
}

/** @param {string} text */
function labelsOf(text) {
  /** @type {Record<string, string>} */
  const labels = {}
  for (const [, name = '', value = ''] of text.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g))
    labels[name] = value.replace(/\\(.)/g, (_, one) => (one === 'n' ? '\n' : one))
  return labels
}

/**
 * Sum of the samples of that name with these labels.
 * @param {readonly Sample[]} samples
 * @param {string} name
 * @param {Readonly<Record<string, string | readonly string[]>>} [labels]
 */
export function sum(samples, name, labels = {}) {
  let total = 0
  for (const sample of samples)
    if (
      sample.name === name &&
      Object.entries(labels).every(([label, wanted]) => [wanted].flat().includes(sample.labels[label] ?? ''))
    )
      total += sample.value
  return total
}
