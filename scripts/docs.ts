import { readFileSync, writeFileSync } from 'node:fs'
import { ruleOf } from '../src/config/diff.ts'
import { POLICY, PROPERTIES, ROUTE } from '../src/config/properties.ts'
import { type PropertyRow, propertyHelp, type Rows } from '../src/config/rows.ts'
import { METRICS } from '../src/observe/metrics.ts'
import {
  CLAIM_RESULTS,
  COMPLETION_RESULTS,
  RECONCILE_RESULTS,
  REQUEST_OUTCOMES,
  SHADOW_VERDICTS,
} from '../src/protect/outcomes.ts'

/** Pages with generated lists between `<!-- table: NAME -->` and `<!-- end -->`. A test compares them with the rows. */
export const GENERATED = ['configuration', 'metrics', 'shadow', 'reconciliation'].map(
  (name) => new URL(`../docs/${name}.md`, import.meta.url),
)
if (import.meta.main)
  for (const page of GENERATED) writeFileSync(page, withTables(readFileSync(page, 'utf8')))

export function withTables(text: string): string {
  const { defaults: _d, routes: _r, ...file } = PROPERTIES
  const { name, match } = ROUTE
  // Described among the properties of the file.
  const { limits: _l, ...policy } = POLICY
  const tables: Readonly<Record<string, readonly string[]>> = {
    file: [...linesOf(file), ...linesOf({ name, match }, 'routes[].')],
    policy: linesOf(policy),
    metrics: Object.entries(METRICS).map(
      ([name, { kind, labels, help }]) =>
        `- \`${name}\` ${kind}${labels.length > 0 ? ` {${labels.join(', ')}}` : ''}: ${help}`,
    ),
    outcomes: said(REQUEST_OUTCOMES),
    claims: said(CLAIM_RESULTS),
    completions: said(COMPLETION_RESULTS),
    reconciled: said(RECONCILE_RESULTS),
    verdicts: said(SHADOW_VERDICTS),
  }
  return text.replaceAll(
    /(?<=<!-- table: (\w+) -->\n).*?(?=<!-- end -->)/gs,
    (_, table: string) => `\n${tables[table]?.join('\n')}\n\n`,
  )
}

function said(table: Readonly<Record<string, { readonly says: string }>>): string[] {
  return Object.entries(table).map(([name, { says }]) => `- \`${name}\`: ${says}`)
}

/** `listed`: groups already in the table, by their first row. One that comes again refers to the first. */
function linesOf(rows: Rows, base = '', listed = new Map<PropertyRow, string>()): string[] {
  return Object.entries(rows).flatMap(([name, row]) => {
    const path = base + name
    if (row.group === undefined) return [line(path, row)]
    const [first] = Object.values(row.group)
    const same = first && listed.get(first)
    if (same !== undefined) {
      const names = Object.keys(row.group).map((one) => `\`${one}\``)
      return [`${line(path, row)} ${names.join(', ')}: as in \`${same}\`.`]
    }
    if (first) listed.set(first, path)
    // A mapping that a keyword can turn off.
    const own = row.byDefault === undefined || typeof row.byDefault === 'symbol' ? [] : [line(path, row)]
    return [...own, ...linesOf(row.group, `${path}.`, listed)]
  })
}

function line(path: string, row: PropertyRow): string {
  const { byDefault, scalar } = row
  const isShown = byDefault != null && byDefault !== '' && typeof byDefault !== 'symbol'
  const shown = isShown
    ? ` = \`${typeof byDefault === 'string' ? byDefault : JSON.stringify(byDefault)}\``
    : ''
  const help = propertyHelp(row)
  const values = typeof scalar === 'object' ? scalar.map((one) => `\`${one}\``) : []
  const isToldApart = values.every((one) => help.includes(one) || shown.includes(one))
  return `- \`${path}\`${shown}: ${help}${isToldApart ? '' : ` One of ${values.join(', ')}.`}`
}

/** Properties that a reload refuses to change, at least sometimes. A mapping stands for its properties where all have the same effect. */
export function notLive(
  rows: Rows = { ...ROUTE, ...PROPERTIES },
  base = '',
): [path: string, effect: string][] {
  return Object.entries(rows).flatMap(([name, row]) => {
    const path = base + name
    if (path === 'defaults' || path === 'routes') return []
    const all = leaves(row).map(effectOf)
    if (all.every((effect) => effect === all[0])) return all[0] === 'live' ? [] : [[path, all[0] as string]]
    return notLive(row.group, `${path}.`)
  })
}

function leaves(row: PropertyRow): PropertyRow[] {
  return row.group === undefined || row.whole ? [row] : Object.values(row.group).flatMap(leaves)
}

function effectOf(row: PropertyRow): string {
  const rule = ruleOf(row)
  return typeof rule === 'string' ? rule : rule.effect
}
