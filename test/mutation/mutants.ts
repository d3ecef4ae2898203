/**
 * The mutants of a file: small mistakes, one at a time, each a replaced piece of text.
 *
 * What is never mutated: types and docstrings; what people read (a string with a blank in it, and every string of an error); what
 * `observer` is told (a call of it may vanish, since metrics are promised, but not `trouble`, which is the log). Nor a condition that is
 * its own statement's only content twice: `if (c) return` without its `return` is `if (false)`.
 */
import { parseAst } from 'rolldown/parseAst'

export interface Mutant {
  /** From the root of the repository. */
  readonly file: string
  readonly start: number
  readonly end: number
  /** What stands there instead. */
  readonly text: string
  readonly kind: string
  /** The same as long as its line stays as it is: file, line's text, place in the line, and what became of it. */
  readonly id: string
  readonly line: number
}

interface Node {
  readonly type: string
  readonly start: number
  readonly end: number
  readonly [member: string]: unknown
}
type Add = (at: { start: number; end: number }, text: string, kind: string) => void

const TYPES = new Set([
  'typeAnnotation',
  'typeArguments',
  'typeParameters',
  'returnType',
  'superTypeArguments',
  'decorators',
])
const NEGATED = new Map(
  Object.entries({
    '<': '>=',
    '<=': '>',
    '>': '<=',
    '>=': '<',
    '===': '!==',
    '!==': '===',
    '==': '!=',
    '!=': '==',
  }),
)
const BOUNDARY = new Map(Object.entries({ '<': '<=', '<=': '<', '>': '>=', '>=': '>' }))
const ARITHMETIC = new Map(
  Object.entries({
    '+': '-',
    '-': '+',
    '*': '/',
    '/': '*',
    '%': '*',
    '&': '|',
    '|': '&',
    '^': '&',
    '<<': '>>',
    '>>': '<<',
    '>>>': '<<',
    '**': '*',
  }),
)
const METHODS = new Map(
  Object.entries({
    min: 'max',
    max: 'min',
    floor: 'ceil',
    ceil: 'floor',
    some: 'every',
    every: 'some',
    startsWith: 'endsWith',
    endsWith: 'startsWith',
    toLowerCase: 'toUpperCase',
    indexOf: 'lastIndexOf',
    lastIndexOf: 'indexOf',
  }),
)
/** Methods that leave their object as it is where they are left out. */
const LEFT_OUT = new Set(['trim', 'reverse', 'sort', 'toSorted', 'filter', 'slice', 'subarray'])

/** Of TypeScript: conditions, operators, literals, calls and statements. Of Lua and SQL: operators, numbers and early ends. */
export function mutantsOf(file: string, source: string): Mutant[] {
  const found = new Map<string, Mutant>()
  const add: Add = ({ start, end }, text, kind) => {
    const from = source.slice(start, end)
    if (from === text) return
    const begin = source.lastIndexOf('\n', start - 1) + 1
    const stop = source.indexOf('\n', start)
    const whole = source.slice(begin, stop < 0 ? source.length : stop)
    const column = start - begin - (whole.length - whole.trimStart().length)
    const short = (words: string): string => words.replaceAll(/\s+/g, ' ').slice(0, 60)
    const base = `${file} | ${whole.trim()} | ${column}: ${short(from)} → ${short(text)}`
    let id = base
    for (let again = 2; found.has(id); again++) {
      const { start: other, end: otherEnd } = found.get(id) as Mutant
      if (other === start && otherEnd === end) return
      id = `${base} (${again})`
    }
    const line = source.slice(0, start).split('\n').length
    found.set(id, { file, start, end, text, kind, id, line })
  }
  if (file.endsWith('.ts')) inTypeScript(source, add)
  else inText(source, file.endsWith('.lua') ? LUA : SQL, add)
  return [...found.values()].sort((a, b) => a.start - b.start || a.end - b.end)
}

