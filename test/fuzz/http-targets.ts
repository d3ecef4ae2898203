import { parseItem } from 'structured-headers'
import { readKey } from '../../src/core/key.ts'
import { readPattern } from '../../src/core/key-pattern.ts'
import type { KeyPolicy } from '../../src/core/policy.ts'
import { covers, normalisePath, overlaps, parseTarget, pathPattern, Router } from '../../src/core/route.ts'
import { ecmaScript } from '../../src/describe/published.ts'
import { plainRequest } from '../../src/http/plain.ts'
import { KEY, ROUTE } from '../core/fixtures.ts'
import { same, type Target } from './engine.ts'
import { HTTPParser, methods } from './node-parser.ts'

interface Heard {
  readonly method: string
  readonly url: string
  readonly headers: readonly string[]
  body: string
  isWhole: boolean
}

/** The requests that Node hears; null: it refuses them. */
function asNode(bytes: Buffer): Heard[] | null {
  const heard: Heard[] = []
  const parser = new HTTPParser()
  parser.initialize(HTTPParser.REQUEST, {})
  let lines: string[] = []
  parser[HTTPParser.kOnHeaders] = (more: string[]) => void lines.push(...more)
  parser[HTTPParser.kOnHeadersComplete] = (
    _a: number,
    _b: number,
    headers: string[] | undefined,
    method: number,
    url: string,
  ) => {
    heard.push({ method: methods[method] ?? '', url, headers: headers ?? lines, body: '', isWhole: false })
    lines = []
    return 0
  }
  parser[HTTPParser.kOnBody] = (chunk: Buffer) => {
    const last = heard.at(-1) as Heard
    last.body += chunk.toString('latin1')
  }
  parser[HTTPParser.kOnMessageComplete] = () => {
    ;(heard.at(-1) as Heard).isWhole = true
  }
  return typeof parser.execute(bytes) === 'number' ? heard : null
}

const HEAD = 'POST /v1/payments HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\nContent-Length: 2\r\n\r\n{}'

/** What the proxy reads itself is what Node would read. */
export const httpHead: Target = {
  name: 'http-head',
  files: ['http/plain.ts', 'core/headers'],
  seeds: [
    HEAD,
    'GET /a?b=c HTTP/1.1\r\nhost:a\r\nX-A: \t 1 \t\r\nConnection: keep-alive\r\n\r\n',
    'DELETE //a/../b HTTP/1.1\r\nHost: a:1\r\nX-Latin: caf\xe9\r\n\r\n',
  ],
  // biome-ignore format: a list
  words: [
    '\r\n', '\r', '\n', '\0', ' ', '\t', ':', ' : ', 'Content-Length: 0', 'Content-Length: +1',
    'content-length:1', '00002', '0x2', 'Transfer-Encoding: chunked', 'Host: b', 'Connection: close',
    'Upgrade: h2c', 'Expect: 100-continue', 'HTTP/1.0', 'HTTP/1.1', 'HTTP/2.0', 'GET', 'PRI', '*',
    'http://a/', '%', '#', '\xe9', ';', ',', '1\r\na\r\n0\r\n\r\n',
  ],
  check(input) {
    const plain = plainRequest(Buffer.from(input), null as never)
    if (plain === null) return
    const { method, url, rawHeaders, framing } = plain
    const body = plain.takeBody().toString('latin1')
    const heard = asNode(input)
    const trimmed = rawHeaders.map((part) => part.replace(/^[\t ]+|[\t ]+$/g, ''))
    same('node', heard, [{ method, url, headers: trimmed, body, isWhole: true }])
    same('its length', framing.length, body.length)
  },
}

/** All spellings of a path that servers take for one are one; nothing else is. */
export const target: Target = {
  name: 'target',
  files: ['core/route'],
  seeds: [
    '/v1/payments',
    '/a/../b//c/./',
    '/%2e%2E/a%2Fb',
    '/a;v=1?b=c&d',
    'http://a/b',
    '/caf\xe9',
    '/\\a',
    '/a%',
    '*',
  ],
  // biome-ignore format: a list
  words: [
    '/', '//', '..', '.', '%2e', '%2F', '%5c', '%25', '%00', '\\', '?', '#', ';', ':', '%', '%zz', 'http://',
    '\xe9', ' ', '\t',
  ],
  check(input) {
    const text = input.toString('latin1')
    const read = parseTarget(text)
    if (read === null) return
    const { path, rawPath, query, origin } = read
    same(
      'put together',
      query === '' ? origin.replace(/\?$/, '') : origin,
      query === '' ? rawPath : `${rawPath}?${query}`,
    )
    same('normal twice', normalisePath(path), path)
    if (!/^(?:\/(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-F]{2})*)+$/.test(path))
      throw new Error(`not a path: ${path}`)
    if (/\/\.{1,2}(?:\/|$)|\/\//.test(path)) throw new Error(`dot segments or empty ones are left: ${path}`)
    const encoded = rawPath.replace(/[A-Za-z]/g, (char) => `%${char.charCodeAt(0).toString(16)}`)
    // Escapes that were there keep their digits.
    if (!rawPath.includes('%')) same('needless escapes', normalisePath(encoded), path)
    same('slashes', normalisePath(`/${rawPath}/`), path)
    // The URL standard's opinion, for paths that it does not change otherwise.
    // An empty segment before `..` is a matter of opinion: nginx drops it first, as this proxy does.
    if (/^[\w/.~-]*$/.test(rawPath) && !(rawPath.includes('//') && rawPath.includes('..'))) {
      const { pathname } = new URL(`http://h/${rawPath}`)
      same('as URL', path, pathname.replace(/\/+/g, '/').replace(/(?<=.)\/$/, ''))
    }
  },
}

