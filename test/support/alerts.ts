import { readFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import { parse } from 'yaml'

export interface Rule {
  readonly alert: string
  readonly expr: string
  readonly for?: string
  readonly labels: { readonly severity: string }
  readonly annotations: {
    readonly summary: string
    readonly description: string
    readonly runbook_url: string
  }
}

/** The file of the alerts, and what it says. */
export const RULES_FILE = fileURLToPath(new URL('../../alerts/rules.yaml', import.meta.url))
export const RULES = (
  parse(readFileSync(RULES_FILE, 'utf8')) as { groups: { rules: Rule[] }[] }
).groups.flatMap(({ rules }) => rules)
