import {
  type CallerHint,
  callersOf,
  covers,
  type KeyHeader,
  type Operation,
  type Operations,
  type Shape,
  shapeOf,
} from './operations.ts'
import { type Description, isObject, member, textOf } from './read.ts'

/** A route of the draft: what is written, and why. */
export interface DraftRoute {
  readonly name: string
  readonly method: string
  readonly path: string
  /** Properties as YAML, a line each. */
  readonly lines: readonly string[]
  /** Remarks for people, before the route. */
  readonly comments: readonly string[]
}

export interface Draft {
  readonly title: string
  readonly servers: readonly string[]
  /** Of `defaults`. */
  readonly defaults: { readonly lines: readonly string[]; readonly comments: readonly string[] }
  readonly routes: readonly DraftRoute[]
}

/** `scope.caller` and `key.maxLength` take no more than that (docs/configuration.md). */
const KEY_MOST = 8192
const NAME_MOST = 64

/** Drafts the routes of a description: what it says is written, what it cannot say is asked for (DECIDE). */
export function draftOf(description: Description, { found }: Operations): Draft {
  const shared = callersOf(description, undefined)
  const names = new Set<string>()
  const drafted: Drafted[] = []
  const known = new Map<string, Drafted>()
  for (const operation of found) {
    const { method, path } = operation
    const shape = shapeOf(path.path)
    const requests = JSON.stringify([method, shape])
    const same = known.get(requests)
    if (same !== undefined) {
      same.comments.push(
        `${method} ${operation.template} is left out: the route below matches the same requests.`,
      )
      continue
    }
    const name = nameOf(operation, names)
    names.add(name)
    const { lines, comments } = linesOf(description, operation, shared)
    const route = { name, method, path: path.path, lines, comments: [...comments], shape }
    known.set(requests, route)
    // The first match wins: the narrower one goes before the wider one.
    const wider = drafted.findIndex((other) => other.method === method && covers(other.shape, shape))
    drafted.splice(wider < 0 ? drafted.length : wider, 0, route)
  }
  const info = member(description.root, 'info')
  return {
    title: [textOf(member(info, 'title')), textOf(member(info, 'version'))].filter(Boolean).join(' '),
    servers: [...new Set(found.flatMap(({ server }) => (server === null ? [] : [server])))],
    defaults: callerLines(shared),
    routes: drafted,
  }
}

interface Drafted extends DraftRoute {
  readonly comments: string[]
  readonly shape: Shape
}

/** What a route may be called: a metric label, unique, at most 64 characters. */
function nameOf({ id, method, path }: Operation, taken: ReadonlySet<string>): string {
  const text = id ?? `${method.toLowerCase()}${path.path}`
  const clean = text.replace(/[^A-Za-z0-9_.-]+/g, '-').replace(/^[^A-Za-z0-9]+|-+$/g, '')
  const base = clean === '' || clean === 'default' ? `${method.toLowerCase()}-${clean || 'root'}` : clean
  let name = base.slice(0, NAME_MOST)
  for (let n = 2; taken.has(name); n++) name = `${base.slice(0, NAME_MOST - String(n).length - 1)}-${n}`
  return name
}

function linesOf(
  description: Description,
  operation: Operation,
  shared: CallerHint | null,
): Pick<DraftRoute, 'lines' | 'comments'> {
  const { method, template, path, keys, pointer } = operation
  const line = description.lineOf(pointer)
  const key = keyLines(keys)
  const body = bodyLines(operation)
  const own =
    member(operation.value, 'security') === undefined ? null : callersOf(description, operation.value)
  const caller = own === null || own.sources.join() === shared?.sources.join() ? NOTHING : callerLines(own)
  return {
    comments: [
      // JSON without line breaks has one line, which says nothing.
      `${method} ${template}${line > 1 ? `, line ${line}` : ''}`,
      ...(path.wider === null ? [] : [`Matches more than the description says: ${path.wider}.`]),
      ...key.comments,
      ...caller.comments,
      ...(own?.anonymous === true && own.sources.length === 0 ? [OPEN] : []),
      ...body.comments,
      ...hintsOf(operation),
    ],
    lines: [...key.lines, ...caller.lines, ...body.lines],
  }
}

interface Lines {
  readonly lines: readonly string[]
  readonly comments: readonly string[]
}
const NOTHING: Lines = { lines: [], comments: [] }

const OPEN =
  'DECIDE: the description lets everybody in here, so that all callers without credentials share one set of keys; scope: { anonymous: reject } refuses them.'

