import {
  type Document,
  isAlias,
  isMap,
  isScalar,
  isSeq,
  type LineCounter,
  type Node,
  Scalar as YamlScalar,
} from 'yaml'
import { didYouMean } from './did-you-mean.ts'
import { type Environment, hasReference, substitute } from './env.ts'
import type { Findings, Place } from './errors.ts'
import type { Scalar } from './scalar-kinds.ts'
import { SCALARS, type ScalarName } from './scalars.ts'
import { unimplementedProperty, unimplementedValue } from './unimplemented.ts'
import { quote } from './units.ts'

/** The shapes that `schema.ts` makes, and no others. */
export interface Shape {
  readonly type?: string
  readonly $ref?: string
  readonly enum?: readonly (string | number)[]
  readonly anyOf?: readonly Shape[]
  readonly items?: Shape
  readonly uniqueItems?: boolean
  readonly minItems?: number
  readonly properties?: Readonly<Record<string, Shape>>
  readonly patternProperties?: Readonly<Record<string, Shape>>
  /** What the names under `patternProperties` are, in words. */
  readonly $comment?: string
  readonly required?: readonly string[]
  readonly default?: string | number | boolean | readonly string[]
}

export function shapeOf(schema: object): Shape {
  return JSON.parse(JSON.stringify(schema))
}

export interface Source {
  readonly file: string
  readonly document: Document
  readonly lines: LineCounter
  readonly env: Environment
  readonly findings: Findings
  /** Takes down how durations and sizes are written: see {@link Config.spelled}. */
  readonly spelled: Map<string, string>
}

interface Entry {
  readonly name: string
  readonly key: Node
  readonly value: Node
}

/** The value of a node as its shape reads it; `undefined` where that failed, which is then among the findings. */
export function readNode(source: Source, shape: Shape, written: Node, path: string): unknown {
  const node = isAlias(written) ? written.resolve(source.document) : written
  const { mapping, list, scalar } = alternatives(shape)
  source.findings.note(path, placeOf(source, written))
  if (isMap(node) && mapping !== undefined) return readMapping(source, mapping, node, path)
  if (isSeq(node) && list !== undefined) return readList(source, list, node.items as Node[], path)
  if (isScalar(node) && scalar !== undefined) {
    const value = readScalar(source, scalar, node.value, path, mapping)
    // `null`: the word that turns the whole mapping off.
    return mapping === undefined || value === undefined || value === null
      ? value
      : { [firstProperty(mapping)]: value }
  }
  const hint = isScalar(node) && mapping !== undefined ? mappingHint(mapping, node.value, path) : ''
  return source.findings.add(path, `found ${describe(node)}${hint}; allowed: ${allowed(shape)}`)
}

/** A text in place of a mapping, where one of its properties is the obvious one. */
function mappingHint(mapping: Shape, value: unknown, path: string): string {
  const fits = ['url', 'path'].find((name) => {
    const ref =
      mapping.properties?.[name]?.$ref ?? alternatives(mapping.properties?.[name] ?? {}).scalar?.$ref
    return ref !== undefined && scalarOf(ref).parse(String(value)).ok
  })
  const name = path.slice(path.lastIndexOf('.') + 1)
  return fits === undefined ? '' : `; write \`${name}: { ${fits}: … }\``
}

/** A text from outside the file, such as a flag. */
export function readText(findings: Findings, scalar: ScalarName, text: string, path: string): unknown {
  const gap = unimplementedValue(path, text)
  const result =
    gap === null
      ? SCALARS[scalar].parse(text)
      : { ok: false as const, message: `${gap}; allowed: ${SCALARS[scalar].allowed}` }
  if (result.ok) return result.value
  return findings.add(path, result.message)
}

/** The values that a shape's `default`s stand for, in the form that {@link readNode} gives. */
export function defaultsOf(shape: Shape): unknown {
  const { mapping, list, scalar } = alternatives(shape)
  if (shape.default !== undefined) {
    const item = list?.items
    if (Array.isArray(shape.default))
      return shape.default.map((value) => defaultsOf({ ...item, default: value }))
    if (scalar?.$ref === undefined) return shape.default
    const result = scalarOf(scalar.$ref).parse(String(shape.default))
    if (!result.ok) throw new Error(`schema: ${result.message}`)
    return result.value
  }
  if (mapping?.properties === undefined) return undefined
  const entries = Object.entries(mapping.properties).map(([name, property]) => [name, defaultsOf(property)])
  return Object.fromEntries(entries.filter(([, value]) => value !== undefined))
}