/** What two patterns are said to have in common agrees with what they match. */
export const pattern: Target = {
  name: 'pattern',
  files: ['core/route'],
  seeds: [
    '/v1/payments\n/v1/:id\n/v1/payments',
    '/hooks/*\n/hooks/a/*\n/hooks/a/b',
    '/a/:b/c\n/a/b/:c\n/a/b/c',
    '/*\n/\n/',
  ],
  words: ['/', ':a', ':', '*', '/*', '\n', '%2F', '%41', '..', '.', '//', 'a', 'b', 'v1'],
  check(input) {
    const [a = '', b = '', path = ''] = input.toString('latin1').split('\n')
    // Others are refused by the configuration.
    const isNormal = (one: string): boolean => {
      const whole = one.endsWith('/*') ? one.slice(0, -2) || '/' : one
      return /^\/[\w:*/%.-]*$/.test(one) && normalisePath(whole) === whole
    }
    if (!isNormal(a) || !isNormal(b) || !path.startsWith('/')) return
    const [one, other] = [pathPattern(a, false), pathPattern(b, false)]
    const read = parseTarget(path)
    if (read === null) return
    const isMatched = (match: string): boolean =>
      new Router([
        {
          ...ROUTE,
          match: { methods: ['POST'], path: match, exact: false, case: 'sensitive', parameters: 'keep' },
        },
      ]).match('POST', read) !== null
    const [byOne, byOther] = [isMatched(a), isMatched(b)]
    if (covers(one, other) && byOther && !byOne)
      throw new Error(`${a} covers ${b}, and does not match ${path}`)
    if (!overlaps(one, other) && byOne && byOther) throw new Error(`${a} and ${b} both match ${path}`)
    same('symmetry', overlaps(one, other), overlaps(other, one))
    if (covers(one, other) && !overlaps(one, other)) throw new Error(`${a} covers ${b} without overlap`)
  },
}

const STRICT: KeyPolicy = { ...KEY, syntax: 'strict' }

/** A key is printable and bounded; strict is what RFC 9651 says, and lenient reads it alike. */
export const key: Target = {
  name: 'key',
  files: ['core/key.ts'],
  seeds: [
    'abc',
    '"abc"',
    '"a\\"b\\\\"',
    '"abc";v=1',
    ' \t"x" ',
    'a, b',
    '"',
    '8e03978e-40d5-43dd-bc93-6894a57f9324',
  ],
  // biome-ignore format: a list
  words: [
    '"', '\\', '\\"', '\\\\', ';', ';a=b', ',', ' ', '\t', '\x7f', '\x1f', '\xe9', '\0', 'a', '=?0', "'",
    ':', '{', '}',
  ],
  check(input) {
    const line = input.toString('latin1')
    if (/[\r\n\0]/.test(line)) return
    const read = (policy: KeyPolicy) =>
      readKey({ headers: ['Idempotency-Key', line], query: '' }, policy, null)
    const [lenient, strict] = [read(KEY), read(STRICT)]
    for (const one of [lenient, strict])
      if (one.kind === 'key' && !/^[\x20-\x7e]{1,255}$/.test(one.key))
        throw new Error(`a key like ${one.key}`)
    if (lenient.kind === 'missing' || strict.kind === 'missing') throw new Error('the line is there')
    if (strict.kind !== 'key') return
    same('lenient', lenient, strict)
    const [item, parameters] = parseItem(line.trim())
    same('as a structured field', strict.key, item)
    same('parameters', parameters.size, 0)
  },
}

/** A key pattern is refused, or decides in no time. */
export const keyPattern: Target = {
  name: 'key-pattern',
  files: ['core/key-pattern'],
  seeds: ['^[a-z]+$', '^(?:a|b){1,3}$', '[0-9a-f]{8}-[0-9a-f]{4}', '^\\w+$'],
  // biome-ignore format: a list
  words: [
    '(', ')', '(?:', '[', ']', '{1,9}', '{99999}', '*', '+', '?', '|', '^', '$', '\\w', '\\d', '\\b', '.',
    '(?=', '\\1', '-', '^a',
  ],
  check(input) {
    const text = input.toString('latin1')
    const read = readPattern(text)
    if (read.kind !== 'pattern') return
    const { pattern: source } = ecmaScript(read.pattern)
    if (source === undefined) return
    for (const one of ['', 'ab', 'a', 'abc-1', '0a1b2c3d-0000', '{"}'])
      same(`/${source}/ on ${one}`, read.pattern.test(one), new RegExp(source, 'u').test(one))
    const began = process.cpuUsage().user
    read.pattern.test(`${'a'.repeat(254)}!`)
    if (process.cpuUsage().user - began > 2_000_000) throw new Error('it takes seconds')
  },
}
