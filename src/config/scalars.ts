import { createRequire } from 'node:module'
import { REQUEST_HEADER, RESPONSE_HEADER, TOKEN } from '../core/headers.ts'
import type { KeyPattern } from '../core/key-pattern.ts'
import type { CallerSource, CertificateAttribute, KeySource, LabelSource, Rate } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import { RPC_CODES } from '../core/rpc/codes.ts'
import {
  byParser,
  byTest,
  duration,
  type Parsed,
  parsed,
  refused,
  type Scalar,
  size,
  suggesting,
} from './units.ts'
import {
  address,
  cacheUrl,
  cidr,
  hostLine,
  hostName,
  jwksUrl,
  ownPath,
  primaryUrl,
  probeTarget,
  problemBase,
  queryTarget,
  routePath,
  storeUrl,
  upstreamUrl,
} from './urls.ts'

const DAY: Millis = 86_400_000
/** Node's timers hold 31 bits: a longer one would fire at once. */
const MAX_TIMER = 24 * DAY
const MAX_RETENTION = 3650 * DAY
/** Longer than any client keeps a connection open for a response. */
const MAX_WAIT = 3_600_000
/** Each takes the memory and the connections of a replica. */
const MAX_WORKERS = 128
/** Larger ones do not fit into Node's limit for a request head (16 KiB). */
const MAX_KEY = 8192
/** Bodies are held in memory, and Redis limits values to 512 MiB. */
const MAX_BODY = 256 * 1024 ** 2
/** Bytes of a response's head, which is held in memory for each connection. */
export const MAX_HEAD = 1024 ** 2

/** A status or a class of them. */
export const STATUS = `^([2-5][0-9]{2}|[2-5]xx|${RPC_CODES.join('|')})$`
const POINTER = '(/([^~/]|~[01])*)+'
/** Names of form fields and query parameters, of characters that every encoder escapes the same way. */
const FIELD = '[A-Za-z0-9_.:~!$@*\\[\\]-]+'
/** As browsers send it (RFC 6454 §6.2): in lower case, without a path and without the default port. */
const ORIGIN =
  '(\\*|(?!http://[^/]*:80$|https://[^/]*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\\[[0-9a-f:.]+\\])(:[0-9]{1,5})?)'
const ORIGIN_ALLOWED = 'an origin, such as https://shop.example, or *'
/** Names of claims are often URLs. */
const CALLER = `^((header|cookie):${TOKEN}|jwt:[!-~]+|tls:(san-uri|san-dns|subject|fingerprint))$`
const CALLERS =
  'header:<name>, cookie:<name>, jwt:<claim>, tls:san-uri, tls:san-dns, tls:subject or tls:fingerprint'

const REQUEST_LINES = Object.values(REQUEST_HEADER).join('|').toLowerCase()
const RESPONSE_LINES = Object.values(RESPONSE_HEADER).join('|').toLowerCase()
/** Headers of the connection or of this proxy: a client's value does not reach the upstream. */
const MADE_HERE = `cdn-loop|connection|content-length|expect|forwarded|host|http2-settings|${REQUEST_LINES}|keep-alive|proxy-.*|te|trailer|transfer-encoding|upgrade|via|x-forwarded-.*`
const SOURCE_MADE_HERE = new RegExp(`^header:(?:${MADE_HERE})$`, 'i')
/** Headers with a meaning of their own: a key in one would change the meaning of the request, or its caller. */
const TAKEN = new RegExp(
  `^(?:${MADE_HERE}|accept(?:-.*)?|api-key|authorization|cache-control|ce-.*|content-.*|cookie|date|${RESPONSE_LINES}|if-.*|origin|range|referer|repeatability-first-sent|sec-.*|traceparent|tracestate|user-agent|x-api-key|x-http-method-override|x-real-ip)$`,
  'i',
)
/** Surrounding spaces would be stripped on the way. */
const HEADER_TEXT = /^[!-~\x80-\xff]([\t -~\x80-\xff]*[!-~\x80-\xff])?$/
const HEADER_TEXT_ALLOWED = 'the value of a header: not empty, on one line, without spaces around it'

