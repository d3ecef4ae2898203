import fc from 'fast-check'
import t from 'tap'
import {
  type Field,
  formContent,
  formField,
  multipartContent,
  multipartParts,
  queryField,
} from '../../src/core/body/form.ts'
import { fingerprintOf } from '../../src/core/fingerprint.ts'
import type { FingerprintPolicy } from '../../src/core/policy.ts'
import { atOnce, type Steps } from '../../src/core/steps.ts'
import { character, FINGERPRINT, lines, request, words } from './fixtures.ts'

const FORM = 'application/x-www-form-urlencoded'
const URLENCODED = ['Content-Type', FORM]
const KiB = 1024
const typeOf = (boundary: string): string => `multipart/form-data; boundary=${boundary}`

/** The fingerprint of a body of this media type. */
const sent = (
  body: string | Buffer,
  type: string,
  more: Partial<FingerprintPolicy> = {},
  further: readonly string[] = [],
): string =>
  fingerprintOf(request(body, { headers: ['Content-Type', type, ...further] }), {
    ...FINGERPRINT,
    ...more,
  }).toString('hex')

const form = (body: string | Buffer, type = FORM): string => sent(body, type)
/** Whether the body is read as a form, or as parts, rather than as bytes. */
const isForm = (body: string | Buffer, type = FORM): boolean =>
  atOnce(formContent(['Content-Type', type], Buffer.from(body as string))) !== null
const isMultipart = (body: string | Buffer, type: string): boolean =>
  atOnce(multipartContent(['Content-Type', type], Buffer.from(body as string))) !== null

t.test('F15 + for a space and needless escapes leave the fingerprint of a form unchanged', async (t) => {
  for (const [one, two] of [
    ['a=b+c', 'a=b%20c'],
    ['a+b=c', 'a%20b=c'],
    ['a=%41%7a%7E', 'a=Az~'],
    ['%61=b', 'a=b'],
    ['a=%2f', 'a=/'],
    ['mail=a%40b.c', 'mail=a@b.c'],
    ['a=%21%27%28%29%2a%7e', "a=!'()*~"],
    ['a=%c3%a9', 'a=%C3%A9'],
    ['a=1%2b1', 'a=1%2B1'],
  ] as const) {
    t.equal(form(one), form(two), `${one} ${two}`)
    t.equal(sent(one, FORM, { body: 'form' }), sent(two, FORM, { body: 'form' }), 'under form')
    for (const type of ['text/plain', 'application/json'])
      t.not(sent(one, type, { body: 'form' }), sent(two, type, { body: 'form' }), `not a form: ${type}`)
    t.not(sent(one, FORM, { body: 'raw' }), sent(two, FORM, { body: 'raw' }), 'under raw')
    t.not(sent(one, 'text/plain'), sent(two, 'text/plain'), 'under another media type')
  }
  t.equal(form('a=b+c', `${FORM}; charset=UTF-8`), form('a=b%20c'))
  t.equal(form('a=b+c', 'Application/X-WWW-Form-Urlencoded ; charset = "utf-8"'), form('a=b%20c'))
})

t.test('F15 the order of pairs, and anything else a parser may see, changes the fingerprint', async (t) => {
  const bodies = [
    words`= & && a a= =a a& &a a&& a== a=& a=1&b=2 b=2&a=1 a=1&a=2 a=2&a=1 a=1&&b=2 a=1;b=2 a=1%3Bb=2 a=1%26b=2
      a=1%26b%3D2 a=b=c a=b%3Dc a=b,c a=b%2Cc a[]=1 a%5B%5D=1 a=+ a=%2B a=%2520 a=%00 a=%00b a=b%00 a=%0A a=%0D%0A
      a=# a=%23 a=%C3%A9 a=e%CC%81 a=A A=a`,
    ['', 'a= ', 'a=\u0000', 'a=\n', 'a=\u00e9'],
  ].flat()
  t.equal(new Set(bodies.map((body) => form(body))).size, bodies.length)
  for (const body of bodies) t.ok(isForm(body), body)
})

