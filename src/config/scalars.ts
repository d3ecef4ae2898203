import { isIP } from 'node:net'
import type { CallerSource, KeySource, Rate } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { Address } from './config.ts'
import {
  ADDRESS,
  formatDuration,
  formatSize,
  isHost,
  type Parsed,
  parseAddress,
  parseDuration,
  parsed,
  parseSize,
  refused,
} from './units.ts'
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

/** A kind of scalar: how the JSON Schema tells it to an editor, in words, and how its text is read. */
export interface Scalar<T> {
  readonly schema: {
    readonly type: string | readonly string[]
    readonly pattern?: string
    readonly minimum?: number
    readonly maximum?: number
  }
  /** What is allowed, where not even the type is right. */
  readonly allowed: string
  readonly parse: (text: string) => Parsed<T>
}

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

function byPattern<T>(pattern: string, allowed: string, convert: (text: string) => T): Scalar<T> {
  const regExp = new RegExp(pattern)
  return {
    schema: { type: 'string', pattern },
    allowed,
    parse: (text) => (regExp.test(text) ? parsed(convert(text)) : refused(text, allowed)),
  }
}

function byParser<T>(allowed: string, parse: (text: string) => Parsed<T>, pattern = '.'): Scalar<T> {
  return { schema: { type: 'string', pattern }, allowed, parse }
}

interface Unit {
  readonly kind: string
  readonly pattern: string
  readonly parse: (text: string) => Parsed<number>
  readonly format: (value: number) => string
}

const DURATION: Unit = {
  kind: 'a duration',
  pattern: '(ms|s|m|h|d)',
  parse: parseDuration,
  format: formatDuration,
}
const SIZE: Unit = { kind: 'a size', pattern: '(B|KiB|MiB|GiB)', parse: parseSize, format: formatSize }

function bounded(unit: Unit, min: number, max: number): Scalar<number> {
  const from = min > 0 ? unit.format(min) : '0'
  const units = unit.pattern.slice(1, -1).replaceAll('|', ', ')
  const allowed = `${unit.kind} of ${from} to ${unit.format(max)}, as a whole number with ${units}`
  return {
    schema:
      min > 0
        ? { type: 'string', pattern: `^0*[1-9][0-9]*${unit.pattern}$` }
        : // A plain 0 is a number in YAML.
          { type: ['string', 'integer'], pattern: `^(0|[0-9]+${unit.pattern})$`, minimum: 0, maximum: 0 },
    allowed,
    parse: (text) => {
      const value = unit.parse(text)
      return value.ok && value.value >= min && value.value <= max ? value : refused(text, allowed)
    },
  }
}

/** `scalar`, or a word that stands for a value of its own. */
function orWord<T, W>(scalar: Scalar<T>, word: string, value: W): Scalar<T | W> {
  return {
    schema: { ...scalar.schema, pattern: `^${word}$|${scalar.schema.pattern}` },
    allowed: `${word}, or ${scalar.allowed}`,
    parse: (text) => {
      if (text === word) return parsed(value)
      const result = scalar.parse(text)
      return result.ok
        ? result
        : { ok: false, message: result.message.replace('; allowed: ', `; allowed: ${word}, or `) }
    },
  }
}

function whole(min: number, max: number): Scalar<number> {
  const allowed = `a whole number, ${min} to ${max}`
  return {
    schema: { type: 'integer', minimum: min, maximum: max },
    allowed,
    parse: (text) =>
      /^\d{1,15}$/.test(text) && Number(text) >= min && Number(text) <= max
        ? parsed(Number(text))
        : refused(text, allowed),
  }
}

const TOKEN = "[!#$%&'*+.^_`|~0-9A-Za-z-]+"
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

const POINTER = '(/([^~/]|~[01])*)+'

function keySource(text: string): KeySource {
  const name = text.slice(text.indexOf(':') + 1)
  return text.startsWith('json:')
    ? { kind: 'json', pointer: name }
    : { kind: 'header', name: name.toLowerCase() }
}

