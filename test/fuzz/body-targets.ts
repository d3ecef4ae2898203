import { formContent, multipartParts } from '../../src/core/body/form.ts'
import { canonicalJson } from '../../src/core/body/json.ts'
import { fingerprintOf, type RequestContent } from '../../src/core/fingerprint.ts'
import { contentType, formDataBoundary } from '../../src/core/headers.ts'
import { atOnce } from '../../src/core/steps.ts'
import { FINGERPRINT } from '../core/fixtures.ts'
import { canonical, decodeUtf8, parseLossless } from '../core/json-tree.ts'
import { same, type Target } from './engine.ts'

/** The product's reader and the slow one that records were made by: one text. */
export const json: Target = {
  name: 'json',
  files: ['core/body/json'],
  seeds: [
    '{"b":1,"a":[2,"x",null,true]}',
    '{"amount":10.50,"currency":"EUR","é":"😀\\u0041\\n"}',
    '[1e21,5e-324,9007199254740993,-0]',
    '{"a":{"b":{"a":1,"b":2}},"c":[{"x":1},{"x":2}]}',
  ],
  // biome-ignore format: a list
  words: [
    '{', '}', '[', ']', '"', ',', ':', '\\u0041', '\\ud83d\\ude00', '\\ud800', '\\', '\\n', '1e21', '-0',
    '0.1', '1.0', '9007199254740993', '1e400', 'null', 'true', '"a":', '{"a":1}', ' ', '\n', '\xc3\xa9',
    '\xf0\x9f\x98\x80', '\xff', '\0', '{"aaaaaaaaaaaaaaaaa":1}', '[[[[[[[[',
  ],
  check(input) {
    const text = decodeUtf8(input)
    const tree = text === null ? null : parseLossless(text)
    const expected = tree === null ? null : canonical(tree)
    same('canonical text', canonicalJson(Buffer.from(input))?.toString() ?? null, expected)
    if (expected === null) return
    same('canonical twice', canonicalJson(Buffer.from(expected))?.toString(), expected)
    const parsed = parseLossless(JSON.stringify(JSON.parse(text as string)))
    same('what JSON.parse reads', parsed === null ? null : canonical(parsed), expected)
  },
}

const FORM = ['Content-Type', 'application/x-www-form-urlencoded']

/** Equal spellings are equal to URLSearchParams, which most servers read alike. */
export const form: Target = {
  name: 'form',
  files: ['core/body/form', 'core/headers'],
  seeds: ['a=1&b=2', 'a=%20&b=+&c=%41%e9', 'a%5B%5D=1&a%5b%5d=2&&=&b', '%c3%a9=%C3%A9'],
  // biome-ignore format: a list
  words: [
    '&', '=', '+', '%20', '%2B', '%26', '%3D', '%', '%zz', '%c3%a9', '%ff', ';', '\xc3\xa9', '\xff', '%00',
    '[]', '#',
  ],
  check(input) {
    const spelled = atOnce(formContent(FORM, Buffer.from(input)))
    if (spelled === null) return
    const pairs = (bytes: Buffer): string[][] => [
      // It leaves out a question mark at the beginning.
      ...new URLSearchParams(`&${bytes.toString()}`),
    ]
    same('pairs', pairs(spelled), pairs(input))
    same('spelled twice', atOnce(formContent(FORM, Buffer.from(spelled)))?.toString(), spelled.toString())
  },
}

const BOUNDARY = 'XyZ'
const MULTIPART = ['Content-Type', `multipart/form-data; boundary=${BOUNDARY}`]
const PARTS = `--${BOUNDARY}\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--${BOUNDARY}\r\nContent-Disposition: form-data; name="f"; filename="x"\r\nContent-Type: text/plain\r\n\r\nfile\r\n--${BOUNDARY}--\r\n`

/** Put together with the boundary between them, the parts are the body: nothing is lost, and nobody can split it otherwise. */
export const multipart: Target = {
  name: 'multipart',
  files: ['core/body/form', 'core/headers'],
  seeds: [PARTS, `--${BOUNDARY}--`, `--${BOUNDARY}\r\n\r\n\r\n--${BOUNDARY}--\r\n`],
  // biome-ignore format: a list
  words: [
    '\r\n', '--', `--${BOUNDARY}`, `\r\n--${BOUNDARY}`, BOUNDARY, `--${BOUNDARY}--`, '\n', ' ', 'name="a"',
    '\0', '\xff',
  ],
  check(input) {
    const split = atOnce(multipartParts(MULTIPART, Buffer.from(input)))
    if (split === null) return
    const delimiter = Buffer.from(`\r\n--${BOUNDARY}`)
    const again = split.parts.flatMap((part) => [delimiter, Buffer.from('\r\n'), part])
    same('the body', Buffer.concat([...again, delimiter, Buffer.from(split.closing)]).subarray(2), input)
    const clean = input.toString('latin1').split(BOUNDARY).length - 1
    same('boundaries', split.parts.length + 1, clean)
  },
}

/** Reading a media type never fails, and knows no boundary that could end anywhere else. */
export const mediaType: Target = {
  name: 'media-type',
  files: ['core/headers'],
  seeds: [
    'application/json; charset=utf-8',
    'multipart/form-data; boundary="a b"',
    'text/plain;a=b;a=c',
    'multipart/form-data; boundary=x; boundary=y',
  ],
  words: [';', '=', '"', '\\', 'boundary=', 'charset=', 'utf-8', '/', ' ', '\t', ',', '\xe9', '+json', '*'],
  check(input) {
    const line = input.toString('latin1')
    if (/[\r\n\0]/.test(line)) return
    const headers = ['Content-Type', line]
    same('twice', contentType(headers), contentType([...headers]))
    const boundary = formDataBoundary(headers)
    if (boundary !== null && (boundary === '' || boundary.length > 70 || /[\r\n"\\]/.test(boundary)))
      throw new Error(`a boundary like ${JSON.stringify(boundary)}`)
    same('lines', formDataBoundary([...headers, ...headers]), null)
  },
}

/** Whatever is compared is compared whole: a changed byte changes the raw fingerprint, and the canonical one only with what it means. */
export const fingerprint: Target = {
  name: 'fingerprint',
  files: ['core/fingerprint', 'core/body/', 'core/headers'],
  seeds: [
    'application/json\n{"a":1}',
    'application/x-www-form-urlencoded\na=1&b=%20',
    `multipart/form-data; boundary=${BOUNDARY}\n${PARTS}`,
    'text/plain\nx',
  ],
  // biome-ignore format: a list
  words: [
    '\n', '{', '}', '"', ' ', '%41', 'application/json', '+json', '; charset=utf-8', BOUNDARY, '1.0', '1',
    '\xff',
  ],
  check(input) {
    const at = input.indexOf(10)
    if (at < 0 || /[\r\0]/.test(input.toString('latin1', 0, at))) return
    const content = (body: Buffer): RequestContent => ({
      method: 'POST',
      path: '/a',
      query: '',
      target: '/a',
      headers: ['Content-Type', input.toString('latin1', 0, at)],
      body,
    })
    const body = input.subarray(at + 1)
    const of = (one: Buffer, mode: 'auto' | 'raw'): string =>
      fingerprintOf(content(Buffer.from(one)), { ...FINGERPRINT, body: mode }).toString('hex')
    same('twice', of(body, 'auto'), of(body, 'auto'))
    const other = Buffer.concat([body, Buffer.from('x')])
    if (of(body, 'raw') === of(other, 'raw')) throw new Error('another byte, the same fingerprint')
    if (of(body, 'auto') === of(other, 'auto')) throw new Error('another body, the same fingerprint')
  },
}
