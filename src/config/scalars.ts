import { isIP } from 'node:net'
import { TOKEN } from '../core/headers.ts'
import { type KeyPattern, readPattern } from '../core/key-pattern.ts'
import type { CallerSource, KeySource, Rate } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { Address } from './config.ts'
import { SOURCE_MADE_HERE, TAKEN } from './header-names.ts'
import { bounded, byParser, byPattern, DURATION, orWord, type Scalar, SIZE, whole } from './scalar-kinds.ts'
import { ADDRESS, formatAddress, isHost, type Parsed, parseAddress, parsed, refused } from './units.ts'
import {
  JWKS,
  OWN_PATH,
  PROBE_TARGET,
  PROBLEM_BASE,
  parseJwksUrl,
  parseOwnPath,
  parseProbeTarget,
  parseProblemBase,
  parseQuestionTarget,
  parseStoreUrl,
  parseUpstreamUrl,
  QUESTION_TARGET,
  STORE,
  UPSTREAM,
} from './urls.ts'

const DAY: Millis = 86_400_000
/** Node's timers hold 31 bits: a longer one would fire at once. */
const MAX_TIMER = 24 * DAY
const MAX_RETENTION = 3650 * DAY
/** Nobody holds a connection open longer for one answer. */
const MAX_WAIT = 3_600_000
/** Beyond it a header line would not fit what Node reads of a head (16 KiB for all of them). */
const MAX_KEY = 8192
/** A body is held in memory as a whole, and Redis takes no value over 512 MiB. */
const MAX_BODY = 256 * 1024 ** 2

/** Names of claims are often URLs. */
const CALLER = `^((header|cookie):${TOKEN}|jwt:[!-~]+)$`
const CALLERS = 'header:<name>, cookie:<name> or jwt:<claim>'

function callerSource(text: string): CallerSource {
  const colon = text.indexOf(':')
  const kind = text.slice(0, colon)
  const name = text.slice(colon + 1)
  if (kind === 'header') return { kind, name: name.toLowerCase() }
  return { kind: kind === 'cookie' ? kind : 'jwt', name }
}

function sourceText(source: CallerSource | KeySource): string {
  return `${source.kind}:${'pointer' in source ? source.pointer : source.name}`
}

/** `Authorization` in place of `header:authorization`. */
function headerHinted<T>(scalar: Scalar<T>): Scalar<T> {
  return {
    ...scalar,
    parse: (text) => {
      const read = scalar.parse(text)
      if (read.ok || !/^(authorization|[a-z0-9]+(-[a-z0-9]+)+)$/i.test(text)) return read
      const hint = `, did you mean \`header:${text.toLowerCase()}\`?`
      return { ok: false, message: read.message.replace('; allowed: ', `${hint}; allowed: `) }
    },
  }
}

const POINTER = '(/([^~/]|~[01])*)+'

/** Of form fields and query parameters: what no encoder escapes in one way and another in another. */
const FIELD = '[A-Za-z0-9_.:~!$@*\\[\\]-]+'

function keySource(text: string): KeySource {
  const colon = text.indexOf(':')
  const kind = text.slice(0, colon)
  const name = text.slice(colon + 1)
  if (kind === 'json') return { kind, pointer: name }
  if (kind === 'form' || kind === 'query') return { kind, name }
  return { kind: 'header', name: name.toLowerCase() }
}

/** `scalar`, but for values that `unfit` finds: more than a JSON Schema can say, whatever the letter case. */
function except<T>(scalar: Scalar<T>, unfit: RegExp, allowed: string): Scalar<T> {
  return { ...scalar, parse: (text) => (unfit.test(text) ? refused(text, allowed) : scalar.parse(text)) }
}

/** Blanks around it would be taken off on the way. */
const HEADER_TEXT = /^[!-~\x80-\xff]([\t -~\x80-\xff]*[!-~\x80-\xff])?$/
const HEADER_TEXT_ALLOWED = 'the value of a header: not empty, on one line, without blanks around it'

const RATE_UNITS: Readonly<Record<string, Millis>> = { s: 1000, m: 60_000, h: 3_600_000, d: DAY }

function rate(text: string): Rate {
  const [count = '', unit = ''] = text.split('/')
  return { count: Number(count), per: RATE_UNITS[unit] as Millis }
}

function rateText({ count, per }: Rate): string {
  return `${count}/${Object.entries(RATE_UNITS).find(([, unit]) => unit === per)?.[0]}`
}

/** What a token's claim is compared with. */
const claimValue = byPattern(
  '^(?!none$)[^\\x00-\\x1f\\x7f]+$',
  'a text other than none, without control characters',
  (text) => text,
)

const PATTERN =
  'a regular expression of ECMAScript for the whole key, such as [A-Za-z0-9_-]{16,64}, without lookaround, backreferences, \\b and modifiers'