export function alternatives(shape: Shape): {
  mapping?: Shape | undefined
  list?: Shape | undefined
  scalar?: Shape | undefined
} {
  const options = (shape.anyOf ?? [shape]).flatMap((option) => option.anyOf ?? [option])
  return {
    mapping: options.find((option) => option.type === 'object'),
    list: options.find((option) => option.type === 'array'),
    scalar: options.find((option) => option.enum !== undefined || isKnownRef(option.$ref)),
  }
}

function isKnownRef(ref: string | undefined): boolean {
  return ref !== undefined && ref !== '#/definitions/environment'
}

export function scalarOf(ref: string): Scalar<unknown> {
  return SCALARS[ref.slice('#/definitions/'.length) as ScalarName]
}

function firstProperty(mapping: Shape): string {
  return Object.keys(mapping.properties ?? {})[0] as string
}

/** `mapping`: what might have stood there as well. */
function readScalar(
  source: Source,
  shape: Shape,
  value: unknown,
  path: string,
  mapping: Shape | undefined,
): unknown {
  const or = mapping === undefined ? '' : `; or ${allowedProperties(mapping)}`
  const { env, findings } = source
  const referring = typeof value === 'string' && hasReference(value)
  const text = referring ? substitute(value, env) : { ok: true as const, value: String(value) }
  if (!text.ok) return findings.add(path, text.message)
  const gap = unimplementedValue(path, text.value)
  if (gap !== null) return findings.add(path, `${gap}; allowed: ${allowed(shape)}${or}`)
  if (shape.enum !== undefined) {
    const found = shape.enum.find(
      (option) => String(option) === text.value && (referring || typeof option === typeof value),
    )
    if (found === undefined)
      findings.add(path, `found ${show(value, text.value, referring)}; allowed: ${allowed(shape)}${or}`)
    return found
  }
  const scalar = scalarOf(shape.$ref as string)
  if (!referring && !isTyped(scalar, value)) {
    return findings.add(path, `found ${show(value, text.value, referring)}; allowed: ${scalar.allowed}${or}`)
  }
  const result = scalar.parse(text.value)
  if (result.ok) {
    if (typeof result.value === 'number') {
      source.spelled.set(spellingKey(path, result.value), text.value)
      // For what follows from it, as `ttlFailed` does from `ttl`.
      if (/[a-z]/i.test(text.value)) source.spelled.set(spellingKey('', result.value), text.value)
    }
    return result.value
  }
  const from = referring ? ` (from ${quote(value)})` : ''
  return findings.add(path, `${result.message.replace('; allowed: ', `${from}; allowed: `)}${or}`)
}