function byPattern(pattern: string, allowed: string): Scalar<string>
function byPattern<T>(
  pattern: string,
  allowed: string,
  read: (text: string) => T,
  print?: (value: T) => unknown,
): Scalar<T>
function byPattern(
  pattern: string,
  allowed: string,
  read: (text: string) => unknown = (text) => text,
  print?: (value: unknown) => unknown,
): Scalar<unknown> {
  const regExp = new RegExp(pattern)
  const parse = (text: string) => (regExp.test(text) ? parsed(read(text)) : refused(text, allowed))
  return byParser(allowed, pattern, parse, print)
}

/** `scalar`, or a word for a special value. */
function orWord<T, W>(scalar: Scalar<T>, word: string, value: W): Scalar<T | W> {
  const { type, pattern } = scalar.schema
  const schema =
    pattern === undefined
      ? { type: [...[type].flat(), 'string'], pattern: `^${word}$` }
      : { pattern: `^${word}$|${pattern}` }
  return {
    word,
    schema: { ...scalar.schema, ...schema },
    allowed: `${word}, or ${scalar.allowed}`,
    print: (found) => (found === value ? word : scalar.print?.(found as T)),
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

/** `scalar` without values that match `unfit`, which ignores case, as a JSON Schema cannot. */
function except<T>(scalar: Scalar<T>, unfit: RegExp, allowed: string): Scalar<T> {
  return { ...scalar, parse: (text) => (unfit.test(text) ? refused(text, allowed) : scalar.parse(text)) }
}

/** `Authorization` in place of `header:authorization`. */
function headerHinted<T>(scalar: Scalar<T>): Scalar<T> {
  return suggesting(scalar, (text) =>
    /^(authorization|[a-z0-9]+(-[a-z0-9]+)+)$/i.test(text) ? `header:${text.toLowerCase()}` : null,
  )
}

/** `shop.example` or `https://Shop.example/` in place of `https://shop.example`. */
function originHinted<T>(scalar: Scalar<T>): Scalar<T> {
  return suggesting(scalar, (text) => {
    const full = /^[a-z0-9-]+(\.[a-z0-9-]+)+(:\d+)?$/i.test(text) ? `https://${text}` : text
    const url = /^[a-z][a-z0-9+.-]*:\/\//i.test(full) ? URL.parse(full) : null
    return url !== null && new RegExp(`^${ORIGIN}$`).test(url.origin) ? url.origin : null
  })
}

function nameAndKind(text: string): [kind: string, name: string] {
  const colon = text.indexOf(':')
  return [text.slice(0, colon), text.slice(colon + 1)]
}

function callerSource(text: string): CallerSource {
  const [kind, name] = nameAndKind(text)
  if (kind === 'header') return { kind, name: name.toLowerCase() }
  if (kind === 'tls') return { kind, name: name as CertificateAttribute }
  return { kind: kind === 'cookie' ? kind : 'jwt', name }
}

function keySource(text: string): KeySource {
  const [kind, name] = nameAndKind(text)
  if (kind === 'json') return { kind, pointer: name }
  if (kind === 'form' || kind === 'query') return { kind, name }
  return { kind: 'header', name: name.toLowerCase() }
}

function labelSource(text: string): LabelSource {
  if (text.startsWith('/')) return { kind: 'json', pointer: text }
  if (text.startsWith('path::')) return { kind: 'path', name: text.slice('path::'.length) }
  return { kind: 'header', name: text.slice('header:'.length).toLowerCase() }
}

function labelText(source: LabelSource): string {
  return source.kind === 'json'
    ? source.pointer
    : `${source.kind}:${source.kind === 'path' ? ':' : ''}${source.name}`
}

function sourceText(source: CallerSource | KeySource): string {
  return `${source.kind}:${'pointer' in source ? source.pointer : source.name}`
}

/** The other form of these scalars is a list. */
function noneOrList(values: readonly string[]): unknown {
  return values.length === 0 ? 'none' : values
}

const RATE_UNITS: Readonly<Record<string, Millis>> = { s: 1000, m: 60_000, h: 3_600_000, d: DAY }

function rate(text: string): Rate {
  const [count = '', unit = ''] = text.split('/')
  return { count: Number(count), per: RATE_UNITS[unit] as Millis }
}

function rateText({ count, per }: Rate): string {
  return `${count}/${Object.entries(RATE_UNITS).find(([, unit]) => unit === per)?.[0]}`
}

const PATTERN = 'an RE2 regular expression for the whole key, such as [A-Za-z0-9_-]{16,64}'
const require = createRequire(import.meta.url)

/** Anchored: with a forgotten anchor, longer keys would match. */
function parsePattern(text: string): Parsed<KeyPattern | null> {
  if (text === '') return parsed(null)
  // Loaded on demand: RE2 takes 24 ms and 4 MB.
  const { readPattern } = require(
    `../core/key-pattern.${import.meta.url.endsWith('.ts') ? 'ts' : 'js'}`,
  ) as typeof import('../core/key-pattern.ts')
  const reading = readPattern(text)
  return reading.kind === 'pattern' ? parsed(reading.pattern) : refused(text, `${PATTERN} (${reading.why})`)
}

/** May be a credential: errors do not show it. */
function parseHeaderText(text: string): Parsed<string> {
  const message = `found something else; allowed: ${HEADER_TEXT_ALLOWED}`
  return HEADER_TEXT.test(text) ? parsed(text) : { ok: false, message }
}

function parseFlag(text: string): Parsed<boolean> {
  return /^(true|false)$/.test(text) ? parsed(text === 'true') : refused(text, 'true or false')
}

const claimValue = byPattern(
  '^(?!none$)[^\\x00-\\x1f\\x7f]+$',
  'a string other than none, without control characters',
)
const filePath = byPattern('^[^\\0]+$', 'the path of a file')

/** Every kind of scalar by its name in the schema's definitions. */
// biome-ignore format: a table
export const SCALARS = {
  address,
  answerStatus: whole(200, 599),
  addressOrNone: orWord(address, 'none', null),
  audience: claimValue,
  audiences: { word: 'none', ...byPattern(`^none$|${claimValue.schema.pattern}`, 'none, a string without control characters, or a list of such strings',
    (text) => (text === 'none' ? [] : [text]), noneOrList) },
  bucket: orWord(duration(1, MAX_RETENTION), 'none', null),
  protocol: byPattern('^(h2|http/1\\.1)$', 'h2 or http/1.1'),
  caller: headerHinted(byPattern(CALLER, CALLERS, callerSource, sourceText)),
  callers: { word: 'none', ...headerHinted(byPattern(`^none$|${CALLER}`, `none, ${CALLERS}, or a list of them`,
    (text) => (text === 'none' ? [] : [callerSource(text)]), (sources) => noneOrList(sources.map(sourceText)))) },
  claimOrNone: orWord(claimValue, 'none', null),
  cidr,
  bodySize: size(1, MAX_BODY),
  bufferSize: size(1, 1024 ** 4),
  headSize: size(1024, MAX_HEAD),
  count: whole(1, 1_000_000),
  delay: duration(0, MAX_TIMER),
  directoryPathOrOff: orWord(byPattern('^[^\\0]+$', 'the path of a directory'), 'off', null),
  filePath,
  filePathOrNone: orWord(filePath, 'none', null),
  flag: { ...byParser('true or false', '', parseFlag), schema: { type: 'boolean' } },
  fieldName: byPattern(`^${FIELD}$`, 'the name of a form field'),
  graceOrOff: orWord(duration(1000, 60_000), 'off', 0),
  forward: { word: 'none', ...except(
    byPattern(`^${TOKEN}$`, 'same, none, or the name of a header',
      (text) => (text === 'same' || text === 'none' ? text : { header: text }),
      (value) => (typeof value === 'string' ? value : value.header)),
    TAKEN, 'same, none, or the name of a header that has no meaning of its own, such as X-Request-Key') },
  hostLine,
  headerName: byPattern(`^${TOKEN}$`, 'the name of a header', (text) => text.toLowerCase()),
  headerText: byParser(HEADER_TEXT_ALLOWED, HEADER_TEXT.source, parseHeaderText),
  hostName,
  jsonPointer: byPattern(`^${POINTER}$`, 'a JSON pointer, such as /sentAt or /items/0/id'),
  jsonPart: byPattern(`^(${POINTER})?$`, 'a JSON pointer, such as /data/0; empty: all of it'),
  jsonText: {
    ...byTest('a string, a number, true or false', '', (text) => text !== ''),
    schema: { type: ['string', 'number', 'boolean'], pattern: '^[^\\0]+$' },
  },
  jwksUrl: orWord(jwksUrl, 'none', null),
  keyLength: whole(1, MAX_KEY),
  grpcMethod: byPattern('^[A-Za-z_][A-Za-z0-9_.]*/([A-Za-z_][A-Za-z0-9_]*|[*])$',
    'a method, package.Service/Method, or all of a service, package.Service/*'),
  keySource: except(
    headerHinted(byPattern(`^(header:${TOKEN}|(form|query):${FIELD}|json:${POINTER})$`,
      'header:<name>, query:<name>, form:<field> or json:<pointer>, such as json:/id', keySource, sourceText)),
    SOURCE_MADE_HERE, 'a header that reaches the upstream as the client sent it'),
  labelSourceOrOff: orWord(except(
    byPattern(`^(${POINTER}|header:${TOKEN}|path::[^/*:]+)$`,
      'a JSON pointer such as /order_id, header:<name> or path::<name>', labelSource, labelText),
    /^header:(?:(?:proxy-)?authorization|cookie|idempotency-key|.*(?:token|secret|password|api-?key|session|signature).*)$/i,
    'a source that holds no key and no credential, since labels are shown and logged'), 'off', null),
  method: byPattern('^(?!CONNECT$)[A-Z][A-Z_-]*$', 'a method in capital letters, other than CONNECT'),
  // The word that turns a mapping off.
  none: { word: 'none', ...byPattern('^none$', 'none', () => null, () => 'none') },
  off: { word: 'off', ...byPattern('^off$', 'off', () => null, () => 'off') },
  origin: originHinted(byPattern(`^${ORIGIN}$`, ORIGIN_ALLOWED)),
  origins: originHinted(byPattern(`^${ORIGIN}$`, ORIGIN_ALLOWED, (text) => [text], (values) => values)),
  outcomeStatus: { ...byPattern(STATUS, 'a status (200 to 599), a class (2xx to 5xx) or a gRPC code, such as UNAVAILABLE'),
    schema: { type: ['integer', 'string'], pattern: `^([2-5]xx|${RPC_CODES.join('|')})$`, minimum: 200, maximum: 599 } },
  ownPath,
  ownPathOrOff: orWord(ownPath, 'off', null),
  pattern: byParser(PATTERN, '', parsePattern,
    (pattern) => (pattern === null ? '' : pattern.source.slice('^(?:'.length, -')$'.length))),
  queries: whole(1, 1000),
  queryTarget,
  probeTarget,
  problemBase,
  rateOrOff: orWord(byPattern('^[1-9][0-9]{0,5}/[smhd]$',
    'a rate: a whole number of 1 to 999999 per s, m, h or d, such as 100/m', rate, rateText), 'off', null),
  respondWithin: orWord(duration(1, MAX_TIMER), 'none', null),
  retention: duration(1, MAX_RETENTION),
  routeName: byPattern('^(?!default$)[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$',
    'up to 64 letters, digits, `_`, `.`, `-`, and not `default`, the name of requests that match no route'),
  routePath,
  primaryUrl,
  cacheUrl,
  sealingKeyId: byPattern('^[A-Za-z0-9]{1,32}$', 'up to 32 letters and digits, such as k2026'),
  storeUrl,
  serviceName: byPattern('^[A-Za-z0-9_.-]{1,64}$', 'up to 64 letters, digits, `_`, `.`, `-`, such as payments'),
  timeout: duration(1, MAX_TIMER),
  tombstone: orWord(duration(0, MAX_RETENTION), 'off', 0),
  wait: duration(1, MAX_WAIT),
  workers: orWord(whole(1, MAX_WORKERS), 'auto', 'auto' as const),
  upstreamUrl,
} satisfies Record<string, Scalar<unknown>>

export type ScalarName = keyof typeof SCALARS
export type ScalarValue<N extends ScalarName> = (typeof SCALARS)[N] extends Scalar<infer T> ? T : never