/** The key as a whole must match: a forgotten anchor would let anything longer through. */
function parsePattern(text: string): Parsed<KeyPattern | null> {
  if (text === '') return parsed(null)
  const reading = readPattern(text)
  return reading.kind === 'pattern' ? parsed(reading.pattern) : refused(text, `${PATTERN} (${reading.why})`)
}

function patternText(pattern: KeyPattern | null): string {
  return pattern === null ? '' : pattern.source.slice('^(?:'.length, -')$'.length)
}

const CIDR = 'a CIDR, such as 10.0.0.0/8 or fd00::/8, or one address'

function parseCidr(text: string): Parsed<string> {
  const [, address = '', prefix] = /^([^/]+)(?:\/(\d{1,3}))?$/.exec(text) ?? []
  const bits = { 0: -1, 4: 32, 6: 128 }[isIP(address)] ?? -1
  return Number(prefix ?? 0) <= bits ? parsed(`${address}/${prefix ?? bits}`) : refused(text, CIDR)
}

const HOST_LINE = 'the name of a host or its address without a port, IPv6 in brackets'

function parseHostLine(text: string): Parsed<string> {
  const bracketed = /^\[([^\]]*)\]$/.exec(text)?.[1]
  const valid = bracketed === undefined ? isHost(text) : isIP(bracketed) === 6
  return valid ? parsed(text.toLowerCase()) : refused(text, HOST_LINE)
}

const ROUTE_PATH =
  'a path: /exact, /with/:name, or /below/* (`*` at the end alone); other characters percent-encoded, no query'