/** A property's last name and its value. */
export function spellingKey(path: string, value: number): string {
  return `${path.slice(path.lastIndexOf('.') + 1)} ${value}`
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

function readMapping(source: Source, shape: Shape, map: Node, path: string): Record<string, unknown> {
  const values: Record<string, unknown> = {}
  const [pattern, patternShape] = Object.entries(shape.patternProperties ?? {})[0] ?? []
  for (const { name, key, value } of entriesOf(source, map, path)) {
    const at = path === '' ? name : `${path}.${name}`
    const known = Object.hasOwn(shape.properties ?? {}, name)
    const property = known
      ? shape.properties?.[name]
      : new RegExp(pattern ?? '^$').test(name)
        ? patternShape
        : undefined
    if (property === undefined) {
      source.findings.add(
        at,
        unimplementedProperty(at) ?? unknownProperty(shape, name, path),
        placeOf(source, key),
      )
      continue
    }
    const read = readNode(source, property, value, at)
    if (read !== undefined) values[name] = read
  }
  for (const name of shape.required ?? []) {
    const at = path === '' ? name : `${path}.${name}`
    if (!source.findings.isWritten(at))
      source.findings.add(at, `found nothing; required: ${allowed(shape.properties?.[name] ?? {})}`)
  }
  return values
}

function unknownProperty(shape: Shape, name: string, path: string): string {
  if (shape.patternProperties !== undefined) return `found \`${name}\`; allowed: ${allowed(shape)}`
  const names = Object.keys(shape.properties ?? {})
  const near = path === '' ? (deeper(shape, name) ?? didYouMean(name, names)) : didYouMean(name, names)
  const hint = near === null ? '' : `, did you mean \`${near}\`?`
  return `found the unknown property \`${name}\`${hint}; allowed: ${allowed(shape)}`
}

/** Where at the top a property belongs that only routes have: `ttl` → `defaults.ttl`. */
function deeper({ properties }: Shape, name: string): string | null {
  if (Object.hasOwn(properties?.['defaults']?.properties ?? {}, name)) return `defaults.${name}`
  return Object.hasOwn(properties?.['routes']?.items?.properties ?? {}, name) ? `routes[].${name}` : null
}

/** Own entries, then those of `<<` that they do not override. */
function entriesOf(source: Source, map: Node, path: string, merging: ReadonlySet<Node> = new Set()): Entry[] {
  if (!isMap(map) || merging.has(map)) return []
  const own = new Map<string, Entry>()
  const merged: Entry[] = []
  for (const pair of map.items) {
    const key = pair.key as Node
    const value = (pair.value ?? nothingAt(key)) as Node
    if (isMerge(key)) {
      const resolve = (node: Node | undefined): Node | undefined =>
        isAlias(node) ? node.resolve(source.document) : node
      const target = resolve(value)
      for (const item of isSeq(target) ? (target.items as Node[]) : [value]) {
        const from = resolve(item)
        if (isMap(from)) merged.push(...entriesOf(source, from, path, new Set([...merging, map])))
        else
          source.findings.add(
            path,
            `found ${describe(from)} under \`<<\`; allowed: an alias of a mapping`,
            placeOf(source, key),
          )
      }
      continue
    }
    const name = isScalar(key) ? String(key.value) : ''
    const first = own.get(name)
    if (first === undefined) own.set(name, { name, key, value })
    else
      source.findings.add(
        path === '' ? name : `${path}.${name}`,
        `found twice; allowed: once (the first is in line ${placeOf(source, first.key).line})`,
        placeOf(source, key),
      )
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

function isMerge(key: Node): boolean {
  return isScalar(key) && typeof key.value === 'symbol'
}

function readList(source: Source, shape: Shape, items: readonly Node[], path: string): unknown[] {
  const values: unknown[] = []
  const seen = new Set<string>()
  for (const [i, item] of items.entries()) {
    const at = `${path}[${i}]`
    const value = readNode(source, shape.items as Shape, item, at)
    const same = JSON.stringify(value)
    if (shape.uniqueItems === true && value !== undefined && seen.has(same))
      source.findings.add(
        at,
        `found ${isScalar(item) ? quote(String(item.value)) : same} twice; allowed: once`,
      )
    seen.add(same)
    if (value !== undefined) values.push(value)
    // What is no mapping keeps its place: the paths of later ones count on it.
    else if (shape.items?.type === 'object') values.push({})
  }
  if (items.length < (shape.minItems ?? 0))
    source.findings.add(path, `found an empty list; allowed: ${allowed(shape)}`)
  return values
}

function allowed(shape: Shape): string {
  const { mapping, list, scalar } = alternatives(shape)
  const texts = [
    scalar?.enum?.join(', ') ?? (scalar?.$ref === undefined ? undefined : scalarOf(scalar.$ref).allowed),
    list === undefined ? undefined : `a list of: ${allowed(list.items as Shape)}`,
    mapping === undefined ? undefined : allowedProperties(mapping),
  ]
  return texts.filter((text) => text !== undefined).join('; or ')
}

function allowedProperties(mapping: Shape): string {
  if (mapping.$comment !== undefined) return mapping.$comment
  return `a mapping of ${Object.keys(mapping.properties ?? {}).join(', ')}`
}

function describe(node: Node | undefined): string {
  if (isMap(node)) return 'a mapping'
  if (isSeq(node)) return 'a list'
  if (isScalar(node)) return show(node.value, String(node.value), false)
  return 'an alias without its anchor'
}

function placeOf({ file, lines }: Source, node: Node): Place {
  const { line, col } = lines.linePos(node.range?.[0] ?? 0)
  return { file, line, column: col }
}
