import type { Parsed } from './units.ts'

export type Environment = Readonly<Record<string, string | undefined>>

/** Anything that begins like a substitution: `$${` (an escaped one), `${…}`, or a `${` that never ends. */
const REFERENCE = /\$\$\{|\$\{([^}]*)\}?/g
const INSIDE = /^([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?$/s

export function hasReference(text: string): boolean {
  return text.includes('${')
}

/**
 * Puts the environment into a scalar: `${NAME}`, or `${NAME:-default}` where NAME is unset or empty, as in a shell.
 * `$${` stands for `${` itself; every other `$` is data.
 */
export function substitute(text: string, env: Environment): Parsed<string> {
  let message: string | null = null
  const value = text.replaceAll(REFERENCE, (whole: string, inside: string | undefined) => {
    if (inside === undefined) return '${'
    const match = INSIDE.exec(inside)
    const [, name, fallback] = match ?? []
    if (name === undefined || !whole.endsWith('}')) {
      message ??= `found ${JSON.stringify(whole)}; allowed: \${NAME}, \${NAME:-default}, or $\${ for these two characters`
      return ''
    }
    const found = env[name]
    if (fallback !== undefined && (found === undefined || found === '')) return fallback
    if (found === undefined)
      message ??= `the environment variable ${name} is not set; allowed: set it, or \${${name}:-default}`
    return found ?? ''
  })
  return message === null ? { ok: true, value } : { ok: false, message }
}