/** Blanks around it would be taken off on the way. */
const HEADER_TEXT = /^[!-~\x80-\xff]([\t -~\x80-\xff]*[!-~\x80-\xff])?$/
const HEADER_TEXT_ALLOWED = 'the value of a header: not empty, on one line, without blanks around it'

const RATE_UNITS: Readonly<Record<string, Millis>> = { s: 1000, m: 60_000, h: 3_600_000, d: DAY }

function rate(text: string): Rate {
  const [count = '', unit = ''] = text.split('/')
  return { count: Number(count), per: RATE_UNITS[unit] as Millis }
}

/** What a token's claim is compared with. */
const claimValue = byPattern(
  '^(?!none$)[^\\x00-\\x1f\\x7f]+$',
  'a text other than none, without control characters',
  (text) => text,
)

/** The key as a whole must match: a forgotten anchor would let anything longer through. */
function parsePattern(text: string): Parsed<RegExp | null> {
  if (text === '') return parsed(null)
  try {
    return parsed(new RegExp(`^(?:${new RegExp(text, 'u').source})$`, 'u'))
  } catch (error) {
    const why = error instanceof Error ? error.message.replace(/^.*: /, '') : ''
    return refused(text, `a regular expression of ECMAScript (${why})`)
  }
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

const address = byParser(ADDRESS, parseAddress, '^([^:\\[\\]]+|\\[[0-9A-Fa-f:.]+\\]):[0-9]{1,5}$')

const ownPath = byParser(OWN_PATH, parseOwnPath, '^(/[^/:*?#][^/*?#]*)+$')
const filePath = byPattern('^[^\\0]+$', 'the path of a file', (text) => text)
const directoryPath = byPattern('^[^\\0]+$', 'the path of a directory', (text) => text)

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
  ),
  bucket: orWord(bounded(DURATION, 1, MAX_RETENTION), 'none', null),
  caller: byPattern(CALLER, CALLERS, callerSource),
  callers: byPattern(`^none$|${CALLER}`, `none, ${CALLERS}, or a list of them`, (text) =>
    text === 'none' ? [] : [callerSource(text)],
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
  forward: byPattern(`^${TOKEN}$`, 'same, none, or the name of a header', (text) =>
    text === 'same' || text === 'none' ? text : { header: text },
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
  keySource: byPattern(
    `^(header:${TOKEN}|json:${POINTER})$`,
    'header:<name> or json:<pointer>, such as json:/id',
    keySource,
  ),
  method: byPattern(
    '^(?!CONNECT$)[A-Z][A-Z_-]*$',
    'a method in capital letters, other than CONNECT',
    (text) => text,
  ),
  /** For a mapping that may be turned off as a whole. */
  none: byPattern('^none$', 'none', () => null),
  off: byPattern('^off$', 'off', () => null),
  ownPath,
  ownPathOrOff: orWord(ownPath, 'off', null),
  pattern: byParser('a regular expression', parsePattern, ''),
  questions: whole(1, 1000),
  questionTarget: byParser(QUESTION_TARGET, parseQuestionTarget, '^/([^/#][^#]*)?$'),
  probeTarget: byParser(PROBE_TARGET, parseProbeTarget, '^/([^/#][^#]*)?$'),
  problemBase: byParser(PROBLEM_BASE, parseProblemBase, '^[A-Za-z][A-Za-z0-9+.-]*:.*[/:#=]$'),
  rateOrOff: orWord(
    byPattern(
      '^[1-9][0-9]{0,5}/[smhd]$',
      'a rate: a whole number of 1 to 999999 per s, m, h or d, such as 100/m',
      rate,
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
  timeout: bounded(DURATION, 1, MAX_TIMER),
  tombstone: orWord(bounded(DURATION, 0, MAX_RETENTION), 'off', 0),
  wait: bounded(DURATION, 1, MAX_WAIT),
  upstreamUrl: byParser(UPSTREAM, parseUpstreamUrl, '^(https?://[^/?#@]+/?|unix:/[^/].*)$'),
} satisfies Record<string, Scalar<unknown>>

export type ScalarName = keyof typeof SCALARS
export type ScalarValue<N extends ScalarName> = (typeof SCALARS)[N] extends Scalar<infer T> ? T : never
