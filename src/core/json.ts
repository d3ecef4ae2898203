/** A JSON value whose leaves are already in RFC 8785 form. Members are sorted by UTF-16 code units. */
export type Node =
  | string
  | { readonly kind: 'array'; readonly items: readonly Node[] }
  | { readonly kind: 'object'; readonly members: ReadonlyMap<string, Node> }

/** Deeper than any honest request, shallow enough for the stack (contract §5). */
export const MAX_DEPTH = 100

/** Thrown inside this module only: the text has no canonical form that keeps all its information. */
class Lossy extends Error {}

/** What values are made into, from the leaves up. Leaves and names come as canonical text. */
interface Builder<N> {
  leaf(text: string): N
  array(items: N[]): N
  /** `names` as they read, in the order of the text. `plain`: none of them needs an escape. */
  object(names: string[], values: N[], plain: boolean): N
}

/**
 * Parses `text` without losing information. `null`: invalid JSON, a duplicate member name, a lone surrogate, a number
 * whose decimal value is not what ECMAScript prints for the double, or nesting beyond {@link MAX_DEPTH} (contract §5).
 */
export function parseLossless(text: string): Node | null {
  return parse(text, NODES)
}

/** The RFC 8785 text of `text`; null where {@link parseLossless} gives null. */
export function canonicalText(text: string): string | null {
  return parse(text, TEXTS)
}

function parse<N>(text: string, builder: Builder<N>): N | null {
  try {
    return new Parser(text, builder).document()
  } catch (error) {
    if (error instanceof Lossy) return null
    throw error
  }
}

const NODES: Builder<Node> = {
  leaf: (text) => text,
  array: (items) => ({ kind: 'array', items }),
  object(names, values) {
    const members = new Map<string, Node>()
    for (const [n, name] of names.entries()) members.set(name, values[n] as Node)
    if (members.size < names.length) throw new Lossy()
    return { kind: 'object', members }
  },
}

const TEXTS: Builder<string> = {
  leaf: (text) => text,
  array: (items) => `[${items.join(',')}]`,
  object(names, values, plain) {
    const order = names.length <= FEW ? inserted(names) : sorted(names)
    let text = ''
    for (const n of order) {
      const name = names[n] as string
      text += `${text === '' ? '{' : ','}${plain ? `"${name}"` : quoted(name)}:${values[n]}`
    }
    return text === '' ? '{}' : `${text}}`
  },
}

/** Up to here insertion is cheaper than a sort that calls back. */
const FEW = 24

/** The order of the names by UTF-16 code units. */
function inserted(names: readonly string[]): number[] {
  const order: number[] = []
  for (let n = 0; n < names.length; n++) {
    const name = names[n] as string
    let at = n
    for (; at > 0; at--) {
      const before = names[order[at - 1] as number] as string
      if (before === name) throw new Lossy()
      if (before < name) break
      order[at] = order[at - 1] as number
    }
    order[at] = n
  }
  return order
}

function sorted(names: readonly string[]): number[] {
  if (new Set(names).size < names.length) throw new Lossy()
  return names.map((_, n) => n).sort((a, b) => ((names[a] as string) < (names[b] as string) ? -1 : 1))
}