t.test('F15 a form that cannot be read without guessing is compared byte by byte', async (t) => {
  for (const [one, two] of [
    ['a=%', 'a=%25'],
    ['a=%zz&b=+', 'a=%zz&b=%20'],
    ['a=%4', 'a=%4&'],
    ['a=%%34%31', 'a=%41'],
    ['a=%%32B', 'a=%2B'],
    ['a=%4g&b=%41', 'a=%4g&b=A'],
    ['a=%u0041', 'a=%u004%31'],
    ['a=%FF&b=+', 'a=%FF&b=%20'],
    ['a=%ff', 'a=%FF'],
    ['a=%C3&b=%41', 'a=%C3&b=A'],
    ['a=%ED%A0%80+', 'a=%ED%A0%80%20'],
    [Buffer.from('a=\xe9+', 'latin1'), Buffer.from('a=\xe9%20', 'latin1')],
  ] as const) {
    t.not(form(one), form(two), `${one.toString()} ${two.toString()}`)
    t.equal(form(one), form(one))
    t.notOk(isForm(one), one.toString())
  }
  t.ok(
    isForm(Buffer.from('a=%C3\xa9', 'latin1')),
    'a character with only some bytes escaped is one character',
  )
  for (const parameter of ['iso-2022-jp', 'utf-16', 'utf-8; charset=utf-16', '"utf-8']) {
    const type = `${FORM}; charset=${parameter}`
    t.notOk(isForm('a=b', type), type)
    t.not(form('a=b+c', type), form('a=b%20c', type), 'the escapes may be parts of characters')
  }
  t.not(form('a=b+c', `${FORM}, text/plain`), form('a=b%20c', `${FORM}, text/plain`))
})

