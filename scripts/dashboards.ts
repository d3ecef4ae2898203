/**
 * Writes dashboards/*.json for Grafana: node scripts/dashboards.ts
 * test/watch/dashboards.verify.ts compares the committed files with the output.
 */
import { writeFileSync } from 'node:fs'
import { overview } from './dashboards/overview.ts'
import { safety } from './dashboards/safety.ts'

export const DASHBOARDS = { overview, safety } as const

/** The text of a dashboard's file. */
export function rendered(name: keyof typeof DASHBOARDS): string {
  return `${JSON.stringify(DASHBOARDS[name](), null, 2)}\n`
}

if (import.meta.main)
  for (const name of Object.keys(DASHBOARDS) as (keyof typeof DASHBOARDS)[])
    writeFileSync(new URL(`../dashboards/${name}.json`, import.meta.url), rendered(name))
