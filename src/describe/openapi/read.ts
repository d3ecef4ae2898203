import { type Document, isNode, LineCounter, parseDocument } from 'yaml'
import type { ConfigError } from '../../config/errors.ts'
import { readConfigFile } from '../../config/files.ts'
import { formatSize, quote } from '../../config/units.ts'
import { pointerTokens } from '../../core/body/json-pointer.ts'

/** Largest YAML; JSON needs no tree of nodes. Parsing costs about 150 bytes of memory and a third of a microsecond per byte. */
const MAX_YAML = 8 * 1024 ** 2
/** Resolved aliases; more is an alias bomb. */
const MAX_ALIASES = 1000

export type Json = Readonly<Record<string, unknown>>
export type Pointer = readonly string[]

export function isObject(value: unknown): value is Json {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

/** An own member, even if it is called `constructor`. */
export function member(value: unknown, name: string): unknown {
  return isObject(value) && Object.hasOwn(value, name) ? value[name] : undefined
}

/** A member that is an object; empty if it is not. */
export function objectAt(value: unknown, name: string): Json {
  const found = member(value, name)
  return isObject(found) ? found : {}
}

export function arrayOrEmpty(value: unknown): readonly unknown[] {
  return Array.isArray(value) ? (value as readonly unknown[]) : []
}

export function stringOrNull(value: unknown): string | null {
  return typeof value === 'string' ? value : null
}

/** Target of a `$ref`. `external`: in another document, which is not read. `ring`: itself. */
export type Referred =
  | { readonly kind: 'found'; readonly value: unknown; readonly pointer: Pointer }
  | { readonly kind: 'external' | 'missing' | 'ring'; readonly ref: string }

/** Longest chain of references. */
const MAX_HOPS = 20

/** An OpenAPI description: its values and their lines. */
export class Description {
  readonly root: Json
  /** Line of the value at a pointer, or of its nearest existing parent; 0: the file is too large to tell. */
  readonly lineOf: (pointer: Pointer) => number

  constructor(root: Json, lineOf: (pointer: Pointer) => number) {
    this.root = root
    this.lineOf = lineOf
  }

  /** The value at a place; if it is a reference, the value that it points to. */
  follow(value: unknown, pointer: Pointer): Referred {
    let found: { value: unknown; pointer: Pointer } = { value, pointer }
    for (let hop = 0; hop < MAX_HOPS; hop++) {
      const ref = stringOrNull(member(found.value, '$ref'))
      if (ref === null) return { kind: 'found', ...found }
      if (!ref.startsWith('#')) return { kind: 'external', ref }
      const next = pointerOf(ref)
      const target = next === null ? undefined : this.#at(next)
      if (next === null || target === undefined) return { kind: 'missing', ref }
      found = { value: target, pointer: next }
    }
    return { kind: 'ring', ref: stringOrNull(member(value, '$ref')) ?? '' }
  }

  #at(pointer: Pointer): unknown {
    let value: unknown = this.root
    for (const name of pointer)
      value = Array.isArray(value) && /^\d{1,9}$/.test(name) ? value[Number(name)] : member(value, name)
    return value
  }
}

export type ReadDescription =
  | { readonly ok: true; readonly description: Description }
  | { readonly ok: false; readonly errors: readonly ConfigError[] }

/** Reads an OpenAPI 3 description, YAML or JSON. References to other documents are not read. */
export function readDescription(file: string): ReadDescription {
  const failed = (message: string, line = 0, column = 0): ReadDescription => ({
    ok: false,
    errors: [{ file, line, column, path: '', message }],
  })
  const read = readConfigFile(file)
  if (!read.ok) return { ok: false, errors: [read.error] }
  const parsed = parse(read.text)
  if (!parsed.ok) return failed(parsed.message, parsed.line, parsed.column)
  const { value, lineOf } = parsed
  if (!isObject(value)) return failed('found no mapping; allowed: an OpenAPI description', 1, 1)
  const [swagger, openapi] = [scalarAt(value, 'swagger'), scalarAt(value, 'openapi')]
  if (swagger !== null)
    return failed(
      `swagger: found ${quote(swagger)}; allowed: OpenAPI 3; many tools convert Swagger 2.0 into it`,
      lineOf(['swagger']),
      1,
    )
  if (!/^3\.[012](?:\.|$)/.test(openapi ?? ''))
    return failed(
      `openapi: found ${openapi ? quote(openapi) : 'nothing'}; allowed: 3.0, 3.1 or 3.2`,
      lineOf(Object.hasOwn(value, 'openapi') ? ['openapi'] : []),
      1,
    )
  return { ok: true, description: new Description(value, lineOf) }
}