t.test('a form has one spelling, if it is a form in UTF-8 without invalid escapes', async (t) => {
  const spelled = (body: string, headers = URLENCODED): string | undefined =>
    atOnce(formContent(headers, Buffer.from(body, 'latin1')))?.toString('latin1')
  for (let byte = 0; byte < 128; byte++) {
    const char = String.fromCharCode(byte)
    const hex = byte.toString(16).padStart(2, '0')
    const kept = /[A-Za-z0-9-._~!'()*:@/?$]/.test(char) ? char : `%${hex.toUpperCase()}`
    t.equal(spelled(`a%${hex}b&c`), `a${char === ' ' ? '+' : kept}b&c`, hex)
  }
  t.equal(spelled('%c3%A9=\xc3%a9'), '%C3%A9=\xc3%A9')
  t.equal(spelled('a=b+c &d'), 'a=b+c &d')
  t.equal(spelled(''), '')
  for (const body of ['%', 'a=%4', '%4g', '%g4', '%%41', '\xe9', '\xe9%41', '%e9', '%c3%28', 'a%41\xc3'])
    t.equal(spelled(body), undefined, body)
  for (const type of ['text/plain', `${FORM}; charset=utf-16`])
    t.equal(spelled('a=1', ['Content-Type', type]), undefined, type)
})

t.test('a body with Content-Encoding is compared as sent, whatever its media type', async (t) => {
  for (const [one, two, types, mode, coding] of [
    ['a=b+c', 'a=b%20c', [FORM, FORM], 'form', 'gzip'],
    [
      multipart([part('1')], 'b1'),
      multipart([part('1')], 'b2'),
      [typeOf('b1'), typeOf('b2')],
      'multipart',
      'br',
    ],
  ] as const)
    for (const body of ['auto', mode] as const) {
      const encoded = ['Content-Encoding', coding]
      t.equal(sent(one, types[0], { body }), sent(two, types[1], { body }))
      t.not(sent(one, types[0], { body }, encoded), sent(two, types[1], { body }, encoded))
    }
  t.equal(sent('x', FORM, { body: 'none' }, ['Content-Encoding', 'gzip']), sent('y', FORM, { body: 'none' }))
})

t.test('F14 F15 a body of another kind than its mode expects is compared as under auto', async (t) => {
  const upload = (boundary: string, body: 'form' | 'json' | 'multipart' | 'raw') =>
    sent(multipart(UPLOAD, boundary), typeOf(boundary), { body })
  for (const body of ['form', 'json', 'multipart'] as const) {
    t.equal(upload('x1', body), upload('x2', body), `a new boundary under ${body}`)
    t.equal(sent('a=+&b=%7E', FORM, { body }), sent('a=%20&b=~', FORM, { body }), `a form under ${body}`)
    t.not(sent('a=1&b=2', FORM, { body }), sent('b=2&a=1', FORM, { body }))
    const json = (text: string) => sent(text, 'application/json', { body })
    t.equal(json('{"a":1,"b":2}'), json('{"b":2, "a":1}'), `JSON under ${body}`)
    for (const broken of ['{"a":1', 'a=%zz', '--x1\r\n'])
      for (const type of [
        'application/json',
        typeOf('x1'),
        'text/plain',
        ...(broken === 'a=%zz' ? [FORM] : []),
      ])
        t.equal(sent(broken, type, { body }), sent(broken, type, { body: 'raw' }), `${broken} as ${type}`)
  }
  const plain = (text: string) => sent(text, 'text/plain', { body: 'json' })
  t.equal(plain('{"a":1,"b":2}'), plain('{"b":2,"a":1}'), 'json reads JSON under any media type')
  t.not(upload('x1', 'raw'), upload('x2', 'raw'))
  const modes = ['raw', 'form', 'json', 'none'] as const
  t.equal(new Set(modes.map((body) => sent('1', FORM, { body }))).size, 4, 'each mode has its fingerprint')
  t.equal(sent('1', FORM, { body: 'multipart' }), sent('1', FORM, { body: 'form' }), 'but these read alike')
})

t.test('ignore and only, which point into JSON, drop nothing from other bodies', async (t) => {
  for (const more of [{ ignore: ['/a'] }, { only: ['/b'] }]) {
    t.not(sent('a=1&b=2', FORM, more), sent('a=2&b=2', FORM, more))
    const upload = (value: string) => sent(multipart([part(value)], 'b1'), typeOf('b1'), more)
    t.not(upload('1'), upload('2'))
  }
})

t.test('F15 two spellings share a fingerprint exactly when they are the same form', async () => {
  const text = fc.string({ unit: character, maxLength: 4 })
  const pairs = fc.array(fc.record({ name: text, value: fc.option(text) }), { maxLength: 3 })
  const encoders: ((text: string) => string)[] = [
    encodeURIComponent,
    (text) => new URLSearchParams({ x: text }).toString().slice(2),
    (text) => [...Buffer.from(text)].map((byte) => `%${byte.toString(16).padStart(2, '0')}`).join(''),
  ]
  const write = (
    list: readonly { name: string; value: string | null }[],
    encode: (text: string) => string,
  ): string =>
    list.map(({ name, value }) => encode(name) + (value === null ? '' : `=${encode(value)}`)).join('&')
  const encoder = fc.constantFrom(...encoders)
  fc.assert(
    fc.property(pairs, pairs, encoder, encoder, (one, two, by, other) => {
      const text = write(one, by)
      const same = write(one, encodeURIComponent) === write(two, encodeURIComponent)
      return form(text) === form(write(one, other)) && (form(text) === form(write(two, other))) === same
    }),
    { numRuns: 300 },
  )
})

interface Part {
  readonly head: string
  readonly content: string | Buffer
}
function part(content: string | Buffer, name = 'a', more = ''): Part {
  return { head: `Content-Disposition: form-data; name="${name}"${more}`, content }
}

function multipart(parts: readonly Part[], boundary = 'XYZ', end = '--\r\n'): Buffer {
  return Buffer.concat([
    ...parts.flatMap(({ head, content }) => [
      Buffer.from(`--${boundary}\r\n${head}\r\n\r\n`),
      Buffer.from(content as string),
      Buffer.from('\r\n'),
    ]),
    Buffer.from(`--${boundary}${end}`),
  ])
}
const print = (parts: readonly Part[], boundary = 'b1'): string =>
  sent(multipart(parts, boundary), typeOf(boundary))

const FILE = '; filename="a.bin"\r\nContent-Type: application/octet-stream'
const UPLOAD = [part('Ada', 'owner'), part(Buffer.from([0, 1, 13, 10, 255]), 'file', FILE)]

t.test('F14 multipart bodies that differ only in their boundary have the same fingerprint', async (t) => {
  const one = print(UPLOAD, '----WebKitFormBoundary7MA4YWxk')
  for (const boundary of words`x1 ----formdata-undici-012345 ------------------------d74496d66958873e a'b+_.-c`)
    t.equal(print(UPLOAD, boundary), one, boundary)
  for (const type of [
    'multipart/form-data; boundary="x1"',
    'Multipart/Form-Data;Boundary=x1',
    'multipart/form-data; charset=utf-8; boundary=x1',
    'multipart/form-data; boundary=x1 ; charset=UTF-8',
  ])
    t.equal(sent(multipart(UPLOAD, 'x1'), type), one, type)
  t.equal(sent(multipart(UPLOAD, 'a/b:=?(),'), 'multipart/form-data; boundary="a/b:=?(),"'), one)
  t.equal(sent(multipart(UPLOAD, 'x1'), typeOf('x1'), { body: 'multipart' }), one)
})

t.test('F14 names, filenames, types, contents, number and order of parts count', async (t) => {
  const rows: (readonly Part[])[] = [
    [],
    ...['1', '2', '', '1\r\n'].map((content) => [part(content)]),
    ...['b', 'A'].map((name) => [part('1', name)]),
    ...[
      '; filename="x"',
      '; filename="y"',
      '; filename="d/x"',
      '\r\nContent-Type: text/plain',
      '\r\nContent-Type: text/plain; charset=utf-16',
      '\r\nContent-Transfer-Encoding: base64',
      '\r\nX-Other: 1',
      '\r\nContent-Disposition: form-data; name="b"',
    ].map((more) => [part('1', 'a', more)]),
    ...['11', '12', '21'].map(([a = '', b = '']) => [part(a), part(b)]),
    [part('1'), part('')],
    // Its content looks like the next part, but for the delimiter.
    [part(`1${part('').head}\r\n\r\n2`)],
  ]
  t.equal(new Set(rows.map((parts) => print(parts))).size, rows.length)
  for (const parts of rows) {
    t.equal(print(parts, 'b2'), print(parts, 'b1'))
    t.ok(isMultipart(multipart(parts, 'b1'), typeOf('b1')))
  }
})

t.test('F14 spaces and line ends after the closing delimiter count', async (t) => {
  const ended = (end: string, boundary: string): string =>
    sent(multipart(UPLOAD, boundary, end), typeOf(boundary))
  const ends = ['--', '--\r\n', '--\r\n\r\n', '-- \r\n']
  for (const end of ends) t.equal(ended(end, 'b1'), ended(end, 'b2'), JSON.stringify(end))
  t.equal(new Set(ends.map((end) => ended(end, 'b1'))).size, ends.length)
})

/** Bodies on which parsers disagree, each written for a given boundary. */
const LOOSE: Readonly<Record<string, (boundary: string) => string>> = {
  'a preamble': (b) => `hello\r\n${multipart(UPLOAD, b).toString('latin1')}`,
  'a blank preamble': (b) => `\r\n${multipart(UPLOAD, b).toString('latin1')}`,
  'an epilogue': (b) => `${multipart(UPLOAD, b).toString('latin1')}more`,
  'many line ends after the end': (b) => multipart(UPLOAD, b, `--${'\r\n'.repeat(5)}`).toString('latin1'),
  'another body after the end': (b) => `--${b}--\r\n${multipart(UPLOAD, b).toString('latin1')}`,
  'no closing delimiter': (b) => `--${b}\r\nA: b\r\n\r\n1\r\n--${b}\r\n`,
  'an unfinished part': (b) => `--${b}\r\nA: b\r\n\r\n1`,
  'half a closing delimiter': (b) => `--${b}\r\nA: b\r\n\r\n1\r\n--${b}-`,
  'a delimiter alone': (b) => `--${b}`,
  'a space after a delimiter': (b) => `--${b} \r\nA: b\r\n\r\n1\r\n--${b}--`,
  'a bare line feed after a delimiter': (b) => `--${b}\nA: b\n\n1\n--${b}--`,
  'a delimiter after a bare line feed': (b) => `--${b}\r\nA: b\r\n\r\n1\n--${b}\r\nA: c\r\n\r\n2\r\n--${b}--`,
  'a delimiter after a bare carriage return': (b) => `--${b}\r\nA: b\r\n\r\n1\r--${b}\r\n--${b}--`,
  'a line that begins like a delimiter': (b) => `--${b}\r\nA: b\r\n\r\n1\r\n--${b}x\r\n\r\n2\r\n--${b}--`,
  'two delimiters in a row': (b) => `--${b}\r\n--${b}\r\nA: b\r\n\r\n1\r\n--${b}--`,
  'the boundary in a header': (b) => `--${b}\r\nA: ${b}\r\n\r\n1\r\n--${b}--`,
  'the boundary in a content': (b) => `--${b}\r\nA: b\r\n\r\nx${b}\r\n--${b}--`,
  'a delimiter with one dash': (b) => `--${b}\r\nA: b\r\n\r\n1\r\n-${b}\r\n--${b}--`,
  'another boundary': (b) => multipart(UPLOAD, `${b}x`).toString('latin1'),
  nothing: () => '',
  JSON: () => '{}',
}

t.test('F14 a multipart body that parsers read differently is compared byte by byte', async (t) => {
  for (const [what, write] of Object.entries(LOOSE)) {
    const [one, two] = [write('bnd1'), write('bnd2')]
    t.notOk(isMultipart(one, typeOf('bnd1')), what)
    t.not(sent(one, typeOf('bnd1')), sent(two, typeOf('bnd2')), what)
    t.equal(sent(one, typeOf('bnd1')), sent(one, typeOf('bnd1')))
  }
  const many = (count: number): Buffer => multipart(Array(count).fill(part('1')), 'b1')
  t.ok(isMultipart(many(1000), typeOf('b1')))
  t.notOk(isMultipart(many(1001), typeOf('b1')), 'more than 1000 parts')
})

t.test('F14 a boundary that parsers read differently is not accepted, and counts', async (t) => {
  const body = multipart(UPLOAD, 'b1')
  for (const type of lines`
    multipart/form-data
    multipart/form-data; boundary=
    multipart/form-data; boundary=""
    multipart/form-data; boundary="b1
    multipart/form-data; boundary=b1"
    multipart/form-data; boundary='b1'
    multipart/form-data; boundary="b\1"
    multipart/form-data; boundary="b1 "
    multipart/form-data; boundary=b1; boundary=b1
    multipart/form-data; boundary=b2; boundary=b1
    multipart/form-data; boundary=b1; x="; boundary=b2"
    multipart/form-data; x=1; boundary=b1
    multipart/form-data; boundary*=b1
    multipart/form-data; boundary =b1
    multipart/form-data; boundary= b1
    multipart/form-data; boundary=b1;
    multipart/form-data; boundary=b1, text/plain
    multipart/form-data; boundary=b1; charset=utf-16
    multipart/form-data boundary=b1
    multipart/mixed; boundary=b1
    text/plain; boundary=b1`) {
    t.notOk(isMultipart(body, type), type)
    const two = sent(multipart(UPLOAD, 'b2'), type.replaceAll('b1', 'b2'), { body: 'multipart' })
    t.not(sent(body, type, { body: 'multipart' }), two, type)
  }
  const twice = ['Content-Type', typeOf('b1'), 'Content-Type', typeOf('b1')]
  t.notOk(atOnce(multipartContent(twice, body)), 'two lines')
  const long = 'x'.repeat(71)
  t.notOk(isMultipart(multipart(UPLOAD, long), typeOf(long)), 'RFC 2046: at most 70 characters')
  t.ok(isMultipart(multipart(UPLOAD, long.slice(1)), typeOf(long.slice(1))))
  const loose = LOOSE['a preamble']?.('b1') as string
  t.not(sent(loose, typeOf('b1')), sent(loose, typeOf('B1')), 'its letter case counts, too')
  t.not(sent('', typeOf('b1'), { body: 'none' }), sent('', typeOf('b2'), { body: 'none' }))
})

t.test('F14 changing any byte of a body changes its fingerprint', async (t) => {
  const body = multipart(UPLOAD, 'b1')
  const whole = sent(body, typeOf('b1'))
  for (let at = 0; at < body.length; at++) {
    const changed = Buffer.from(body)
    changed[at] = (changed[at] as number) ^ (1 + (at % 255))
    if (sent(changed, typeOf('b1')) === whole) t.fail(`byte ${at}`)
  }
})

t.test('F14 FormData from Node is read as parts', async (t) => {
  const encoded = async (): Promise<[string, Buffer]> => {
    const data = new FormData()
    data.set('owner', 'Ada \u00e9')
    data.set('file', new Blob([Buffer.from([0, 255, 13, 10])]), 'a "quoted".bin')
    const sending = new Request('http://localhost/', { method: 'POST', body: data })
    return [sending.headers.get('content-type') as string, Buffer.from(await sending.arrayBuffer())]
  }
  const [[oneType, one], [twoType, two]] = [await encoded(), await encoded()]
  t.not(oneType, twoType)
  t.ok(isMultipart(one, oneType))
  t.equal(sent(one, oneType), sent(two, twoType))
})

t.test('hostile forms and multipart bodies of 1 MiB are handled without an error', async (t) => {
  const size = 1024 * KiB
  for (const unit of ['%41', '%', '+', 'a=b&', '%C3%A9', '\xff', '%2'])
    t.equal(form(Buffer.from(unit.repeat(size / unit.length), 'latin1')).length, 64)
  for (const [boundary, fill] of [
    ['x', '\r\n--x'],
    ['x', '\r\n--x\r\n'],
    ['----------', '-'],
    [`${'a'.repeat(69)}b`, 'a'],
    ['a'.repeat(70), `\r\n--${'a'.repeat(69)}b`],
  ] as const) {
    const content = fill.repeat(size / fill.length)
    t.equal(sent(multipart([part(content)], boundary), typeOf(boundary)).length, 64)
  }
})

const MULTIPART = ['Content-Type', typeOf('XYZ')]

/** The value of a field, or why there is none. */
const shown = (field: Field): string => (field.kind === 'value' ? `value:${field.value}` : field.kind)
const field = (body: string | Buffer, name = 'key', headers = URLENCODED): string =>
  shown(atOnce(formField(headers, Buffer.isBuffer(body) ? body : Buffer.from(body, 'latin1'), name)))

t.test('a field is found under any name, however its characters are escaped', async (t) => {
  for (const [name, found, absent] of [
    ['a b', ['a b', 'a+b', 'a%20b', '%61+%62'], ['ab', 'a%2bb', 'a++b', 'a%2520b']],
    ['a+b', ['a%2bb', 'a%2Bb'], ['a+b', 'a b', 'aab', 'a%20b', 'ab']],
    ['a&b', ['a%26b'], ['a&b', 'ab']],
    ['a=b', ['a%3db', 'a%3Db'], ['a=b', 'ab']],
    ['a.b', ['a.b', 'a%2eb', 'a%2Eb'], ['axb', 'a%2b']],
    ['a[0]', ['a[0]', 'a%5b0%5D', 'a%5B0%5d'], ['a0', 'a[0', 'a%5b0%5']],
    ['Zz~', ['Zz~', '%5a%7A%7e', '%5A%7a%7E'], ['ZZ~', 'zz~', '%5A%7a']],
  ] as const) {
    for (const spelled of found) {
      t.equal(field(`x=1&${spelled}=2`, name), 'value:2', `${spelled} for ${name}`)
      t.equal(shown(queryField(`${spelled}=2&x=1`, name)), 'value:2')
    }
    for (const spelled of absent) t.equal(field(`x=1&${spelled}=2`, name), 'absent', `${spelled} for ${name}`)
  }
})

t.test('a field without a value, or that is there twice, does not disturb the next reading', async (t) => {
  for (const [body, expected] of [
    ['key=1&key=2', 'unclear'],
    ['key=1', 'value:1'],
    ['key=1&x=2&key=2', 'unclear'],
    ['x=1', 'absent'],
    ['key', 'value:'],
    ['key=', 'value:'],
    ['key=%4', 'value:%4'],
    ['key=%41%4a%4A+%2b%', 'value:AJJ +%'],
    ['key=%g1%1g', 'value:%g1%1g'],
    ['key=%C3%A9', 'value:\xc3\xa9'],
    ['key=\xc3\xa9\xff', 'value:\xc3\xa9\xff'],
    ['key=%00%ff', 'value:\0\xff'],
  ] as const) {
    t.equal(field(body), expected, body)
    t.equal(shown(queryField(body, 'key')), expected, body)
  }
})

t.test('query fields are read as URLSearchParams reads them', async () => {
  const byte = fc.constantFrom(...words`k %6b %6B & = + % %2 a %3d %26 %20`, ' ')
  fc.assert(
    fc.property(
      fc.array(byte, { maxLength: 12, size: 'max' }).map((parts) => parts.join('')),
      (text) => {
        const expected = new URLSearchParams(text).getAll('k')
        const found = queryField(text, 'k')
        return found.kind === 'value'
          ? expected.length === 1 && Buffer.from(found.value, 'latin1').toString() === expected[0]
          : found.kind === (expected.length === 0 ? 'absent' : 'unclear')
      },
    ),
    { numRuns: 1000 },
  )
})

t.test('of several media types, any that is a form makes its fields unclear', async (t) => {
  const plain = ['Content-Type', 'text/plain']
  for (const [headers, expected] of [
    [[...plain, ...MULTIPART], 'unclear'],
    [[...plain, 'content-type', 'Multipart/Form-Data; boundary=XYZ'], 'unclear'],
    [[...MULTIPART, ...plain], 'unclear'],
    [[...plain, ...URLENCODED], 'unclear'],
    [[...plain, ...plain], 'absent'],
    [[...plain, 'X', 'multipart/form-data'], 'absent'],
    [['Content-Type', 'text/plain; x=multipart/form-data'], 'absent'],
    [[], 'absent'],
  ] as const)
    t.equal(field(multipart([part('k', 'key')]), 'key', headers as string[]), expected, headers.join())
})

t.test('a part is read as any server reads it, or not at all', async (t) => {
  const read = (...parts: Part[]): string => field(multipart(parts), 'key', MULTIPART)
  const content = Buffer.from('k\r\n\xff ', 'latin1')
  t.equal(read(part('x'), part(content, 'key'), part('x', 'b')), 'value:k\r\n\xff ')
  t.equal(read(part('', 'key')), 'value:')
  for (const first of ['1', '']) t.equal(read(part(first, 'key'), part('', 'key')), 'unclear')
  t.equal(read(), 'absent')
  t.equal(read(part('x')), 'absent')
  const long = (length: number) => read(part('k', 'key', `\r\nX: ${'y'.repeat(length)}`))
  t.same([long(8 * KiB - 150), long(8 * KiB)], ['value:k', 'unclear'], 'a long head, a longer one')
  for (const [head, expected] of [
    ['content-disposition:form-data; name=key', 'value:k'],
    ['Content-Disposition: \t form-data; name="key" \t', 'value:k'],
    ['Content-Disposition: Form-Data; Name="key"', 'value:k'],
    ['Content-Disposition: form-data;name="key"', 'value:k'],
    ['Content-Disposition: form-data; name="key"\r\nCONTENT-TRANSFER-ENCODING: \tBinary', 'value:k'],
    ['Content-Transfer-Encoding: 7bit\r\nContent-Disposition: form-data; name="key"', 'value:k'],
    ['Content-Disposition: form-data; name="key"\r\nContent-Transfer-Encoding: 9bit', 'unclear'],
    ['Content-Disposition: form-data; name="key"\r\nContent-Transfer-Encoding: 8bits', 'unclear'],
    ['Content-Disposition: form-data; name="key"\r\nContent-Transfer-Encoding: x8bit', 'unclear'],
    ['Content-Disposition: form-data; name=""', 'absent'],
    ['Content-Disposition: form-data; name="f"; filename*=x', 'absent'],
    ['Content-Disposition: form-data; name="key"; filename*=x', 'unclear'],
    ['Content-Disposition: form-data; name="key"; filename="x"', 'unclear'],
    ['Content-Disposition: form-data; name="key"; filename=""', 'unclear'],
    [`Content-Disposition: form-data; name="key"; filename="\u00e9"; filename*=utf-8''%C3%A9`, 'unclear'],
    ['Content-Disposition: form-data; name="f"; filename="a\\"; name=\\"key"', 'absent'],
    ['Content-Disposition: form-data; name="Key"', 'absent'],
    ['Content-Disposition: form-data; name="k\\ey"', 'unclear'],
    ["Content-Disposition: form-data; name*=utf-8''key", 'unclear'],
    ['Content-Disposition: form-data; name="x"; name="key"', 'unclear'],
    ['Content-Disposition: form-data; filename="x"; name="key"', 'unclear'],
    ['Content-Disposition: form-data', 'unclear'],
    ['', 'unclear'],
    ...[
      ['Content-Type: text/plain', 'value:k'],
      ['Content-Transfer-Encoding: 8bit', 'value:k'],
      ['Content-Transfer-Encoding: base64', 'unclear'],
      ['Content-Disposition: form-data; name="x"', 'unclear'],
      [' folded', 'unclear'],
      ['no colon', 'unclear'],
      ['X: a\0', 'unclear'],
    ].map(([line, expected]) => [`Content-Disposition: form-data; name="key"\r\n${line}`, expected] as const),
    ['Content-Disposition: form-data; name="f"; filename="a"; filename="b"; filename="c"', 'unclear'],
    ['Content-Disposition: form-data; name="a"\r\nContent-Disposition: form-data; name="a"', 'unclear'],
    ['Content-Disposition: attachment\r\nContent-Disposition: form-data; name="key"', 'unclear'],
    ['Content-Disposition: form-data; name="a"x', 'unclear'],
    ['Content-Disposition: xform-data; name="a"', 'unclear'],
    ['Content-Type: text/plain', 'unclear'],
    ['Content-Disposition : form-data; name="key"', 'unclear'],
    ['Content-Disposition: form-data; name="key"\r\n', 'value:\r\nk'],
  ] as const)
    t.equal(read({ head, content: 'k' }), expected, JSON.stringify(head))
  for (const body of [
    '--XYZ\r\nno head\r\n--XYZ--',
    'no parts',
    '--XYZ\r\nContent-Disposition: form-data; name="key"x\r\n--XYZ--',
  ])
    t.equal(field(body, 'key', MULTIPART), 'unclear', body)
})

t.test('the content of a multipart body is each part with its length, and what ends it', async (t) => {
  const content = (body: string): unknown =>
    atOnce(multipartContent(MULTIPART, Buffer.from(body, 'latin1')))?.map(String)
  const [one, two] = ['A: b\r\n\r\n1', 'A: b\r\n\r\n22\r\n']
  t.same(content(`--XYZ\r\n${one}\r\n--XYZ\r\n${two}\r\n--XYZ--\r\n`), ['9:', one, '12:', two, '--\r\n'])
  t.same(content('--XYZ--'), ['--'])
  t.same(content('--XYZ\r\n\r\n--XYZ--'), ['0:', '', '--'])
  t.same(content('--XYZ-- \t\r\n\r\n \t'), ['-- \t\r\n\r\n \t'])
  t.equal(content('--XYZ-- \t\r\n\r\n \t '), undefined, 'more than eight blanks')
  t.equal(content('--XYZ--\r\nx'), undefined)
  t.equal(content('--XYZ\r\nXYZ\r\n--XYZ--'), undefined, 'the boundary within a part')
})

/** The result, and after how many pauses. */
function paused<T>(steps: Steps<T>): { result: T; pauses: number } {
  for (let pauses = 0; ; pauses++) {
    const step = steps.next()
    if (step.done === true) return { result: step.value, pauses }
  }
}

t.test('a long body is read in steps, wherever the field is in it', async (t) => {
  const large = part('x'.repeat(256 * KiB), 'f')
  const small = Array.from({ length: 900 }, (_, n) => part('x'.repeat(300), `f${n}`))
  const of = (body: string | Buffer): [string, number] => {
    const bytes = Buffer.from(body as string)
    const { result, pauses } = paused(formField(Buffer.isBuffer(body) ? MULTIPART : URLENCODED, bytes, 'key'))
    return [shown(result), pauses]
  }
  for (const body of ['a=1', '', multipart([part('k', 'key')])]) t.equal(of(body)[1], 0)
  for (const [body, least] of [
    [`${'a=1&'.repeat(64 * KiB)}key=k`, 3],
    [`x=${'y'.repeat(64 * KiB)}&key=k`, 1],
    [multipart([...small, part('k', 'key')]), 8],
    [multipart([large, large, part('k', 'key')]), 16],
  ] as const) {
    const [found, pauses] = of(body)
    t.equal(found, 'value:k')
    t.ok(pauses >= least, `${pauses} pauses`)
  }
  t.ok(paused(multipartParts(MULTIPART, multipart([large]))).pauses >= 4)
  t.equal(paused(formContent(URLENCODED, Buffer.from('a'.repeat(256 * KiB)))).pauses, 0, 'nothing to undo')
  const escaped = paused(formContent(URLENCODED, Buffer.from('%41'.repeat(88 * KiB))))
  t.equal(escaped.pauses, 4)
  t.equal(escaped.result?.toString(), 'A'.repeat(88 * KiB))

  for (const fill of ['a=1&'.repeat(50_000), `b=${'x'.repeat(200_000)}&`, 'a=1&'.repeat(10)])
    for (const [text, expected] of [
      [`key=k&${fill}`, 'value:k'],
      [`${fill}key=k&${fill}`, 'value:k'],
      [`${fill}&&k%65y=%6b&${fill}`, 'value:k'],
      [`${fill}xkey=k&${fill}`, 'absent'],
      [`key=k&${fill}key=k`, 'unclear'],
      [`${fill}key=k&key=k&${fill}`, 'unclear'],
    ] as const)
      t.equal(field(text), expected, `${text.slice(0, 10)}…`)
  const many = Array.from({ length: 300 }, (_, n) => part('x'.repeat(n * 3), `f${n}`))
  const key = part('k', 'key')
  t.equal(field(multipart([key, ...many]), 'key', MULTIPART), 'value:k')
  t.equal(field(multipart([key, ...many, key]), 'key', MULTIPART), 'unclear', 'twice')
})

t.test('the boundary counts wherever it overlaps itself, and across two steps', async (t) => {
  const parts = (content: string): number | undefined =>
    atOnce(multipartParts(['Content-Type', typeOf('aa')], multipart([{ head: '', content }], 'aa')))?.parts
      .length
  t.equal(parts('b'), 1)
  for (const content of ['aa', 'baab', '-aa', 'aaa']) t.equal(parts(content), undefined, content)
  for (let length = 64 * KiB - 20; length < 64 * KiB + 4; length++) {
    t.equal(parts('b'.repeat(length)), 1, `${length}`)
    t.equal(parts(`${'b'.repeat(length)}aab`), undefined, `${length} and the boundary`)
  }
  // A key behind a part that ends around the end of a step.
  for (let length = 64 * KiB - 80; length < 64 * KiB; length++) {
    const found = field(multipart([part('x'.repeat(length), 'f'), part('k', 'key')]), 'key', MULTIPART)
    if (found !== 'value:k') t.fail(`${length}: ${found}`)
  }
})