function keyLines(keys: readonly KeyHeader[]): Lines {
  const [first, ...more] = keys
  if (first === undefined)
    return {
      lines: ['key: optional'],
      comments: [
        'No header that carries a key is described: requests without one stream through. DECIDE: required, once clients send it.',
      ],
    }
  const required = keys.some((key) => key.required)
  const names = keys.map(({ name }) => name).join(', ')
  const comments = [
    more.length > 0 && required
      ? `The description has the headers ${names}, and requires one.`
      : `The description ${required ? 'requires' : 'allows'} the header ${names}.`,
    ...(required ? [] : ['DECIDE: required, where every client sends it.']),
  ]
  const presence = required ? 'required' : 'optional'
  const lengths = lengthsOf(keys)
  const isPlain = more.length === 0 && first.name.toLowerCase() === 'idempotency-key'
  if (isPlain && lengths.length === 0) return { lines: [`key: ${presence}`], comments }
  const parts = [
    ...(isPlain
      ? []
      : [`from: [${keys.map(({ name }) => JSON.stringify(`header:${name.toLowerCase()}`)).join(', ')}]`]),
    `presence: ${presence}`,
    ...lengths,
  ]
  return { lines: [`key: { ${parts.join(', ')} }`], comments }
}

/** Where several headers may carry it, the widest bounds. */
function lengthsOf(keys: readonly KeyHeader[]): string[] {
  const least = Math.min(...keys.map(({ minLength }) => minLength ?? 1))
  const most = Math.max(...keys.map(({ maxLength }) => maxLength ?? 255))
  if (least > most || most > KEY_MOST) return []
  return [...(least > 1 ? [`minLength: ${least}`] : []), ...(most === 255 ? [] : [`maxLength: ${most}`])]
}

