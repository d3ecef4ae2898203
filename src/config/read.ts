import {
  type Document,
  isAlias,
  isMap,
  isScalar,
  isSeq,
  LineCounter,
  type Node,
  parseDocument,
  Scalar as YamlScalar,
} from 'yaml'
import type { Findings, SourcePosition } from './errors.ts'
import { FILE, type FileConfig } from './properties.ts'
import { type PropertyRow, required, requiredIn, scalarOf } from './rows.ts'

import { didYouMeanText, type Parsed, quote, type Scalar } from './units.ts'

export type Environment = Readonly<Record<string, string | undefined>>

interface ReadContext {
  readonly file: string
  readonly env: Environment
  readonly findings: Findings
}

interface Source extends ReadContext {
  readonly document: Document
  readonly lines: LineCounter
}

/** Hints for the most common mistakes within { } and [ ], where a brace begins a mapping, by the character before it. */
const HINTS: Readonly<Record<string, string>> = {
  $: ', and quotes around ${NAME} within { } and [ ]',
  '/': ', and :name for a segment of a path',
}

/** Null: invalid YAML or not a mapping, as the findings say. */
export function readYaml(text: string, input: ReadContext): FileConfig | null {
  const { file, findings } = input
  const lines = new LineCounter()
  const options = { merge: true, uniqueKeys: false, prettyErrors: false, version: '1.2' } as const
  const document = parseDocument(text, { lineCounter: lines, ...options })
  // Later mistakes mostly follow from the first.
  const [broken] = [...document.errors, ...document.warnings].sort((a, b) => a.pos[0] - b.pos[0])
  if (broken !== undefined) {
    const { code, message, pos } = broken
    const { line, col } = lines.linePos(pos[0])
    const what =
      code === 'MULTIPLE_DOCS'
        ? 'found a second document; allowed: one'
        : `found invalid YAML: ${message}; allowed: YAML 1.2`
    const hint = HINTS[text[pos[0] - 1] ?? ''] ?? ''
    findings.add('', `${what}${hint}`, { file, line, column: col })
    return null
  }
  const { contents } = document
  if (contents === null || (isScalar(contents) && contents.value === null)) return {}
  const read = readNode({ ...input, document, lines }, FILE, contents, '')
  return isMap(contents) ? (read as FileConfig) : null
}

/** The value of a node, read by its row; `undefined`: invalid, as the findings say. */
function readNode(source: Source, row: PropertyRow, written: Node, path: string): unknown {
  const node = isAlias(written) ? written.resolve(source.document) : written
  const isMappingRow = row.group !== undefined || row.map !== undefined
  source.findings.note(path, placeOf(source, written))
  if (isMap(node) && isMappingRow) return readMapping(source, row, node, path)
  if (isSeq(node) && row.list !== undefined) return readList(source, row.list, node.items as Node[], path)
  if (isScalar(node) && row.scalar !== undefined) {
    const value = readScalar(source, row, node.value, path)
    // A word that turns the whole mapping off reads as null.
    const isWhole = row.group === undefined || row.byDefault !== undefined
    return isWhole || value === undefined ? value : { [Object.keys(row.group)[0] as string]: value }
  }
  const hint = isScalar(node) ? mappingHint(row, node.value, path) : ''
  return source.findings.add(path, `found ${describe(node)}${hint}; allowed: ${allowed(row)}`)
}

/** A hint for a scalar in place of a mapping with one obvious property. */
function mappingHint({ group = {} }: PropertyRow, value: unknown, path: string): string {
  const fits = ['url', 'path'].find(
    (name) => group[name] !== undefined && scalarOf(group[name])?.parse(String(value)).ok,
  )
  return fits === undefined ? '' : `; write \`${path.slice(path.lastIndexOf('.') + 1)}: { ${fits}: … }\``
}

/** YAML 1.1, and so Helm, reads `off` as false and may quote that: if the word is allowed, `false` means it (contract §15). */
function wordFor(row: PropertyRow, text: string): string | undefined {
  if (text !== 'false') return undefined
  const scalar = scalarOf(row)
  const words = scalar === null ? (row.scalar as readonly unknown[]) : [scalar.word]
  return words.find((word) => word === 'off' || word === 'none')
}

function readScalar(source: Source, row: PropertyRow, written: unknown, path: string): unknown {
  const { env, findings } = source
  const referring = typeof written === 'string' && written.includes('${')
  const found = referring ? substitute(written, env) : { ok: true as const, value: String(written) }
  if (!found.ok) return findings.add(path, found.message)
  const word = wordFor(row, found.value)
  const [value, text] = [word ?? written, word ?? found.value]
  const or = row.group === undefined && row.map === undefined ? '' : `; or ${allowedMapping(row)}`
  const refused = `found ${show(value, text, referring)}; allowed: `
  const scalar = scalarOf(row)
  if (scalar === null) {
    const choice = (row.scalar as readonly unknown[]).find(
      (option) => String(option) === text && (referring || typeof option === typeof value),
    )
    return choice ?? findings.add(path, `${refused}${allowedScalar(row)}${or}`)
  }
  if (!referring && !isTyped(scalar, value)) {
    const near = didYouMeanText(scalar.suggest?.(text) ?? null)
    return findings.add(path, `${refused.replace('; ', `${near}; `)}${scalar.allowed}${or}`)
  }
  const result = scalar.parse(text)
  if (!result.ok) {
    const from = referring ? ` (from ${quote(written)})` : ''
    return findings.add(path, `${result.message.replace('; allowed: ', `${from}; allowed: `)}${or}`)
  }
  return result.value
}

