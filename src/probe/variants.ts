/** The parsed JSON, or the text itself. */
export function jsonOrText(body: Buffer | string): unknown {
  try {
    return JSON.parse(body.toString()) as unknown
  } catch {
    return body.toString()
  }
}

/** The JSON with all members in reverse order; null: not JSON, or nothing changes. */
export function reordered(body: string | null): string | null {
  const value = objectOf(body)
  const changed = JSON.stringify(reversed(value))
  return changed === JSON.stringify(value) ? null : changed
}

/** The JSON with another number in it, or else another text, or one more member; null: not JSON. */
export function otherThan(body: string | null): string | null {
  const value = objectOf(body)
  if (value === null) return null
  return JSON.stringify(
    replaced(value, (one) => (typeof one === 'number' ? one + 1 : undefined)) ??
      replaced(value, (one) =>
        typeof one === 'string' && !one.includes('{uuid}') ? `${one}2` : undefined,
      ) ?? { ...value, other: true },
  )
}

/** Null: not an object or array, or one with numbers that would lose digits. */
function objectOf(body: string | null): object | null {
  const value = jsonOrText(body ?? '')
  return typeof value === 'object' && !/\d{16}/.test(body ?? '') ? value : null
}

function reversed(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(reversed)
  if (typeof value !== 'object' || value === null) return value
  const members = Object.entries(value).reverse()
  return Object.fromEntries(members.map(([name, member]) => [name, reversed(member)]))
}

/** With the first scalar replaced for which `change` has a value; undefined: there is none. */
function replaced(value: unknown, change: (scalar: unknown) => unknown): unknown {
  if (typeof value !== 'object' || value === null) return change(value)
  for (const [name, member] of Object.entries(value)) {
    const other = replaced(member, change)
    if (other !== undefined)
      return Array.isArray(value) ? value.with(Number(name), other) : { ...value, [name]: other }
  }
  return undefined
}