function inTypeScript(source: string, add: Add): void {
  walk(parseAst(source, { lang: 'ts' }) as unknown as Node, [], false)

  /** `quiet`: its strings are for people. */
  function walk(node: Node, above: readonly Node[], quiet: boolean): void {
    if (node.type === 'ImportDeclaration' || node.type === 'ExportAllDeclaration') return
    const isWrapper = /^TS(As|NonNull|Satisfies)/.test(node.type)
    if (node.type.startsWith('TS') && !isWrapper) return
    if (isTrouble(node)) return
    const isQuiet = quiet || isForPeople(node)
    mutate(node, above, isQuiet)
    for (const [name, value] of Object.entries(node)) {
      if (TYPES.has(name)) continue
      if (name === 'key' && node['computed'] !== true) continue
      if (name === 'source' && node.type.startsWith('Export')) continue
      for (const child of Array.isArray(value) ? value : [value])
        if (isNode(child)) walk(child, [node, ...above], isQuiet)
    }
  }

  function mutate(node: Node, above: readonly Node[], quiet: boolean): void {
    const [parent] = above
    const text = (of: unknown): string => source.slice((of as Node).start, (of as Node).end)
    switch (node.type) {
      case 'IfStatement':
      case 'ConditionalExpression':
        add(node['test'] as Node, 'true', 'condition')
        add(node['test'] as Node, 'false', 'condition')
        break
      case 'WhileStatement':
      case 'ForStatement':
        if (node['test'] !== null) add(node['test'] as Node, 'false', 'condition')
        break
      case 'LogicalExpression': {
        const { operator, left, right } = node as unknown as { operator: string; left: Node; right: Node }
        if (operator === '??') {
          add(node, `(${text(left)})`, '??')
          add(node, `(${text(right)})`, '??')
          break
        }
        const neutral = operator === '&&' ? 'true' : 'false'
        add(left, neutral, 'condition')
        add(right, neutral, 'condition')
        const [place] = between(left, right, operator)
        if (place !== undefined) add(place, operator === '&&' ? '||' : '&&', operator)
        break
      }
      case 'BinaryExpression': {
        const { operator, left, right } = node as unknown as { operator: string; left: Node; right: Node }
        const [place] = between(left, right, operator)
        if (place === undefined) break
        for (const table of [NEGATED, BOUNDARY]) {
          const other = table.get(operator)
          if (other !== undefined) add(place, other, 'comparison')
        }
        const other = ARITHMETIC.get(operator)
        const isText = [left, right].some((side) => side.type === 'TemplateLiteral' || isString(side))
        if (other !== undefined && !isText && !(operator === '+' && quiet)) add(place, other, 'arithmetic')
        break
      }
      case 'AssignmentExpression': {
        const { operator, left, right } = node as unknown as { operator: string; left: Node; right: Node }
        const other = ARITHMETIC.get(operator.slice(0, -1))
        const [place] = between(left, right, operator)
        if (operator.length > 1 && other !== undefined && place !== undefined)
          add(place, `${other}=`, 'arithmetic')
        break
      }
      case 'UpdateExpression':
        if (parent?.type === 'ForStatement' && parent['update'] === node) break
        add(
          node,
          text(node).includes('++') ? text(node).replace('++', '--') : text(node).replace('--', '++'),
          'arithmetic',
        )
        break
      case 'UnaryExpression':
        if (node['operator'] === '!' || node['operator'] === '-' || node['operator'] === '~')
          add(node, text(node['argument']), 'unary')
        break
      case 'Literal':
        literal(node, parent, quiet)
        break
      case 'TemplateLiteral': {
        const words = (node['quasis'] as Node[])
          .map((part) => (part['value'] as { raw: string }).raw)
          .join('')
        if (!quiet && !/\s/.test(words) && parent?.type !== 'TaggedTemplateExpression')
          add(node, "''", 'string')
        break
      }
      case 'ArrayExpression':
        if ((node['elements'] as Node[]).length > 0) add(node, '[]', 'array')
        break
      case 'SpreadElement':
        if (parent?.type === 'ObjectExpression') add(node, '...{}', 'spread')
        break
      case 'AwaitExpression':
        add(node, text(node['argument']), 'await')
        break
      case 'CallExpression': {
        const callee = node['callee'] as Node
        if (callee.type !== 'MemberExpression' || callee['computed'] === true) break
        const property = callee['property'] as Node
        const other = METHODS.get(property['name'] as string)
        if (other !== undefined) add(property, other, 'method')
        if (LEFT_OUT.has(property['name'] as string)) add(node, text(callee['object']), 'method')
        break
      }
      case 'MemberExpression':
        if (node['optional'] === true && node['computed'] !== true) {
          const [place] = between(node['object'] as Node, node['property'] as Node, '?.')
          if (place !== undefined) add(place, '.', 'optional')
        }
        break
      case 'ExpressionStatement':
        if (node['directive'] == null && !isSuper(node['expression'] as Node) && !isOnly(node, above))
          add(node, ';', 'statement')
        break
      case 'ReturnStatement':
      case 'ThrowStatement':
      case 'BreakStatement':
      case 'ContinueStatement':
        if (!isOnly(node, above) && !isLast(node, above)) add(node, ';', 'statement')
        break
    }
  }

  function literal(node: Node, parent: Node | undefined, quiet: boolean): void {
    const { value } = node
    if (typeof value === 'boolean') add(node, String(!value), 'boolean')
    else if (typeof value === 'number') {
      const written = source.slice(node.start, node.end)
      // By one, a time or a size differs in nothing that anybody could tell.
      const [more, less] = value >= 1000 ? ['* 2', '/ 2'] : ['+ 1', '- 1']
      add(node, `(${written} ${more})`, 'number')
      if (value !== 0) add(node, `(${written} ${less})`, 'number')
    } else if (typeof value === 'bigint') add(node, `(${source.slice(node.start, node.end)} + 1n)`, 'number')
    else if (typeof value === 'string' && !quiet && !/\S\s+\S/.test(value)) {
      if (parent?.type === 'ExpressionStatement') return
      add(node, value === '' ? "'x'" : "''", 'string')
    }
  }

  /** Where `operator` stands between two operands. */
  function between(left: Node, right: Node, operator: string): { start: number; end: number }[] {
    const gap = source
      .slice(left.end, right.start)
      .replaceAll(/\/\/[^\n]*|\/\*[\s\S]*?\*\//g, (c) => ' '.repeat(c.length))
    const at = gap.indexOf(operator)
    return at < 0 ? [] : [{ start: left.end + at, end: left.end + at + operator.length }]
  }

  function callee(node: Node): string {
    return node.type === 'CallExpression' || node.type === 'NewExpression'
      ? source.slice((node['callee'] as Node).start, (node['callee'] as Node).end)
      : ''
  }

  function isTrouble(node: Node): boolean {
    return (
      node.type === 'ExpressionStatement' &&
      /\bobserver\??\.trouble$/.test(callee(node['expression'] as Node))
    )
  }

  function isForPeople(node: Node): boolean {
    return (
      node.type === 'ThrowStatement' ||
      (node.type === 'NewExpression' && /(Error|Unavailable|Full|Timeout)$/.test(callee(node))) ||
      /\bobserver\??\.\w+$/.test(callee(node))
    )
  }
}

function isNode(value: unknown): value is Node {
  return typeof value === 'object' && value !== null && typeof (value as Node).type === 'string'
}

function isString(node: Node): boolean {
  return node.type === 'Literal' && typeof node['value'] === 'string'
}

function isSuper(node: Node): boolean {
  return node.type === 'CallExpression' && (node['callee'] as Node).type === 'Super'
}

/** The only statement of a branch without another one: leaving it out is the branch not taken. */
function isOnly(node: Node, [parent, above]: readonly Node[]): boolean {
  if (parent?.type === 'IfStatement') return parent['alternate'] == null
  if (parent?.type !== 'BlockStatement' || (parent['body'] as Node[]).length !== 1) return false
  return (
    above?.type === 'IfStatement' &&
    above['alternate'] == null &&
    above['consequent'] === parent &&
    isNode(node)
  )
}

/** The last statement of a function: without it there is a type error, which no test has to find. */
function isLast(node: Node, [parent, above]: readonly Node[]): boolean {
  const isBody = above !== undefined && /Function/.test(above.type)
  return (
    node.type === 'ReturnStatement' && isBody && (parent?.['body'] as Node[] | undefined)?.at(-1) === node
  )
}

type Rule = readonly [pattern: RegExp, text: string, kind: string]

const LUA: readonly Rule[] = [
  [/==/g, '~=', 'comparison'],
  [/~=/g, '==', 'comparison'],
  [/(?<![<>=~])<(?!=)/g, '>=', 'comparison'],
  [/(?<![<>=~])<(?!=)/g, '<=', 'comparison'],
  [/<=/g, '<', 'comparison'],
  [/<=/g, '>', 'comparison'],
  [/(?<![<>=~-])>(?!=)/g, '<=', 'comparison'],
  [/(?<![<>=~-])>(?!=)/g, '>=', 'comparison'],
  [/>=/g, '>', 'comparison'],
  [/>=/g, '<', 'comparison'],
  [/\band\b/g, 'or', 'logic'],
  [/\bor\b/g, 'and', 'logic'],
  [/\bnot\b/g, '', 'logic'],
  [/ \+ /g, ' - ', 'arithmetic'],
  [/ - /g, ' + ', 'arithmetic'],
  [/ \* /g, ' / ', 'arithmetic'],
  [/\btrue\b/g, 'false', 'boolean'],
  [/\bfalse\b/g, 'true', 'boolean'],
  [/(?<![\w.'"])\d+(?![\w.'"])/g, '$& + 1', 'number'],
  [/(?<=\bif ).+?(?= then\b)/g, 'true', 'condition'],
  [/(?<=\bif ).+?(?= then\b)/g, 'false', 'condition'],
  [/^ *redis\.call\(.*\)$/gm, '', 'statement'],
]

const SQL: readonly Rule[] = [
  [/(?<![<>:=])<(?![=>])/g, '<=', 'comparison'],
  [/(?<![<>:=])<(?![=>])/g, '>=', 'comparison'],
  [/<=/g, '<', 'comparison'],
  [/<=/g, '>', 'comparison'],
  [/(?<![<>:=-])>(?!=)/g, '>=', 'comparison'],
  [/(?<![<>:=-])>(?!=)/g, '<=', 'comparison'],
  [/>=/g, '>', 'comparison'],
  [/>=/g, '<', 'comparison'],
  [/(?<= )=(?= )/g, '<>', 'comparison'],
  [/<>/g, '=', 'comparison'],
  [/\bAND\b/gi, 'OR', 'logic'],
  [/\bOR\b(?! REPLACE)/gi, 'AND', 'logic'],
  [/\bNOT (?!NULL|EXISTS public)/gi, '', 'logic'],
  [/\bIS NULL\b/gi, 'IS NOT NULL', 'logic'],
  [/\bIS NOT NULL\b/gi, 'IS NULL', 'logic'],
  [/ \+ /g, ' - ', 'arithmetic'],
  [/ - /g, ' + ', 'arithmetic'],
  [/\bgreatest\b/gi, 'least', 'method'],
  [/\bleast\b/gi, 'greatest', 'method'],
  [/\btrue\b/gi, 'false', 'boolean'],
  [/\bfalse\b/gi, 'true', 'boolean'],
  [/(?<![\w.'"$])\d+(?![\w.'"])/g, '($& + 1)', 'number'],
]

function inText(source: string, rules: readonly Rule[], add: Add): void {
  const plain = source.replaceAll(/--[^\n]*/g, (comment) => ' '.repeat(comment.length))
  for (const [pattern, text, kind] of rules)
    for (const match of plain.matchAll(pattern)) {
      const [from] = match
      add({ start: match.index, end: match.index + from.length }, text.replace('$&', from), kind)
    }
}
