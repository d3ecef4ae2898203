/*
 * JSON as the proxy read it before it worked on bytes: simple and slow. What it makes of a text must never change, since stored records
 * depend on it.
 */

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
  try {
    return new Parser(text).document()
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
  return `{${names.map((name) => `${quoted(name)}:${canonical(node.members.get(name) as Node)}`).join(',')}}`
}

export function at(node: Node, tokens: readonly string[]): Node | null {
  let current: Node | null = node
  for (const token of tokens) {
    const parent: Node | null = current
    if (parent === null || typeof parent === 'string') return null
    current =
      parent.kind === 'array' ? (arrayItem(parent.items, token) ?? null) : (parent.members.get(token) ?? null)
  }
  return current
}

/** `node` without what the tokens point at. An array item is blanked, so that its neighbours keep their places. */
export function without(node: Node, tokens: readonly string[]): Node {
  const [token, ...rest] = tokens
  if (token === undefined || typeof node === 'string') return node
  if (node.kind === 'array') {
    const child = arrayItem(node.items, token)
    if (child === undefined) return node
    const items = [...node.items]
    items[Number(token)] = rest.length === 0 ? '' : without(child, rest)
    return { kind: 'array', items }
  }
  const child = node.members.get(token)
  if (child === undefined) return node
  const members = new Map(node.members)
  if (rest.length === 0) members.delete(token)
  else members.set(token, without(child, rest))
  return { kind: 'object', members }
}

function arrayItem(items: readonly Node[], token: string): Node | undefined {
  return /^(?:0|[1-9]\d*)$/.test(token) ? items[Number(token)] : undefined
}

const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y

const QUOTE = 0x22
const COMMA = 0x2c
const COLON = 0x3a
const OPEN_ARRAY = 0x5b
const CLOSE_ARRAY = 0x5d
const OPEN_OBJECT = 0x7b
const CLOSE_OBJECT = 0x7d

class Parser {
  readonly #text: string
  #at = 0
  constructor(text: string) {
    this.#text = text
  }

  document(): Node {
    const node = this.#value(0)
    this.#space()
    if (this.#at !== this.#text.length) throw new Lossy()
    return node
  }

  #value(depth: number): Node {
    this.#space()
    switch (this.#text.charCodeAt(this.#at)) {
      case OPEN_OBJECT:
        return this.#object(depth)
      case OPEN_ARRAY:
        return this.#array(depth)
      case QUOTE: {
        const value = this.#string()
        return quoted(value)
      }
      case 0x74:
        return this.#word('true')
      case 0x66:
        return this.#word('false')
      case 0x6e:
        return this.#word('null')
      default:
        return this.#number()
    }
  }

  #object(depth: number): Node {
    if (depth === MAX_DEPTH) throw new Lossy()
    const members = new Map<string, Node>()
    this.#at++
    if (this.#take(CLOSE_OBJECT)) return { kind: 'object', members }
    do {
      this.#space()
      const name = this.#string()
      if (members.has(name) || !this.#take(COLON)) throw new Lossy()
      members.set(name, this.#value(depth + 1))
    } while (this.#take(COMMA))
    if (!this.#take(CLOSE_OBJECT)) throw new Lossy()
    return { kind: 'object', members }
  }

  #array(depth: number): Node {
    if (depth === MAX_DEPTH) throw new Lossy()
    const items: Node[] = []
    this.#at++
    if (this.#take(CLOSE_ARRAY)) return { kind: 'array', items }
    do items.push(this.#value(depth + 1))
    while (this.#take(COMMA))
    if (!this.#take(CLOSE_ARRAY)) throw new Lossy()
    return { kind: 'array', items }
  }

  #string(): string {
    const start = this.#at
    if (this.#text.charCodeAt(start) !== QUOTE) throw new Lossy()
    let end = this.#text.indexOf('"', start + 1)
    while (end > 0 && this.#escaped(end, start)) end = this.#text.indexOf('"', end + 1)
    if (end < 0) throw new Lossy()
    this.#at = end + 1
    const value = parseString(this.#text.slice(start, end + 1))
    if (value === null || !value.isWellFormed()) throw new Lossy()
    return value
  }

  #number(): string {
    const start = this.#at
    NUMBER.lastIndex = start
    if (!NUMBER.test(this.#text)) throw new Lossy()
    const token = this.#text.slice(start, NUMBER.lastIndex)
    this.#at = NUMBER.lastIndex
    const printed = String(Number(token))
    if (printed !== token && decimal(printed) !== decimal(token)) throw new Lossy()
    return printed
  }

  #word(word: string): Node {
    if (!this.#text.startsWith(word, this.#at)) throw new Lossy()
    this.#at += word.length
    return word
  }

  #take(code: number): boolean {
    this.#space()
    if (this.#text.charCodeAt(this.#at) !== code) return false
    this.#at++
    return true
  }

  #space(): void {
    for (;;) {
      const code = this.#text.charCodeAt(this.#at)
      if (code !== 0x20 && code !== 0x0a && code !== 0x0d && code !== 0x09) return
      this.#at++
    }
  }

  /** An odd number of backslashes stands before `quote`. */
  #escaped(quote: number, start: number): boolean {
    let at = quote - 1
    while (at > start && this.#text[at] === '\\') at--
    return (quote - 1 - at) % 2 === 1
  }
}

function quoted(text: string): string {
  return JSON.stringify(text)
}

function parseString(literal: string): string | null {
  try {
    return JSON.parse(literal) as string
  } catch {
    return null
  }
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