function isTyped({ schema }: Scalar<unknown>, value: unknown): boolean {
  return [schema.type]
    .flat()
    .some((type) => (type === 'integer' ? Number.isInteger(value) : typeof value === type))
}

function show(value: unknown, text: string, referring: boolean): string {
  if (value === null) return 'nothing'
  return typeof value === 'string' ? `${quote(text)}${referring ? ` (from ${quote(value)})` : ''}` : text
}

function readMapping(source: Source, row: PropertyRow, mapping: Node, path: string): Record<string, unknown> {
  const { group = {}, map } = row
  const { findings } = source
  const values: Record<string, unknown> = {}
  const within = (name: string): string => (path === '' ? name : `${path}.${name}`)
  for (const { name, key, value } of entriesOf(source, mapping, path)) {
    const property = Object.hasOwn(group, name)
      ? group[name]
      : map !== undefined && new RegExp(map.names).test(name)
        ? map.values
        : undefined
    if (property === undefined) {
      findings.add(within(name), unknownProperty(row, name, path), placeOf(source, key))
      continue
    }
    const read = readNode(source, property, value, within(name))
    if (read !== undefined) values[name] = read
  }
  for (const name of requiredIn(group))
    if (!findings.isWritten(within(name)))
      findings.add(within(name), `found nothing; required: ${allowed(group[name] as PropertyRow)}`)
  return values
}

const WHICH_TLS = ': it is `listen.tls` for a listener, `upstream.tls` for the upstream'

function unknownProperty(row: PropertyRow, name: string, path: string): string {
  if (row.group === undefined) return `found \`${name}\`; allowed: ${allowedMapping(row)}`
  const why = Object.hasOwn(row.refused ?? {}, name) ? row.refused?.[name] : undefined
  if (why !== undefined) return `found \`${name}\`, ${why}; allowed: ${allowedMapping(row)}`
  const near =
    (path === '' ? deeper(row.group, name) : null) ??
    didYouMean(name, Object.keys(row.group)) ??
    inner(row.group, name)
  const hint = path === '' && name === 'tls' ? WHICH_TLS : didYouMeanText(near)
  return `found the unknown property \`${name}\`${hint}; allowed: ${allowedMapping(row)}`
}

/** The right place for a route's property at the top level: `ttl` → `defaults.ttl`. */
function deeper({ defaults, routes }: Readonly<Record<string, PropertyRow>>, name: string): string | null {
  if (routes?.list?.items.group?.[name]?.byDefault === required) return `routes[].${name}`
  if (Object.hasOwn(defaults?.group ?? {}, name)) return `defaults.${name}`
  return Object.hasOwn(routes?.list?.items.group ?? {}, name) ? `routes[].${name}` : null
}

/** The right places for a property of a group inside this one: `caller` → `scope.caller`, `method` → `match.methods`. */
function inner(group: Readonly<Record<string, PropertyRow>>, name: string): string | null {
  const places = (fit: (names: readonly string[]) => string | null | undefined): string[] =>
    Object.entries(group).flatMap(([outer, { group: members = {} }]) => {
      const one = fit(Object.keys(members))
      return one == null ? [] : [`${outer}.${one}`]
    })
  const exact = places((names) => names.find((one) => one === name))
  if (exact.length > 0) return exact.join('` or `')
  const [near, ...others] = places((names) => didYouMean(name, names))
  return near === undefined || others.length > 0 ? null : near
}

interface YamlEntry {
  readonly name: string
  readonly key: Node
  readonly value: Node
}

