/** A JSON value whose leaves are already in RFC 8785 form. Members are sorted by UTF-16 code units. */
export type Node =
  | string
  | { readonly kind: 'array'; readonly items: readonly Node[] }
  | { readonly kind: 'object'; readonly members: ReadonlyMap<string, Node> }

/** Deeper than any honest request, shallow enough for the stack (contract §5). */
export const MAX_DEPTH = 100

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
  let text = ''
  if (node.kind === 'array') {
    for (const item of node.items) text += `${text === '' ? '' : ','}${canonical(item)}`
    return `[${text}]`
  }
  for (const name of [...node.members.keys()].sort())
    text += `${text === '' ? '' : ','}${quoted(name)}:${canonical(node.members.get(name) as Node)}`
  return `{${text}}`
}

/** RFC 6901 pointer → reference tokens. */
export function pointerTokens(pointer: string): string[] {
  return pointer
    .split('/')
    .slice(1)
    .map((token) => token.replaceAll('~1', '/').replaceAll('~0', '~'))
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
/** Integers whose every digit a double keeps: printed as they are written. */
const MOST_DIGITS = 15
/** What JSON writes otherwise than it is: escapes and what must be one, and halves of pairs, which may be lone. */
const SPECIAL = /[^ !#-[\]-\ud7ff\ue000-\uffff]/

const QUOTE = 0x22
const ZERO = 0x30

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
    switch (this.#text.charAt(this.#at)) {
      case '{':
        return this.#object(depth)
      case '[':
        return this.#array(depth)
      case '"':
        return quoted(this.#string())
      case 't':
        return this.#word('true')
      case 'f':
        return this.#word('false')
      case 'n':
        return this.#word('null')
      default:
        return this.#number()
    }
  }

  #object(depth: number): Node {
    if (depth === MAX_DEPTH) throw new Lossy()
    const members = new Map<string, Node>()
    this.#at++
    if (this.#take('}')) return { kind: 'object', members }
    do {
      this.#space()
      const name = this.#string()
      if (members.has(name)) throw new Lossy()
      if (!this.#take(':')) throw new Lossy()
      members.set(name, this.#value(depth + 1))
    } while (this.#take(','))
    if (!this.#take('}')) throw new Lossy()
    return { kind: 'object', members }
  }

  #array(depth: number): Node {
    if (depth === MAX_DEPTH) throw new Lossy()
    const items: Node[] = []
    this.#at++
    if (this.#take(']')) return { kind: 'array', items }
    do items.push(this.#value(depth + 1))
    while (this.#take(','))
    if (!this.#take(']')) throw new Lossy()
    return { kind: 'array', items }
  }

  #string(): string {
    const start = this.#at
    if (this.#text.charCodeAt(start) !== QUOTE) throw new Lossy()
    let end = this.#text.indexOf('"', start + 1)
    const plain = this.#text.slice(start + 1, end)
    if (end > 0 && !SPECIAL.test(plain)) {
      this.#at = end + 1
      return plain
    }
    while (end > 0 && this.#escaped(end, start)) end = this.#text.indexOf('"', end + 1)
    if (end < 0) throw new Lossy()
    this.#at = end + 1
    const value = parseString(this.#text.slice(start, end + 1))
    if (value === null || !value.isWellFormed()) throw new Lossy()
    return value
  }

  #number(): string {
    NUMBER.lastIndex = this.#at
    if (!NUMBER.test(this.#text)) throw new Lossy()
    const token = this.#text.slice(this.#at, NUMBER.lastIndex)
    this.#at = NUMBER.lastIndex
    if (token.length <= MOST_DIGITS && isPlainInteger(token)) return token
    const printed = String(Number(token))
    if (printed !== token && decimal(printed) !== decimal(token)) throw new Lossy()
    return printed
  }

  #word(word: string): string {
    if (!this.#text.startsWith(word, this.#at)) throw new Lossy()
    this.#at += word.length
    return word
  }

  #take(char: string): boolean {
    this.#space()
    if (this.#text[this.#at] !== char) return false
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

/** As `JSON.stringify` writes it. */
function quoted(text: string): string {
  return SPECIAL.test(text) ? JSON.stringify(text) : `"${text}"`
}

/** Digits alone. A minus could be that of zero, which ECMAScript prints without. */
function isPlainInteger(token: string): boolean {
  for (let i = 0; i < token.length; i++) {
    const digit = token.charCodeAt(i) - ZERO
    if (digit < 0 || digit > 9) return false
  }
  return true
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
