/** An ECMAScript regular expression over printable ASCII, matched in linear time (ADR 0035). */
export interface KeyPattern {
  /** Anchored at both ends. */
  readonly source: string
  /** Whether the whole of `key` matches. */
  test(key: string): boolean
}

export type PatternReading =
  | { readonly kind: 'pattern'; readonly pattern: KeyPattern }
  /** `why`: invalid, unsupported or too large. */
  | { readonly kind: 'refused'; readonly why: string }

export function readPattern(text: string): PatternReading {
  try {
    // V8 checks the syntax; the parser below relies on it.
    const { source } = new RegExp(text, 'u')
    return { kind: 'pattern', pattern: new LinearPattern(source, new Parser(source).whole()) }
  } catch (error) {
    if (error instanceof Unsupported) return { kind: 'refused', why: error.message }
    if (error instanceof SyntaxError) return { kind: 'refused', why: error.message.replace(/^.*: /s, '') }
    throw error
  }
}

/** Never leaves this module. */
class Unsupported extends Error {}

type Tree =
  | { readonly kind: 'set'; readonly set: Uint8Array }
  | { readonly kind: 'start' }
  | { readonly kind: 'end' }
  | { readonly kind: 'sequence'; readonly parts: readonly Tree[] }
  | { readonly kind: 'choice'; readonly options: readonly Tree[] }
  | { readonly kind: 'repeat'; readonly of: Tree; readonly least: number; readonly most: number }

/** `(`, with the mark of a non-capturing or named group. */
const GROUP = /\((?:\?(?::|<(?![=!])[^>]*>))?/y
const ESCAPE = /\\(?:u\{[^}]*\}|u[dD][89abAB]..\\u[dD][c-fC-F]..|u.{4}|x..|c.|[pP]\{[^}]*\}|.)/sy
const CLASS = /\[(?:\\.|[^\\\]])*\]/sy
const QUANTIFIER = /(?:([*+?])|\{(\d+)(,?)(\d*)\})\??/y

/** Each level takes stack. */
const MAX_DEPTH = 100

class Parser {
  readonly #text: string
  #at = 0
  #depth = 0

  /** `text` must be valid under the flag `u`. */
  constructor(text: string) {
    this.#text = text
  }

  whole(): Tree {
    return this.#choice()
  }

