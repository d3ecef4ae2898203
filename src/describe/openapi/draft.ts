import { covers, type PathPattern, pathPattern } from '../../core/route.ts'
import {
  type CallerHint,
  callersOf,
  type DescribedOperation,
  type DescribedOperations,
  type KeyHeader,
} from './operations.ts'
import { type Description, member, objectAt, stringOrNull } from './read.ts'

/** A configuration drafted from a description. */
export interface Draft {
  readonly title: string
  readonly servers: readonly string[]
  readonly defaults: Properties
  readonly routes: readonly DraftRoute[]
}

/** YAML lines, and the comments before them. */
interface Properties {
  readonly lines: string[]
  readonly comments: string[]
}

interface DraftRoute extends Properties {
  readonly name: string
  readonly method: string
  readonly path: string
  readonly pattern: PathPattern
}

/** Longest `key.maxLength`, and longest name of a route (docs/configuration.md). */
const MAX_KEY = 8192
const MAX_NAME = 64

/** Drafts routes from the description, and leaves the rest to the user (DECIDE). */
export function draftOf(description: Description, { found }: DescribedOperations): Draft {
  const shared = callersOf(description, undefined)
  const names = new Set<string>()
  const routes: DraftRoute[] = []
  const known = new Map<string, DraftRoute>()
  for (const operation of found) {
    const { method, template, path } = operation
    const pattern = pathPattern(path.path, false)
    const requests = JSON.stringify([method, pattern])
    const same = known.get(requests)
    if (same !== undefined) {
      same.comments.push(`${method} ${template} is left out: the route below matches the same requests.`)
      continue
    }
    const name = nameOf(operation, names)
    names.add(name)
    const route = { name, method, path: path.path, pattern, ...propertiesOf(description, operation, shared) }
    known.set(requests, route)
    // The first match wins: the narrower route goes before the wider one.
    const wider = routes.findIndex((other) => other.method === method && covers(other.pattern, pattern))
    routes.splice(wider < 0 ? routes.length : wider, 0, route)
  }
  const info = member(description.root, 'info')
  const defaults: Properties = { lines: [], comments: [] }
  addCallers(defaults, shared)
  return {
    title: [stringOrNull(member(info, 'title')), stringOrNull(member(info, 'version'))]
      .filter(Boolean)
      .join(' '),
    servers: [...new Set(found.flatMap(({ server }) => server ?? []))],
    defaults,
    routes,
  }
}

/** A metric label: unique, at most 64 characters. */
function nameOf({ id, method, path }: DescribedOperation, taken: ReadonlySet<string>): string {
  const text = id ?? `${method.toLowerCase()}${path.path}`
  const clean = text.replace(/[^A-Za-z0-9_.-]+/g, '-').replace(/^[^A-Za-z0-9]+|-+$/g, '')
  const base = clean === '' || clean === 'default' ? `${method.toLowerCase()}-${clean || 'root'}` : clean
  let name = base.slice(0, MAX_NAME)
  for (let n = 2; taken.has(name); n++) name = `${base.slice(0, MAX_NAME - String(n).length - 1)}-${n}`
  return name
}

function propertiesOf(
  description: Description,
  operation: DescribedOperation,
  shared: CallerHint | null,
): Properties {
  const { method, template, path, pointer, value } = operation
  const line = description.lineOf(pointer)
  // JSON without line breaks has only one line, whose number says nothing.
  const made: Properties = {
    lines: [],
    comments: [`${method} ${template}${line > 1 ? `, line ${line}` : ''}`],
  }
  if (path.wider !== null) made.comments.push(`Matches more than the description says: ${path.wider}.`)
  addKey(made, operation.keys)
  const own = member(value, 'security') === undefined ? null : callersOf(description, value)
  if (own !== null && own.sources.join() !== shared?.sources.join()) addCallers(made, own)
  if (own?.anonymous === true && own.sources.length === 0)
    made.comments.push(
      'DECIDE: this operation accepts anonymous requests, which would all share one key space. To refuse them: scope: { anonymous: reject }.',
    )
  addBody(made, operation.accepts)
  addHints(made, operation)
  return made
}