/** Own entries, then those of `<<` that they do not override. */
function entriesOf(
  source: Source,
  mapping: Node,
  path: string,
  merging: ReadonlySet<Node> = new Set(),
): YamlEntry[] {
  if (!isMap(mapping) || merging.has(mapping)) return []
  const resolve = (node: Node | undefined): Node | undefined =>
    isAlias(node) ? node.resolve(source.document) : node
  const own = new Map<string, YamlEntry>()
  const merged: YamlEntry[] = []
  for (const pair of mapping.items) {
    const key = pair.key as Node
    const value = (pair.value ?? nothingAt(key)) as Node
    const place = placeOf(source, key)
    if (isScalar(key) && typeof key.value === 'symbol') {
      const target = resolve(value)
      for (const item of isSeq(target) ? (target.items as Node[]) : [value]) {
        const from = resolve(item)
        if (isMap(from)) merged.push(...entriesOf(source, from, path, new Set([...merging, mapping])))
        else {
          const message = `found ${describe(from)} under \`<<\`; allowed: an alias of a mapping`
          source.findings.add(path, message, place)
        }
      }
      continue
    }
    const name = isScalar(key) ? String(key.value) : ''
    const first = own.get(name)
    if (first === undefined) own.set(name, { name, key, value })
    else {
      const message = `found twice; allowed: once (the first is on line ${placeOf(source, first.key).line})`
      source.findings.add(path === '' ? name : `${path}.${name}`, message, place)
    }
  }
  for (const entry of merged) if (!own.has(entry.name)) own.set(entry.name, entry)
  return [...own.values()]
}

/** `{ listen }`: a key without even an empty value. */
function nothingAt(key: Node): Node {
  const nothing = new YamlScalar(null)
  nothing.range = key.range ?? null
  return nothing
}

function readList(
  source: Source,
  { items: row, min, unique }: NonNullable<PropertyRow['list']>,
  items: readonly Node[],
  path: string,
): unknown[] {
  const values: unknown[] = []
  const seen = new Set<string>()
  for (const [i, item] of items.entries()) {
    const at = `${path}[${i}]`
    const value = readNode(source, row, item, at)
    const same = JSON.stringify(value)
    if (unique && value !== undefined && seen.has(same)) {
      const text = isScalar(item) ? quote(String(item.value)) : same
      source.findings.add(at, `found ${text} twice; allowed: once`)
    }
    seen.add(same)
    if (value !== undefined) values.push(value)
    // An invalid item keeps its place: the paths of later ones depend on it.
    else if (row.group !== undefined) values.push({})
  }
  if (items.length < min)
    source.findings.add(path, `found an empty list; allowed: a list of: ${allowed(row)}`)
  return values
}

function allowed(row: PropertyRow): string {
  const texts = [
    row.scalar === undefined ? null : allowedScalar(row),
    row.list === undefined ? null : `a list of: ${allowed(row.list.items)}`,
    row.group === undefined && row.map === undefined ? null : allowedMapping(row),
  ]
  return texts.filter((text) => text !== null).join('; or ')
}

function allowedScalar(row: PropertyRow): string {
  return scalarOf(row)?.allowed ?? (row.scalar as readonly unknown[]).join(', ')
}

function allowedMapping({ group = {}, map }: PropertyRow): string {
  return map?.what ?? `a mapping of ${Object.keys(group).join(', ')}`
}

function describe(node: Node | undefined): string {
  if (isMap(node)) return 'a mapping'
  if (isSeq(node)) return 'a list'
  if (isScalar(node)) return show(node.value, String(node.value), false)
  return 'an alias without its anchor'
}

function placeOf({ file, lines }: Source, node: Node): SourcePosition {
  const { line, col } = lines.linePos(node.range?.[0] ?? 0)
  return { file, line, column: col }
}

/** Anything that begins like a substitution: `$${` (an escaped one), `${…}`, or a `${` that never ends. */
const REFERENCE = /\$\$\{|\$\{([^}]*)\}?/g
const INSIDE = /^([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?$/s

/**
 * Puts the environment into a scalar: `${NAME}`, or `${NAME:-default}` where NAME is unset or empty, as in a shell.
 * `$${` stands for `${` itself; every other `$` is data.
 */
export function substitute(text: string, env: Environment): Parsed<string> {
  let message: string | null = null
  const value = text.replaceAll(REFERENCE, (whole: string, inside: string | undefined) => {
    if (inside === undefined) return '${'
    const [, name, fallback] = INSIDE.exec(inside) ?? []
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

/** The known name that a mistyped one most likely means, or `null`. */
export function didYouMean(name: string, known: readonly string[]): string | null {
  const distanceTo = (candidate: string): number => distance(name.toLowerCase(), candidate.toLowerCase())
  const [best] = known.toSorted((a, b) => distanceTo(a) - distanceTo(b))
  return best !== undefined && distanceTo(best) <= Math.max(1, Math.floor(name.length / 3)) ? best : null
}

/** Insertions, deletions, replacements and swaps of neighbours (optimal string alignment). */
function distance(a: string, b: string): number {
  let before: readonly number[] = []
  let row = Array.from({ length: b.length + 1 }, (_, j) => j)
  for (let i = 1; i <= a.length; i++) {
    const next = [i]
    for (let j = 1; j <= b.length; j++) {
      const replaced = (row[j - 1] as number) + (a[i - 1] === b[j - 1] ? 0 : 1)
      const isSwap = a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1]
      const swapped = isSwap ? (before[j - 2] as number) + 1 : replaced
      next.push(Math.min(replaced, swapped, (row[j] as number) + 1, (next[j - 1] as number) + 1))
    }
    before = row
    row = next
  }
  return row[b.length] as number
}
