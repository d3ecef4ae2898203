/**
 * Writes dashboards/*.json for Grafana: node scripts/dashboards.ts
 * A test proves that what is committed is what this makes (test/watch/dashboards.test.ts).
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