function addKey({ lines, comments }: Properties, keys: readonly KeyHeader[]): void {
  const [first, ...more] = keys
  if (first === undefined) {
    lines.push('key: optional')
    comments.push(
      'The description has no key header, so requests without a key pass through unprotected. DECIDE: required, once clients send one.',
    )
    return
  }
  const required = keys.some((key) => key.required)
  const names = keys.map(({ name }) => name).join(', ')
  comments.push(
    more.length > 0 && required
      ? `The description lists the headers ${names} and requires one of them.`
      : `The description ${required ? 'requires' : 'allows'} the header ${names}.`,
  )
  if (!required) comments.push('DECIDE: required, if every client sends it.')
  const presence = required ? 'required' : 'optional'
  const lengths = lengthsOf(keys)
  const from =
    more.length === 0 && first.name.toLowerCase() === 'idempotency-key'
      ? []
      : [`from: ${listOf(keys.map(({ name }) => `header:${name.toLowerCase()}`))}`]
  lines.push(
    from.length + lengths.length === 0
      ? `key: ${presence}`
      : `key: { ${[...from, `presence: ${presence}`, ...lengths].join(', ')} }`,
  )
}

function listOf(items: readonly string[]): string {
  return `[${items.map((item) => JSON.stringify(item)).join(', ')}]`
}

/** The widest bounds of all headers that may carry the key. */
function lengthsOf(keys: readonly KeyHeader[]): string[] {
  const least = Math.min(...keys.map(({ minLength }) => minLength ?? 1))
  const most = Math.max(...keys.map(({ maxLength }) => maxLength ?? 255))
  if (least > most || most > MAX_KEY) return []
  return [...(least > 1 ? [`minLength: ${least}`] : []), ...(most === 255 ? [] : [`maxLength: ${most}`])]
}

const UPLOADS =
  'DECIDE: uploads over limits.request (1MiB) are refused with 413, and smaller ones are held in memory. For larger ones: limits: { request: 16MiB }.'