/** Null: absent. `openapi: 3.1` is a number in YAML; values other than text and numbers are empty. */
function scalarAt(root: Json, name: string): string | null {
  const value = member(root, name)
  if (value === undefined) return null
  return typeof value === 'number' ? String(value) : (stringOrNull(value) ?? '')
}

type ParsedDocument =
  | { readonly ok: true; readonly value: unknown; readonly lineOf: (pointer: Pointer) => number }
  | { readonly ok: false; readonly message: string; readonly line?: number; readonly column?: number }

const OPTIONS = { uniqueKeys: false, prettyErrors: false, logLevel: 'error', version: '1.2' } as const

function parse(text: string): ParsedDocument {
  try {
    return { ok: true, value: JSON.parse(text) as unknown, lineOf: linesOfJson(text) }
  } catch {
    // YAML, or an error whose line the YAML parser knows.
  }
  if (text.length > MAX_YAML)
    return {
      ok: false,
      message: `found more than ${formatSize(MAX_YAML)} of YAML; allowed: at most that much, or JSON`,
    }
  const lines = new LineCounter()
  try {
    const document = parseDocument(text, { ...OPTIONS, lineCounter: lines })
    const [broken] = [...document.errors, ...document.warnings]
    if (broken === undefined) {
      const value: unknown = document.toJS({ maxAliasCount: MAX_ALIASES })
      return { ok: true, value, lineOf: linesOf(document, lines) }
    }
    const { line, col } = lines.linePos(broken.pos[0])
    return { ok: false, message: invalidYaml(broken.message), line, column: col }
  } catch (error) {
    // Nested too deeply, or an alias bomb.
    return { ok: false, message: invalidYaml((error as Error).message) }
  }
}

function invalidYaml(why: string): string {
  const found = why.includes('call stack') ? 'it is nested too deeply' : why
  return `found invalid YAML: ${found}; allowed: YAML 1.2 or JSON`
}

/** Only errors and remarks need lines, so the node tree is built on demand. */
function linesOfJson(text: string): (pointer: Pointer) => number {
  let lineOf: ((pointer: Pointer) => number) | null = text.length > MAX_YAML ? () => 0 : null
  return (pointer) => {
    if (lineOf === null) {
      const lines = new LineCounter()
      try {
        lineOf = linesOf(parseDocument(text, { ...OPTIONS, lineCounter: lines }), lines)
      } catch {
        // Nested too deeply for the parser.
        lineOf = () => 0
      }
    }
    return lineOf(pointer)
  }
}

function linesOf(document: Document, lines: LineCounter): (pointer: Pointer) => number {
  return (pointer) => {
    for (let depth = pointer.length; depth > 0; depth--) {
      const key = keyAt(document.getIn(pointer.slice(0, depth - 1), true), pointer[depth - 1] as string)
      if (key !== null) return lines.linePos(key).line
    }
    return 1
  }
}

/** Offset of the member `name` of a node. */
function keyAt(node: unknown, name: string): number | null {
  const items = (node as { readonly items?: readonly unknown[] } | undefined)?.items ?? []
  for (const [n, item] of items.entries()) {
    const { key } = item as { readonly key?: unknown }
    if (isNode(key) && 'value' in key && String(key.value) === name) return key.range?.[0] ?? null
    if (key === undefined && String(n) === name && isNode(item)) return item.range?.[0] ?? null
  }
  return null
}

/** `#/components/parameters/Key` (RFC 6901 §6); null: not a pointer. */
function pointerOf(ref: string): Pointer | null {
  try {
    const text = decodeURIComponent(ref.slice(1))
    return text === '' || text.startsWith('/') ? pointerTokens(text) : null
  } catch {
    return null
  }
}
