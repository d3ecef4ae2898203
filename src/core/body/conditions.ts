import type { Expected } from '../policy.ts'
import type { LookedUp } from './json-lookup.ts'

/** Whether the body has all these values; `json`: null if it is not JSON, or was not kept. An empty list fits any body. */
export function allMatch(when: readonly Expected[], json: LookedUp | null): boolean {
  return when.every(({ pointer, value }) => {
    const literal = json && literalAt(json, pointer)
    return literal !== null && textOf(literal) === value
  })
}

/** null: absent, `null`, or ambiguous. */
export function literalAt(json: LookedUp, pointer: string): string | null {
  const found = json.at(pointer)
  return found.kind === 'literal' && found.literal !== 'null' ? found.literal : null
}

/** The value of a string, the text of anything else. */
export function textOf(literal: string): string {
  if (literal.startsWith('"')) return JSON.parse(literal) as string
  // An empty list is what a search without results returns.
  return /^(?:\[\s*\]|\{\s*\})$/.test(literal) ? literal.replaceAll(/\s/g, '') : literal
}