function addBody({ lines, comments }: Properties, accepts: readonly string[]): void {
  const takesOnly = (type: string): boolean => accepts.length > 0 && accepts.every((one) => one === type)
  if (takesOnly('multipart/form-data')) {
    lines.push('fingerprint: { body: multipart }')
    comments.push(
      'Multipart bodies are compared without their boundary, which may differ in a retry.',
      UPLOADS,
    )
  } else if (takesOnly('application/x-www-form-urlencoded')) {
    lines.push('fingerprint: { body: form }')
    comments.push('Forms are compared field by field, in order.')
  } else {
    const others = accepts.filter((type) => !/^application\/(?:.*\+)?json$/.test(type))
    if (others.length === 0) return
    comments.push(`Accepts ${accepts.join(', ')}: compared by media type (fingerprint.body: auto).`)
    if (others.some((type) => /^multipart\/|octet-stream|^(?:image|video|audio)\//.test(type)))
      comments.push(UPLOADS)
  }
}

function addCallers({ lines, comments }: Properties, hint: CallerHint | null): void {
  if (hint === null) return
  const { sources, schemes, unseen, anonymous } = hint
  if (sources.length === 0) {
    if (unseen.length > 0)
      comments.push(`DECIDE: what identifies callers? scope.caller cannot read ${unseen.join(', ')}.`)
    return
  }
  lines.push(`scope: { caller: ${sources.length === 1 ? JSON.stringify(sources[0]) : listOf(sources)} }`)
  comments.push(`Callers are identified by the description's security schemes: ${schemes.join(', ')}.`)
  if (sources.includes('header:authorization'))
    comments.push(
      'DECIDE: if clients renew their token before a retry, the retry looks like another caller and executes again. Then use jwt:<claim> (docs/keys.md).',
    )
  if (sources.length > 1)
    comments.push('Together they identify the caller: a retry must carry the same ones.')
  if (anonymous) comments.push('Requests without any are accepted, and share one key space.')
  if (unseen.length > 0) comments.push(`Not used: ${unseen.join(', ')}.`)
}

/** Words in names of operations that only read or compute. */
const READS =
  /(?:^|[^a-z])(?:search|query|find|lookup|list|filter|preview|validate|estimate|calculate|simulate|count|check|batchget)(?:$|[^a-z])/
const SECRETS =
  /(?:^|[^a-z])(?:token|tokens|login|password|secret|secrets|session|sessions|otp|credentials)(?:$|[^a-z])/

/** Hints from an operation's name, path and responses, for the user to decide. */
function addHints({ comments }: Properties, { id, template, value }: DescribedOperation): void {
  const words = `${id ?? ''} ${template.split('/').slice(-2).join(' ')}`
    .replace(/([a-z0-9])([A-Z])/g, '$1 $2')
    .toLowerCase()
  const isGraphql = /graphql/.test(words)
  const responses = objectAt(value, 'responses')
  // biome-ignore format: a table
  const hints: readonly (readonly [applies: boolean, hint: string])[] = [
    [isGraphql,
      'DECIDE: GraphQL queries and mutations share this path; only requests with a key are protected.'],
    [!isGraphql && READS.test(words),
      'DECIDE: looks read-only. If it is: key: ignored, and it passes through.'],
    [SECRETS.test(words),
      'DECIDE: the response may contain a secret, and is stored. keep: outcome stores no body.'],
    [Object.values(responses).some(isStream),
      'Streams its response: the first request gets it, retries get 409 idempotency_response_unavailable.'],
    [Object.hasOwn(responses, '202'),
      'Answers 202: the work continues afterwards. A replay repeats the 202.'],
    [member(value, 'deprecated') === true, 'Deprecated in the description.'],
    [id === null, 'No operationId: named after its path.'],
  ]
  for (const [applies, hint] of hints) if (applies) comments.push(hint)
}

function isStream(response: unknown): boolean {
  return Object.keys(objectAt(response, 'content')).some((type) => /^text\/event-stream\b/i.test(type))
}

/** A draft with more routes than this has a warning. */
const MANY = 50
/** Time series of an unused route (docs/metrics.md). */
const SERIES = 35

function number(count: number, what: string): string {
  return `${count} ${what}${count === 1 ? '' : 's'}`
}

/** A draft as a configuration file, line by line. Lines are not yet safe to print on a terminal. */
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
      'A draft: an OpenAPI description does not say what a retry may do. DECIDE marks what you must decide. Then run: idempotency-proxy check FILE',
      `${number(routes.length, 'route')} for ${number(all, 'operation')}: every POST and PATCH, and each PUT and DELETE that declares a key. The others are idempotent anyway (RFC 9110 §9.2.2) and pass through.`,
      ...(routes.length > MANY
        ? [
            `DECIDE: ${routes.length} routes make ${routes.length * SERIES} time series for each replica, and some three times as many once they are used (docs/metrics.md). Routes that decide alike can be one, with a path such as /v1/* and several methods.`,
          ]
        : []),
    ),
    '',
    'upstream:',
    '  # DECIDE: where the service listens.',
    ...servers
      .slice(0, 5)
      .map((url) => `  # Clients connect to ${url}: the proxy has to take over that address.`),
    `  url: ${JSON.stringify(upstream)}`,
    '',
    'defaults:',
    '  # DECIDE: enforce protects at once; shadow forwards everything and reports what enforce would do (docs/shadow.md).',
    '  mode: enforce',
    '  # DECIDE: how long a response is replayed; longer than any client keeps retrying.',
    '  ttl: 24h',
    ...comment('  ', ...defaults.comments),
    ...defaults.lines.map((line) => `  ${line}`),
    '',
    'routes:',
    ...routes.flatMap(({ name, method, path, lines, comments }) => [
      ...comment('  ', ...comments),
      `  - name: ${JSON.stringify(name)}`,
      `    match: { methods: [${method}], path: ${JSON.stringify(path)} }`,
      ...lines.map((line) => `    ${line}`),
      '',
    ]),
  ]
}

/** Longest line of a comment. */
const WIDTH = 118

/** Wrapped between words only: text of the description cannot leave the comment. */
export function comment(indent: string, ...texts: readonly string[]): string[] {
  return texts.flatMap((text) => {
    const lines: string[] = []
    let line = ''
    for (const word of text.split(' ')) {
      if (line !== '' && indent.length + 2 + line.length + 1 + word.length > WIDTH) {
        lines.push(line)
        line = word
      } else line = line === '' ? word : `${line} ${word}`
    }
    return [...lines, line].map((one) => `${indent}# ${one}`.trimEnd())
  })
}