function bodyLines({ accepts }: Operation): Lines {
  const isAll = (type: string): boolean => accepts.length > 0 && accepts.every((one) => one === type)
  const larger =
    'DECIDE: uploads over limits.request (1MiB) are refused with 413, and held in memory below that: limits: { request: 16MiB }.'
  if (isAll('multipart/form-data'))
    return {
      lines: ['fingerprint: { body: multipart }'],
      comments: ['Uploads are compared part by part: a retry may draw another boundary.', larger],
    }
  if (isAll('application/x-www-form-urlencoded'))
    return {
      lines: ['fingerprint: { body: form }'],
      comments: ['Forms are compared field by field, in order.'],
    }
  const others = accepts.filter((type) => !/^application\/(?:.*\+)?json$/.test(type))
  return {
    lines: [],
    comments:
      others.length === 0
        ? []
        : [
            `Takes ${accepts.join(', ')}: compared by media type (fingerprint.body: auto).`,
            ...(others.some((type) => /^multipart\/|octet-stream|^(?:image|video|audio)\//.test(type))
              ? [larger]
              : []),
          ],
  }
}

function callerLines(hint: CallerHint | null): Lines {
  if (hint === null) return NOTHING
  const { sources, schemes, unseen, anonymous } = hint
  if (sources.length === 0)
    return {
      lines: [],
      comments:
        unseen.length === 0
          ? []
          : [
              `DECIDE: what tells callers apart? ${unseen.join(', ')} is nothing that scope.caller can look at.`,
            ],
    }
  const value =
    sources.length === 1
      ? JSON.stringify(sources[0])
      : `[${sources.map((one) => JSON.stringify(one)).join(', ')}]`
  return {
    lines: [`scope: { caller: ${value} }`],
    comments: [
      `Callers are told apart by what the description secures: ${schemes.join(', ')}.`,
      ...(sources.includes('header:authorization')
        ? [
            'DECIDE: where a token is renewed between two tries, the retry comes as another caller and executes: jwt:<claim> (docs/keys.md).',
          ]
        : []),
      ...(sources.length > 1
        ? ['Several of them count together: a client must not change between them.']
        : []),
      ...(anonymous ? ['Requests without any are let in, and share one set of keys.'] : []),
      ...(unseen.length > 0 ? [`Not looked at: ${unseen.join(', ')}.`] : []),
    ],
  }
}

/** Words that name what only reads, or only computes. */
const READS =
  /(?:^|[^a-z])(?:search|query|find|lookup|list|filter|preview|validate|estimate|calculate|simulate|count|check|batchget)(?:$|[^a-z])/
const SECRETS =
  /(?:^|[^a-z])(?:token|tokens|login|password|secret|secrets|session|sessions|otp|credentials)(?:$|[^a-z])/

/** What the name of an operation, its path and its answers suggest, for a person to decide. */
export function hintsOf({ id, template, value }: Operation): string[] {
  const words = `${id ?? ''} ${template.split('/').slice(-2).join(' ')}`
    .replace(/([a-z0-9])([A-Z])/g, '$1 $2')
    .toLowerCase()
  const hints: string[] = []
  if (/graphql/.test(words))
    hints.push(
      'DECIDE: GraphQL. Queries and mutations come to the same path; only those that carry a key are protected.',
    )
  else if (READS.test(words))
    hints.push(
      'DECIDE: looks like a question that changes nothing. Then: key: ignored, and it streams through.',
    )
  if (SECRETS.test(words))
    hints.push(
      'DECIDE: the answer may carry a secret, which is stored. keep: outcome stores nothing of the body.',
    )
  if (streams(value))
    hints.push(
      'Answers with a stream: the first client gets all of it, retries get 409 idempotency_response_unavailable.',
    )
  const status = acceptedLater(value)
  if (status !== null)
    hints.push(`Answers ${status}: the work goes on afterwards. A replay says again that it was taken.`)
  if (member(value, 'deprecated') === true) hints.push('Deprecated in the description.')
  if (textOf(member(value, 'operationId')) === null) hints.push('Has no operationId: named by its path.')
  return hints
}

function streams(operation: unknown): boolean {
  const responses = member(operation, 'responses')
  return (
    isObject(responses) &&
    Object.values(responses).some((response) => {
      const content = member(response, 'content')
      return isObject(content) && Object.keys(content).some((type) => /^text\/event-stream\b/i.test(type))
    })
  )
}

function acceptedLater(operation: unknown): string | null {
  const responses = member(operation, 'responses')
  return isObject(responses) && Object.hasOwn(responses, '202') ? '202' : null
}

/** Longest line of a comment. */
const WIDTH = 118

/** A draft as a configuration file, line by line. Lines may still hold what a terminal obeys. */
export function draftText(
  { title, servers, defaults, routes }: Draft,
  from: string,
  upstream: string,
  all: number,
): string[] {
  return [
    ...comment(
      '',
      `Routes for idempotency-proxy, drafted from ${from}${title === '' ? '' : ` (${title})`} by: idempotency-proxy routes from`,
    ),
    ...comment(
      '',
      'A draft: a description does not say what a retry may do. DECIDE marks what only a person can. Then: idempotency-proxy check FILE',
    ),
    ...comment(
      '',
      `${routes.length} routes of ${all} operations: POST and PATCH, and of PUT and DELETE what declares a key. The rest is idempotent by itself (RFC 9110 §9.2.2) and streams through.`,
    ),
    '',
    'upstream:',
    ...comment('  ', 'DECIDE: where the service listens.'),
    ...servers.slice(0, 5).map((url) => `  # Clients connect to ${url}: that is where this proxy is to be.`),
    `  url: ${JSON.stringify(upstream)}`,
    '',
    'defaults:',
    ...comment(
      '  ',
      'DECIDE: shadow first forwards everything and tells what enforce would have done (docs/shadow.md).',
    ),
    '  mode: enforce',
    ...comment(
      '  ',
      'DECIDE: how long a finished request answers retries; longer than any client goes on trying.',
    ),
    '  ttl: 24h',
    ...defaults.comments.flatMap((text) => comment('  ', text)),
    ...defaults.lines.map((line) => `  ${line}`),
    '',
    'routes:',
    ...routes.flatMap(routeText),
  ]
}

function routeText({ name, method, path, lines, comments }: DraftRoute): string[] {
  return [
    ...comments.flatMap((text) => comment('  ', text)),
    `  - name: ${JSON.stringify(name)}`,
    `    match: { methods: [${method}], path: ${JSON.stringify(path)} }`,
    ...lines.map((line) => `    ${line}`),
    '',
  ]
}

/** Broken between words. A text of the description stays on its line, whatever is in it. */
function comment(indent: string, text: string): string[] {
  const lines: string[] = []
  let line = ''
  for (const word of text.split(' ')) {
    if (line !== '' && indent.length + 2 + line.length + 1 + word.length > WIDTH) {
      lines.push(line)
      line = word
    } else line = line === '' ? word : `${line} ${word}`
  }
  return [...lines, line].map((one) => `${indent}# ${one}`.trimEnd())
}