function parseRoutePath(text: string): Parsed<string> {
  const segments = text.split('/').slice(1)
  const valid = segments.every((segment, i) => {
    if (segment === '*') return i === segments.length - 1
    if (segment.startsWith(':')) return /^:[A-Za-z_][A-Za-z0-9_]*$/.test(segment)
    return /^(?:[A-Za-z0-9\-._~!$&'()+,;=:@]|%[0-9A-Fa-f]{2})*$/.test(segment)
  })
  return text.startsWith('/') && valid ? parsed(text) : refused(text, ROUTE_PATH)
}

const address = byParser(
  ADDRESS,
  parseAddress,
  '^([^:\\[\\]]+|\\[[0-9A-Fa-f:.]+\\]):[0-9]{1,5}$',
  formatAddress,
)

const ownPath = byParser(OWN_PATH, parseOwnPath, '^(/[^/:*?#][^/*?#]*)+$')
const filePath = byPattern('^[^\\0]+$', 'the path of a file', (text) => text)
const directoryPath = byPattern('^[^\\0]+$', 'the path of a directory', (text) => text)

/** The other form of these scalars is a list. */
function noneOrList(values: readonly string[]): unknown {
  return values.length === 0 ? 'none' : values
}

const flag: Scalar<boolean> = {
  schema: { type: 'boolean' },
  allowed: 'true or false',
  parse: (text) => (/^(true|false)$/.test(text) ? parsed(text === 'true') : refused(text, 'true or false')),
}

/** Every kind of scalar by the name it has among the schema's definitions. */
export const SCALARS = {
  address,
  answerStatus: whole(200, 599),
  addressOrNone: orWord(address, 'none', null as Address | null),
  audience: claimValue,
  audiences: byPattern(
    `^none$|${claimValue.schema.pattern}`,
    'none, a text without control characters, or a list of texts',
    (text) => (text === 'none' ? [] : [text]),
    noneOrList,
  ),
  bucket: orWord(bounded(DURATION, 1, MAX_RETENTION), 'none', null),
  caller: headerHinted(byPattern(CALLER, CALLERS, callerSource, sourceText)),
  callers: headerHinted(
    byPattern(
      `^none$|${CALLER}`,
      `none, ${CALLERS}, or a list of them`,
      (text) => (text === 'none' ? [] : [callerSource(text)]),
      (sources) => noneOrList(sources.map(sourceText)),
    ),
  ),
  claimOrNone: orWord(claimValue, 'none', null),
  cidr: byParser(CIDR, parseCidr, '^[0-9A-Fa-f:.]+(/[0-9]{1,3})?$'),
  bodySize: bounded(SIZE, 1, MAX_BODY),
  bufferSize: bounded(SIZE, 1, 1024 ** 4),
  count: whole(1, 1_000_000),
  delay: bounded(DURATION, 0, MAX_TIMER),
  directoryPathOrOff: orWord(directoryPath, 'off', null),
  filePath,
  filePathOrNone: orWord(filePath, 'none', null),
  flag,
  fieldName: byPattern(`^${FIELD}$`, 'the name of a form field', (text) => text),
  forward: except(
    byPattern(
      `^${TOKEN}$`,
      'same, none, or the name of a header',
      (text) => (text === 'same' || text === 'none' ? text : { header: text }),
      (value) => (typeof value === 'string' ? value : value.header),
    ),
    TAKEN,
    'same, none, or the name of a header that has no meaning of its own, such as X-Request-Key',
  ),
  /** As a `Host` line has it, without the port. */
  hostLine: byParser(HOST_LINE, parseHostLine, '^([^:\\[\\]/]+|\\[[0-9A-Fa-f:.]+\\])$'),
  headerName: byPattern(`^${TOKEN}$`, 'the name of a header', (text) => text.toLowerCase()),
  headerText: {
    schema: { type: 'string', pattern: HEADER_TEXT.source },
    allowed: HEADER_TEXT_ALLOWED,
    // It may be a credential: the error does not show it.
    parse: (text) =>
      HEADER_TEXT.test(text)
        ? parsed(text)
        : { ok: false, message: `found something else; allowed: ${HEADER_TEXT_ALLOWED}` },
  } satisfies Scalar<string>,
  hostName: byParser('the name of a host', (text) =>
    isHost(text) ? parsed(text) : refused(text, 'the name of a host'),
  ),
  jsonPointer: byPattern(`^${POINTER}$`, 'a JSON pointer, such as /sentAt or /items/0/id', (text) => text),
  jsonPart: byPattern(`^(${POINTER})?$`, 'a JSON pointer, such as /data/0; empty: all of it', (text) => text),
  jsonText: {
    schema: { type: ['string', 'number', 'boolean'], pattern: '^[^\\0]+$' },
    allowed: 'a text, a number, true or false',
    parse: (text) => (text === '' ? refused(text, 'a text, a number, true or false') : parsed(text)),
  } satisfies Scalar<string>,
  jwksUrl: orWord(
    byParser(JWKS, parseJwksUrl, '^(https://|http://(localhost|127\\.|\\[::1\\]))[^/?#@]*([/?][^#]*)?$'),
    'none',
    null,
  ),
  keyLength: whole(1, MAX_KEY),
  keySource: except(
    headerHinted(
      byPattern(
        `^(header:${TOKEN}|(form|query):${FIELD}|json:${POINTER})$`,
        'header:<name>, query:<name>, form:<field> or json:<pointer>, such as json:/id',
        keySource,
        sourceText,
      ),
    ),
    SOURCE_MADE_HERE,
    'a header that reaches the upstream as the client sent it',
  ),
  method: byPattern(
    '^(?!CONNECT$)[A-Z][A-Z_-]*$',
    'a method in capital letters, other than CONNECT',
    (text) => text,
  ),
  /** For a mapping that may be turned off as a whole. */
  none: byPattern(
    '^none$',
    'none',
    () => null,
    () => 'none',
  ),
  off: byPattern(
    '^off$',
    'off',
    () => null,
    () => 'off',
  ),
  ownPath,
  ownPathOrOff: orWord(ownPath, 'off', null),
  pattern: byParser(PATTERN, parsePattern, '', patternText),
  questions: whole(1, 1000),
  questionTarget: byParser(QUESTION_TARGET, parseQuestionTarget, '^/([^/#][^#]*)?$'),
  probeTarget: byParser(PROBE_TARGET, parseProbeTarget, '^/([^/#][^#]*)?$'),
  problemBase: byParser(PROBLEM_BASE, parseProblemBase, '^[A-Za-z][A-Za-z0-9+.-]*:.*[/:#=]$'),
  rateOrOff: orWord(
    byPattern(
      '^[1-9][0-9]{0,5}/[smhd]$',
      'a rate: a whole number of 1 to 999999 per s, m, h or d, such as 100/m',
      rate,
      rateText,
    ),
    'off',
    null,
  ),
  respondWithin: orWord(bounded(DURATION, 1, MAX_TIMER), 'none', null),
  retention: bounded(DURATION, 1, MAX_RETENTION),
  routeName: byPattern(
    '^(?!default$)[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$',
    'up to 64 letters, digits, `_`, `.`, `-`, and not `default`, which is the name of what no route matches',
    (text) => text,
  ),
  routePath: byParser(
    ROUTE_PATH,
    parseRoutePath,
    '^(?=/)(/(:[A-Za-z_][A-Za-z0-9_]*|[^:*?#\\s/][^*?#\\s/]*)?)*(/\\*)?$',
  ),
  storeUrl: byParser(
    STORE,
    parseStoreUrl,
    '^(memory:$|sqlite:(?!//|:memory:$).|rediss?://[^/?#]+(/[0-9]{0,5})?$)',
  ),
  serviceName: byPattern(
    '^[A-Za-z0-9_.-]{1,64}$',
    'up to 64 letters, digits, `_`, `.`, `-`, such as payments',
    (text) => text,
  ),
  timeout: bounded(DURATION, 1, MAX_TIMER),
  tombstone: orWord(bounded(DURATION, 0, MAX_RETENTION), 'off', 0),
  wait: bounded(DURATION, 1, MAX_WAIT),
  upstreamUrl: byParser(UPSTREAM, parseUpstreamUrl, '^(https?://[^/?#@]+/?|unix:/[^/].*)$'),
} satisfies Record<string, Scalar<unknown>>

export type ScalarName = keyof typeof SCALARS
export type ScalarValue<N extends ScalarName> = (typeof SCALARS)[N] extends Scalar<infer T> ? T : never