  #choice(): Tree {
    const options = [this.#sequence()]
    while (this.#text[this.#at] === '|') {
      this.#at++
      options.push(this.#sequence())
    }
    return { kind: 'choice', options }
  }

  #sequence(): Tree {
    const parts: Tree[] = []
    while (this.#at < this.#text.length && !'|)'.includes(this.#text[this.#at] as string))
      parts.push(this.#quantified(this.#term()))
    return { kind: 'sequence', parts }
  }

  #quantified(of: Tree): Tree {
    const found = this.#take(QUANTIFIER)
    if (found === null) return of
    const [, sign, least = '', comma, most = ''] = found
    if (sign === '*') return { kind: 'repeat', of, least: 0, most: Number.POSITIVE_INFINITY }
    if (sign === '+') return { kind: 'repeat', of, least: 1, most: Number.POSITIVE_INFINITY }
    if (sign === '?') return { kind: 'repeat', of, least: 0, most: 1 }
    const upTo = comma === '' ? least : most
    return {
      kind: 'repeat',
      of,
      least: Number(least),
      most: upTo === '' ? Number.POSITIVE_INFINITY : Number(upTo),
    }
  }

  #term(): Tree {
    const start = this.#at
    switch (this.#text[start] as string) {
      case '^':
        this.#at++
        return { kind: 'start' }
      case '$':
        this.#at++
        return { kind: 'end' }
      case '(': {
        this.#take(GROUP)
        if (this.#text[this.#at] === '?') throw new Unsupported(groupName(this.#text.slice(start)))
        if (++this.#depth > MAX_DEPTH) throw new Unsupported(`groups more than ${MAX_DEPTH} deep`)
        const inner = this.#choice()
        this.#depth--
        this.#at++
        return inner
      }
      case '\\': {
        const [escape] = this.#take(ESCAPE) as RegExpExecArray
        if (/^\\[1-9k]/.test(escape)) throw new Unsupported(`the backreference ${escape}`)
        if (/^\\[bB]/.test(escape)) throw new Unsupported(`the word boundary ${escape}`)
        return setOf(escape)
      }
      case '[':
        return setOf((this.#take(CLASS) as RegExpExecArray)[0])
      default: {
        const char = String.fromCodePoint(this.#text.codePointAt(start) as number)
        this.#at += char.length
        return setOf(char)
      }
    }
  }

  #take(what: RegExp): RegExpExecArray | null {
    what.lastIndex = this.#at
    const found = what.exec(this.#text)
    if (found !== null) this.#at = what.lastIndex
    return found
  }
}

function groupName(text: string): string {
  if (/^\(\?<?[=!]/.test(text))
    return `the lookaround ${text.startsWith('(?<') ? text.slice(0, 4) : text.slice(0, 3)}`
  return `the modifier ${text.slice(0, text.indexOf(':') + 1)}`
}

const FIRST = 0x20
const LAST = 0x7e

/** The characters that a literal, an escape or a class matches, according to V8. */
function setOf(atom: string): Tree {
  const single = new RegExp(`^(?:${atom})$`, 'u')
  const set = new Uint8Array(LAST + 1)
  for (let code = FIRST; code <= LAST; code++) if (single.test(String.fromCharCode(code))) set[code] = 1
  return { kind: 'set', set }
}

type NfaState =
  | { readonly kind: 'set'; readonly set: Uint8Array; readonly next: number }
  | { readonly kind: 'start' | 'end'; readonly next: number }
  | { readonly kind: 'split'; readonly to: number[] }
  | { readonly kind: 'accept' }

/** Each character of a key may visit each state: 255 characters and 4096 states take some milliseconds. */
const MAX_STATES = 4096

const ACCEPT = 0

/** A nondeterministic automaton (Thompson 1968), run in all its states at once. */
class LinearPattern implements KeyPattern {
  readonly source: string
  readonly #states: NfaState[] = [{ kind: 'accept' }]
  readonly #first: number
  /** The step at which each state was last entered. */
  readonly #entered: Uint32Array
  #built = 0

  constructor(source: string, tree: Tree) {
    this.source = `^(?:${source})$`
    this.#first = this.#build(tree, ACCEPT)
    this.#entered = new Uint32Array(this.#states.length)
  }

  test(key: string): boolean {
    this.#entered.fill(0)
    let now = this.#enter([this.#first], 0, key.length)
    for (let at = 0; at < key.length && now.length > 0; at++) {
      const code = key.charCodeAt(at)
      const next: number[] = []
      for (const n of now) {
        const state = this.#states[n] as NfaState
        if (state.kind === 'set' && state.set[code] === 1) next.push(state.next)
      }
      now = this.#enter(next, at + 1, key.length)
    }
    return now.includes(ACCEPT)
  }

  /** The consuming and accepting states that are reachable from `open`, before the character at `at` of `length`. */
  #enter(open: number[], at: number, length: number): number[] {
    const entered: number[] = []
    const step = at + 1
    for (let n = open.pop(); n !== undefined; n = open.pop()) {
      if (this.#entered[n] === step) continue
      this.#entered[n] = step
      const state = this.#states[n] as NfaState
      switch (state.kind) {
        case 'set':
        case 'accept':
          entered.push(n)
          break
        case 'start':
          if (at === 0) open.push(state.next)
          break
        case 'end':
          if (at === length) open.push(state.next)
          break
        case 'split':
          open.push(...state.to)
      }
    }
    return entered
  }

  /** The first state of `tree`, which leads to `next`. */
  #build(tree: Tree, next: number): number {
    // Counts calls, not states: an empty group repeated a billion times has none.
    if (++this.#built > MAX_STATES) throw new Unsupported('a pattern of that size')
    switch (tree.kind) {
      case 'set':
        return this.#add({ kind: 'set', set: tree.set, next })
      case 'start':
      case 'end':
        return this.#add({ kind: tree.kind, next })
      case 'sequence':
        return tree.parts.reduceRight((after, part) => this.#build(part, after), next)
      case 'choice': {
        const [only, ...more] = tree.options.map((option) => this.#build(option, next))
        return more.length === 0
          ? (only as number)
          : this.#add({ kind: 'split', to: [only as number, ...more] })
      }
      case 'repeat':
        return this.#repeat(tree.of, tree.least, tree.most, next)
    }
  }

  #repeat(of: Tree, least: number, most: number, next: number): number {
    let first = next
    if (most === Number.POSITIVE_INFINITY) {
      const to = [next]
      first = this.#add({ kind: 'split', to })
      to.push(this.#build(of, first))
    } else
      for (let n = least; n < most; n++)
        first = this.#add({ kind: 'split', to: [this.#build(of, first), next] })
    for (let n = 0; n < least; n++) first = this.#build(of, first)
    return first
  }

  #add(state: NfaState): number {
    return this.#states.push(state) - 1
  }
}
