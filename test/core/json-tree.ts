/*
 * JSON as the proxy read it before it worked on bytes: simple and slow. What it makes of a text must never change, since stored records
 * depend on it.
 */
import { canonicalJson } from '../../src/core/body/json.ts'

/** A JSON value whose leaves are already in RFC 8785 form. Members are sorted by UTF-16 code units. */
export type Node =
  | string
  | { readonly kind: 'array'; readonly items: readonly Node[] }
  | { readonly kind: 'object'; readonly members: ReadonlyMap<string, Node> }

/** Deeper than any honest request, shallow enough for the stack (contract §5). */
const MAX_DEPTH = 100

/** Thrown inside this module only: the text has no canonical form that keeps all its information. */
class Lossy extends Error {}

/**
 * Parses `text` without losing information. `null`: invalid JSON, a duplicate member name, a lone surrogate, a number
 * whose decimal value is not what ECMAScript prints for the double, or nesting beyond {@link MAX_DEPTH} (contract §5).
 */
export function parseLossless(text: string): Node | null {
  const parser = new Parser(text)
  try {
    const node = parser.value(parser.next(), 0)
    return parser.next() === '' ? node : null
  } catch (error) {
    if (error instanceof Lossy) return null
    throw error
  }
}

/** RFC 8785 text. */
export function canonical(node: Node): string {
  if (typeof node === 'string') return node
  if (node.kind === 'array') return `[${node.items.map(canonical).join(',')}]`
  const names = [...node.members.keys()].sort((a, b) => (a < b ? -1 : 1))
  return `{${names.map((name) => `${JSON.stringify(name)}:${canonical(node.members.get(name) as Node)}`).join(',')}}`
}

export function at(node: Node, tokens: readonly string[]): Node | null {
  let current: Node | null = node
  for (const token of tokens) {
    if (current === null || typeof current === 'string') return null
    current = child(current, token) ?? null
  }
  return current
}

/** `node` without what the tokens point at. An array item is blanked, so that its neighbours keep their places. */
export function without(node: Node, tokens: readonly string[]): Node {
  const [token, ...rest] = tokens
  if (token === undefined || typeof node === 'string') return node
  const found = child(node, token)
  if (found === undefined) return node
  if (node.kind === 'array')
    return {
      kind: 'array',
      items: node.items.with(Number(token), rest.length === 0 ? '' : without(found, rest)),
    }
  const members = new Map(node.members)
  if (rest.length === 0) members.delete(token)
  else members.set(token, without(found, rest))
  return { kind: 'object', members }
}

function child(node: Exclude<Node, string>, token: string): Node | undefined {
  if (node.kind === 'object') return node.members.get(token)
  return /^(?:0|[1-9]\d*)$/.test(token) ? node.items[Number(token)] : undefined
}

/** White space, then a sign, a string, a number or a word. */
const TOKEN =
  /[ \n\r\t]*([{}[\]:,]|"[^"\\]*(?:\\[^][^"\\]*)*"|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|$)/y

class Parser {
  readonly #text: string
  #at = 0
  constructor(text: string) {
    this.#text = text
  }

  /** The next token; empty at the end. */
  next(): string {
    TOKEN.lastIndex = this.#at
    const token = TOKEN.exec(this.#text)?.[1]
    if (token === undefined) throw new Lossy()
    this.#at = TOKEN.lastIndex
    return token
  }

  value(token: string, depth: number): Node {
    if (token === '{' || token === '[') {
      if (depth === MAX_DEPTH) throw new Lossy()
      return token === '{' ? this.#object(depth + 1) : this.#array(depth + 1)
    }
    if (token.startsWith('"')) return JSON.stringify(string(token))
    if (/^[tfn]/.test(token)) return token
    if (/^[-\d]/.test(token)) return number(token)
    throw new Lossy()
  }

  #object(depth: number): Node {
    const members = new Map<string, Node>()
    let token = this.next()
    if (token === '}') return { kind: 'object', members }
    for (;;) {
      const name = string(token)
      if (members.has(name) || this.next() !== ':') throw new Lossy()
      members.set(name, this.value(this.next(), depth))
      const sign = this.next()
      if (sign === '}') return { kind: 'object', members }
      if (sign !== ',') throw new Lossy()
      token = this.next()
    }
  }

  #array(depth: number): Node {
    const items: Node[] = []
    let token = this.next()
    if (token === ']') return { kind: 'array', items }
    for (;;) {
      items.push(this.value(token, depth))
      const sign = this.next()
      if (sign === ']') return { kind: 'array', items }
      if (sign !== ',') throw new Lossy()
      token = this.next()
    }
  }
}

function string(token: string): string {
  try {
    const value = JSON.parse(token) as unknown
    if (typeof value === 'string' && value.isWellFormed()) return value
  } catch {}
  throw new Lossy()
}

function number(token: string): string {
  const printed = String(Number(token))
  if (printed !== token && decimal(printed) !== decimal(token)) throw new Lossy()
  return printed
}

/** A decimal literal's value in one spelling: sign, digits without outer zeros, exponent. `Infinity` has none. */
function decimal(literal: string): string {
  const parts = /^(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?$/.exec(literal)
  if (parts === null) return literal
  const [, sign, whole = '', fraction = '', exponent = '0'] = parts
  const digits = `${whole}${fraction}`.replace(/^0+/, '')
  // A loop: /0+$/ would take quadratic time over zeros that something follows.
  let end = digits.length
  while (digits[end - 1] === '0') end--
  if (end === 0) return '0'
  return `${sign}${digits.slice(0, end)}e${Number(exponent) - fraction.length + digits.length - end}`
}

const UTF8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true })

/** As UTF-8, byte order mark included; null: it is not UTF-8. */
export function decodeUtf8(bytes: Buffer): string | null {
  try {
    return UTF8.decode(bytes)
  } catch {
    return null
  }
}

/** What this reader makes of bytes or of a text, if it is one in UTF-8. */
function treeOf(json: Buffer | string): Node | null {
  const text = typeof json === 'string' ? json : decodeUtf8(json)
  return text?.isWellFormed() ? parseLossless(text) : null
}

/**
 * The canonical text, or null if none keeps all the information.
 * @throws if this reader and the product's disagree.
 */
export function form(json: Buffer | string): string | null {
  const bytes = Buffer.from(json as string)
  const tree = treeOf(json)
  const text = tree === null ? null : canonical(tree)
  const found = canonicalJson(bytes)?.toString() ?? null
  if (found !== text) throw new Error(`${bytes.toString()}: ${found} instead of ${text}`)
  return text
}
