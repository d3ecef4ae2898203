/** Headers that carry keys in the wild, as their makers spell them (contract §4; Cko, Qonto and others beside it). */
const KNOWN = [
  'Idempotency-Key',
  'X-Idempotency-Key',
  'PayPal-Request-Id',
  'Cko-Idempotency-Key',
  'X-Qonto-Idempotency-Key',
  'Request-Idempotency-Key',
  'Repeatability-Request-ID',
] as const

const BY_LOWER = new Map<string, string>(KNOWN.map((name) => [name.toLowerCase(), name]))

/** Whether a header of that name, in any case, is one that keys are sent in. */
export function isKeyHeader(name: string): boolean {
  return BY_LOWER.has(name.toLowerCase()) || /^(?:x-)?([a-z]+-)*idempotency-?(?:key|id|token)$/i.test(name)
}

/** A header's lower-case name as people write it. Case means nothing in it (RFC 9110 §5.1). */
export function spelled(name: string): string {
  return BY_LOWER.get(name) ?? name.replace(/(?<=^|-)[a-z]/g, (first) => first.toUpperCase())
}