/** RFC 8785 text. */
export function canonical(node: Node): string {
  if (typeof node === 'string') return node
  return node.kind === 'array'
    ? TEXTS.array(node.items.map(canonical))
    : TEXTS.object([...node.members.keys()], [...node.members.values()].map(canonical), false)
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
/** The same for text with its quotes. */
const SPECIAL_ANYWHERE = /[^ -[\]-\ud7ff\ue000-\uffff]/

const QUOTE = 0x22
const COMMA = 0x2c
const ZERO = 0x30
const COLON = 0x3a
const OPEN_ARRAY = 0x5b
const CLOSE_ARRAY = 0x5d
const OPEN_OBJECT = 0x7b
const CLOSE_OBJECT = 0x7d

class Parser<N> {
  readonly #text: string
  readonly #builder: Builder<N>
  /** No string of the text is written otherwise than it reads: one look at the whole instead of one at each. */
  readonly #isPlain: boolean
  #at = 0
  constructor(text: string, builder: Builder<N>) {
    this.#text = text
    this.#builder = builder
    this.#isPlain = !SPECIAL_ANYWHERE.test(text)
  }

  document(): N {
    const node = this.#value(0)
    this.#space()
    if (this.#at !== this.#text.length) throw new Lossy()
    return node
  }

  #value(depth: number): N {
    this.#space()
    switch (this.#text.charCodeAt(this.#at)) {
      case OPEN_OBJECT:
        return this.#object(depth)
      case OPEN_ARRAY:
        return this.#array(depth)
      case QUOTE: {
        const value = this.#string()
        return this.#builder.leaf(this.#isPlain ? `"${value}"` : quoted(value))
      }
      case 0x74:
        return this.#word('true')
      case 0x66:
        return this.#word('false')
      case 0x6e:
        return this.#word('null')
      default:
        return this.#builder.leaf(this.#number())
    }
  }

  #object(depth: number): N {
    if (depth === MAX_DEPTH) throw new Lossy()
    const names: string[] = []
    const values: N[] = []
    this.#at++
    if (this.#take(CLOSE_OBJECT)) return this.#builder.object(names, values, this.#isPlain)
    do {
      this.#space()
      names.push(this.#string())
      if (!this.#take(COLON)) throw new Lossy()
      values.push(this.#value(depth + 1))
    } while (this.#take(COMMA))
    if (!this.#take(CLOSE_OBJECT)) throw new Lossy()
    return this.#builder.object(names, values, this.#isPlain)
  }

  #array(depth: number): N {
    if (depth === MAX_DEPTH) throw new Lossy()
    const items: N[] = []
    this.#at++
    if (this.#take(CLOSE_ARRAY)) return this.#builder.array(items)
    do items.push(this.#value(depth + 1))
    while (this.#take(COMMA))
    if (!this.#take(CLOSE_ARRAY)) throw new Lossy()
    return this.#builder.array(items)
  }

  #string(): string {
    const start = this.#at
    if (this.#text.charCodeAt(start) !== QUOTE) throw new Lossy()
    let end = this.#text.indexOf('"', start + 1)
    if (end > 0) {
      const plain = this.#text.slice(start + 1, end)
      if (this.#isPlain || !SPECIAL.test(plain)) {
        this.#at = end + 1
        return plain
      }
    }
    while (end > 0 && this.#escaped(end, start)) end = this.#text.indexOf('"', end + 1)
    if (end < 0) throw new Lossy()
    this.#at = end + 1
    const value = parseString(this.#text.slice(start, end + 1))
    if (value === null || !value.isWellFormed()) throw new Lossy()
    return value
  }

  #number(): string {
    const start = this.#at
    // Most are short integers.
    let end = start
    while (isDigit(this.#text.charCodeAt(end))) end++
    const next = this.#text.charCodeAt(end) | 0x20
    const isInteger = end > start && next !== 0x2e && next !== 0x65
    if (
      isInteger &&
      end - start <= MOST_DIGITS &&
      (end - start === 1 || this.#text.charCodeAt(start) !== ZERO)
    ) {
      this.#at = end
      return this.#text.slice(start, end)
    }
    NUMBER.lastIndex = start
    if (!NUMBER.test(this.#text)) throw new Lossy()
    const token = this.#text.slice(start, NUMBER.lastIndex)
    this.#at = NUMBER.lastIndex
    const printed = String(Number(token))
    if (printed !== token && decimal(printed) !== decimal(token)) throw new Lossy()
    return printed
  }

  #word(word: string): N {
    if (!this.#text.startsWith(word, this.#at)) throw new Lossy()
    this.#at += word.length
    return this.#builder.leaf(word)
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

/** As `JSON.stringify` writes it. */
function quoted(text: string): string {
  return SPECIAL.test(text) ? JSON.stringify(text) : `"${text}"`
}

function isDigit(code: number): boolean {
  return code >= ZERO && code <= ZERO + 9
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
