import fc from 'fast-check'
import t from 'tap'
import { formContent, multipartContent } from '../../src/core/body/form.ts'
import { decide } from '../../src/core/decide.ts'
import {
  Digests,
  fingerprintOf,
  type RequestContent,
  rawDigestOf,
  recipeOf,
} from '../../src/core/fingerprint.ts'
import type { FingerprintPolicy } from '../../src/core/policy.ts'
import type { Fingerprint } from '../../src/core/record.ts'
import { atOnce } from '../../src/core/steps.ts'
import { completed, FINGERPRINT, request } from './fixtures.ts'

const FORM = 'application/x-www-form-urlencoded'

const sent = (
  body: string | Buffer,
  type: string,
  more: Partial<FingerprintPolicy> = {},
  lines: readonly string[] = [],
): string =>
  fingerprintOf(request(body, { headers: ['Content-Type', type, ...lines] }), {
    ...FINGERPRINT,
    ...more,
  }).toString('hex')

/** A form's fingerprint under `auto`. */
const form = (body: string | Buffer, type = FORM): string => sent(body, type)
/** Whether the body is read as a form rather than as bytes. */
const isForm = (body: string | Buffer, type = FORM): boolean => {
  const headers = ['Content-Type', type]
  return atOnce(formContent(headers, Buffer.from(body as string))) !== null
}

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
    '',
    '=',
    '&',
    '&&',
    'a',
    'a=',
    '=a',
    'a&',
    '&a',
    'a&&',
    'a==',
    'a=&',
    'a=1&b=2',
    'b=2&a=1',
    'a=1&a=2',
    'a=2&a=1',
    'a=1&&b=2',
    'a=1;b=2',
    'a=1%3Bb=2',
    'a=1%26b=2',
    'a=1%26b%3D2',
    'a=b=c',
    'a=b%3Dc',
    'a=b,c',
    'a=b%2Cc',
    'a[]=1',
    'a%5B%5D=1',
    'a=+',
    'a=%2B',
    'a=%2520',
    'a= ',
    'a=\u0000',
    'a=%00',
    'a=%00b',
    'a=b%00',
    'a=\n',
    'a=%0A',
    'a=%0D%0A',
    'a=#',
    'a=%23',
    'a=\u00e9',
    'a=%C3%A9',
    'a=e%CC%81',
    'a=A',
    'A=a',
  ]
  t.equal(new Set(bodies.map((body) => form(body))).size, bodies.length)
  for (const body of bodies) t.ok(isForm(body), body)
})

t.test('F15 a form that cannot be read without guessing is compared byte by byte', async (t) => {
  const raw: readonly (readonly [string | Buffer, string | Buffer])[] = [
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
  ]
  for (const [one, two] of raw) {
    t.not(form(one), form(two), `${one.toString()} ${two.toString()}`)
    t.equal(form(one), form(one))
    t.notOk(isForm(one), one.toString())
  }
  t.equal(
    isForm(Buffer.from([...Buffer.from('a=%C3'), 0xa9])),
    true,
    'a character with only some bytes escaped is one character',
  )
  for (const type of [
    `${FORM}; charset=iso-2022-jp`,
    `${FORM}; charset=utf-16`,
    `${FORM}; charset=utf-8; charset=utf-16`,
    `${FORM}; charset="utf-8`,
  ]) {
    t.notOk(isForm('a=b', type), type)
    t.not(form('a=b+c', type), form('a=b%20c', type), 'the escapes may be parts of characters')
  }
  t.not(form('a=b+c', `${FORM}, text/plain`), form('a=b%20c', `${FORM}, text/plain`))
})

t.test('a body with Content-Encoding is compared as sent, whatever its media type', async (t) => {
  for (const body of ['auto', 'form'] as const)
    t.not(
      sent('a=b+c', FORM, { body }, ['Content-Encoding', 'gzip']),
      sent('a=b%20c', FORM, { body }, ['Content-Encoding', 'gzip']),
    )
  const [one, two] = [multipart([part('1')], 'b1'), multipart([part('1')], 'b2')]
  for (const body of ['auto', 'multipart'] as const)
    t.not(
      sent(one, typeOf('b1'), { body }, ['Content-Encoding', 'br']),
      sent(two, typeOf('b2'), { body }, ['Content-Encoding', 'br']),
    )
  t.equal(sent('x', FORM, { body: 'none' }, ['Content-Encoding', 'gzip']), sent('y', FORM, { body: 'none' }))
})

t.test('raw, form, json and none give the same body different fingerprints', async (t) => {
  const modes = ['raw', 'form', 'json', 'none'] as const
  t.equal(new Set(modes.map((body) => sent('1', FORM, { body }))).size, modes.length)
  t.equal(
    sent('1', FORM, { body: 'multipart' }),
    sent('1', FORM, { body: 'form' }),
    'multipart reads a form as form does',
  )
})

t.test('F14 F15 a body of another kind than its mode expects is compared as under auto', async (t) => {
  const upload = (boundary: string, body: 'form' | 'json' | 'multipart' | 'raw') =>
    sent(multipart(UPLOAD, boundary), typeOf(boundary), { body })
  for (const body of ['form', 'json', 'multipart'] as const) {
    t.equal(upload('x1', body), upload('x2', body), `a new boundary under ${body}`)
    t.equal(sent('a=+&b=%7E', FORM, { body }), sent('a=%20&b=~', FORM, { body }), `a form under ${body}`)
    t.not(sent('a=1&b=2', FORM, { body }), sent('b=2&a=1', FORM, { body }))
    t.equal(
      sent('{"a":1,"b":2}', 'application/json', { body }),
      sent('{"b":2, "a":1}', 'application/json', { body }),
      `JSON under ${body}`,
    )
    for (const [broken, ...types] of [
      ['{"a":1', 'application/json', typeOf('x1'), 'text/plain'],
      ['a=%zz', 'application/json', typeOf('x1'), 'text/plain', FORM],
      ['--x1\r\n', 'application/json', typeOf('x1'), 'text/plain'],
    ] as const)
      for (const type of types)
        t.equal(sent(broken, type, { body }), sent(broken, type, { body: 'raw' }), `${broken} as ${type}`)
  }
  t.equal(
    sent('{"a":1,"b":2}', 'text/plain', { body: 'json' }),
    sent('{"b":2,"a":1}', 'text/plain', { body: 'json' }),
    'json reads JSON under any media type',
  )
  t.not(upload('x1', 'raw'), upload('x2', 'raw'))
})

t.test('ignore and only, which point into JSON, drop nothing from other bodies', async (t) => {
  for (const more of [{ ignore: ['/a'] }, { only: ['/b'] }]) {
    t.not(sent('a=1&b=2', FORM, more), sent('a=2&b=2', FORM, more))
    t.not(
      sent(multipart([part('1')], 'b1'), typeOf('b1'), more),
      sent(multipart([part('2')], 'b1'), typeOf('b1'), more),
    )
  }
})

const pairs = fc.array(
  fc.record({
    name: fc.string({ unit: 'grapheme', maxLength: 4 }),
    value: fc.option(fc.string({ unit: 'grapheme', maxLength: 4 })),
  }),
  { maxLength: 3 },
)

t.test('F15 two spellings share a fingerprint exactly when they are the same form', async () => {
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
    { numRuns: 1000 },
  )
})

t.test('F15 forms with equal fingerprints have the same pairs for URLSearchParams', async () => {
  const body = fc.string({
    unit: fc.constantFrom('a', '=', '&', '+', '%', '4', '1', '2', 'B', 'b', ';', ' '),
    maxLength: 8,
  })
  const read = (text: string): string => JSON.stringify([...new URLSearchParams(`&${text}`)])
  fc.assert(
    fc.property(
      body,
      body,
      (one, two) => form(one) !== form(two) || (read(one) === read(two) && isForm(one) === isForm(two)),
    ),
    { numRuns: 20_000 },
  )
})

interface Part {
  readonly head: string
  readonly content: string | Buffer
}
const part = (content: string | Buffer, name = 'a', more = ''): Part => ({
  head: `Content-Disposition: form-data; name="${name}"${more}`,
  content,
})
const typeOf = (boundary: string): string => `multipart/form-data; boundary=${boundary}`

function multipart(parts: readonly Part[], boundary: string, end = '--\r\n'): Buffer {
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
const isMultipart = (body: string | Buffer, type: string): boolean =>
  atOnce(multipartContent(['Content-Type', type], Buffer.from(body as string))) !== null

const UPLOAD = [
  part('Ada', 'owner'),
  part(
    Buffer.from([0, 1, 13, 10, 255]),
    'file',
    '; filename="a.bin"\r\nContent-Type: application/octet-stream',
  ),
]

t.test('F14 multipart bodies that differ only in their boundary have the same fingerprint', async (t) => {
  const one = print(UPLOAD, '----WebKitFormBoundary7MA4YWxk')
  for (const boundary of [
    'x1',
    '----formdata-undici-012345',
    '------------------------d74496d66958873e',
    "a'b+_.-c",
  ])
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
  t.not(
    sent(multipart(UPLOAD, 'x1'), typeOf('x1'), { body: 'raw' }),
    sent(multipart(UPLOAD, 'x2'), typeOf('x2'), { body: 'raw' }),
  )
})

t.test('F14 names, filenames, types, contents, number and order of parts count', async (t) => {
  const rows: (readonly Part[])[] = [
    [],
    [part('1')],
    [part('2')],
    [part('')],
    [part('1\r\n')],
    [part('1', 'b')],
    [part('1', 'A')],
    [part('1', 'a', '; filename="x"')],
    [part('1', 'a', '; filename="y"')],
    [part('1', 'a', '; filename="d/x"')],
    [part('1', 'a', '\r\nContent-Type: text/plain')],
    [part('1', 'a', '\r\nContent-Type: text/plain; charset=utf-16')],
    [part('1', 'a', '\r\nContent-Transfer-Encoding: base64')],
    [part('1', 'a', '\r\nX-Other: 1')],
    [part('1', 'a', '\r\nContent-Disposition: form-data; name="b"')],
    [part('1'), part('1')],
    [part('1'), part('2')],
    [part('2'), part('1')],
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
  'a longer line that begins like a delimiter': (b) =>
    `--${b}\r\nA: b\r\n\r\n1\r\n--${b}x\r\n\r\n2\r\n--${b}--`,
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
  const many = (count: number): Buffer =>
    multipart(
      Array.from({ length: count }, () => part('1')),
      'b1',
    )
  t.ok(isMultipart(many(1000), typeOf('b1')))
  t.notOk(isMultipart(many(1001), typeOf('b1')), 'more than 1000 parts')
})

t.test('F14 a boundary that parsers read differently is not accepted', async (t) => {
  const body = multipart(UPLOAD, 'b1')
  const types = [
    'multipart/form-data',
    'multipart/form-data; boundary=',
    'multipart/form-data; boundary=""',
    'multipart/form-data; boundary="b1',
    'multipart/form-data; boundary=b1"',
    "multipart/form-data; boundary='b1'",
    'multipart/form-data; boundary="b\\1"',
    'multipart/form-data; boundary="b1 "',
    'multipart/form-data; boundary=b1; boundary=b1',
    'multipart/form-data; boundary=b2; boundary=b1',
    'multipart/form-data; boundary=b1; x="; boundary=b2"',
    'multipart/form-data; x=1; boundary=b1',
    'multipart/form-data; boundary*=b1',
    'multipart/form-data; boundary =b1',
    'multipart/form-data; boundary= b1',
    'multipart/form-data; boundary=b1;',
    'multipart/form-data; boundary=b1, text/plain',
    'multipart/form-data; boundary=b1; charset=utf-16',
    'multipart/form-data boundary=b1',
    'multipart/mixed; boundary=b1',
    'text/plain; boundary=b1',
  ]
  for (const type of types) {
    t.notOk(isMultipart(body, type), type)
    const two = sent(multipart(UPLOAD, 'b2'), type.replaceAll('b1', 'b2'), { body: 'multipart' })
    t.not(sent(body, type, { body: 'multipart' }), two, type)
  }
  const twice = ['Content-Type', typeOf('b1'), 'Content-Type', typeOf('b1')]
  t.notOk(atOnce(multipartContent(twice, body)), 'two lines')
  const long = 'x'.repeat(71)
  t.notOk(isMultipart(multipart(UPLOAD, long), typeOf(long)), 'RFC 2046: at most 70 characters')
  t.ok(isMultipart(multipart(UPLOAD, long.slice(1)), typeOf(long.slice(1))))
})

t.test('F14 where parts are not read, the boundary counts, including its letter case', async (t) => {
  const body = LOOSE['a preamble']?.('b1') as string
  t.not(sent(body, typeOf('b1')), sent(body, typeOf('B1')))
  t.not(sent('', typeOf('b1'), { body: 'none' }), sent('', typeOf('b2'), { body: 'none' }))
})

/** Bytes that delimit, and a few that do not. */
const bits = fc.string({
  unit: fc.constantFrom('\r\n', '\r', '\n', '-', '--', 'b1', 'b2', 'a', ':', '"', ' '),
  maxLength: 8,
})
const someParts = fc.array(fc.record({ head: bits, content: bits }), { maxLength: 3 })

t.test('F14 bodies with equal fingerprints are the same bytes apart from the boundary', async () => {
  const text = (parts: readonly Part[]): string => JSON.stringify(parts)
  const free = (parts: readonly Part[], boundary: string): boolean => !text(parts).includes(boundary)
  fc.assert(
    fc.property(someParts, fc.option(someParts, { nil: 'the same' as const }), (one, other) => {
      const two = other === 'the same' ? one : other
      const [first, second] = [multipart(one, 'b1'), multipart(two, 'b2')]
      if (print(one, 'b1') !== print(two, 'b2'))
        return text(one) !== text(two) || !free(one, 'b1') || !free(two, 'b2')
      return (
        isMultipart(first, typeOf('b1')) &&
        isMultipart(second, typeOf('b2')) &&
        first.toString().replaceAll('b1', 'b2') === second.toString()
      )
    }),
    { numRuns: 10_000 },
  )
})

t.test('F14 changing any byte of a body changes its fingerprint', async () => {
  const body = multipart(UPLOAD, 'b1')
  const index = fc.integer({ min: 0, max: body.length - 1 })
  fc.assert(
    fc.property(index, fc.integer({ min: 1, max: 255 }), (at, by) => {
      const changed = Buffer.from(body)
      changed[at] = (changed[at] as number) ^ by
      return sent(changed, typeOf('b1')) !== sent(body, typeOf('b1'))
    }),
    { numRuns: 1000 },
  )
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

/** Made by the version whose recipes began with fingerprint/1, under this policy. */
const COUNTING = { ...FINGERPRINT, headers: ['x-currency'] }
const OLD_RECIPE = 'wyjx_K_rWmwUCY5o,x-currency'
const OLD = [
  {
    type: 'application/json',
    body: '{"amount":1}',
    fingerprint: 'KfSfxe1i6FTYz_og74ZnSRjwBpWNf7KuwXXw26YMS6I',
    raw: 'MfaHqS7jfD4kQX-YQgWcEJwNi20N5gE4--SaAG6tzuI',
  },
  {
    type: FORM,
    body: 'a=b+c',
    fingerprint: 'QycRQp5o4z5cqHZgsQAabsZc6Imf6S0QZgyRijIeiSc',
    raw: 'jfYNvpPx4ofcVuyrm6v9wm1xmouVRUmcFzKbEqGn5qo',
  },
  {
    type: 'multipart/form-data; boundary=x',
    body: '--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n',
    fingerprint: 'C26m8zYRbKZBrM6U5y62I01SPqPM64tfeBjwHxIlv20',
    raw: 'fdzpAgR2TFKqi5cZqMdiUYyYfT7XnySJfh0GJrdOGeo',
  },
]

/** What this version decides on a request that meets the record. */
function meets(
  recordOf: Parameters<typeof completed>[0],
  asked: RequestContent,
  policy: FingerprintPolicy,
): string {
  const claim = new Digests(asked, asked.body, policy, null)
  return decide(completed(recordOf), claim, { onLeaseExpired: 'unknown' }, 3000).kind
}

t.test('F20 a record made under fingerprint/1 still replays for an unchanged request', async (t) => {
  t.not(recipeOf(COUNTING), OLD_RECIPE)
  for (const { type, body, fingerprint, raw } of OLD) {
    const record = {
      recipe: OLD_RECIPE,
      fingerprint: Buffer.from(fingerprint, 'base64url') as Fingerprint,
      rawDigest: Buffer.from(raw, 'base64url'),
    }
    const asked = (text: string, currency: string, query = 'a=b'): RequestContent =>
      request(text, {
        query,
        target: `/v1/payments?${query}`,
        headers: ['Content-Type', type, 'X-Currency', currency],
      })
    t.equal(meets(record, asked(body, 'EUR'), COUNTING), 'replay', type)
    t.equal(meets(record, asked(body, 'EUR'), FINGERPRINT), 'replay', 'under other settings too')
    t.equal(meets(record, asked(`${body} `, 'EUR'), COUNTING), 'reused', 'another body')
    t.equal(meets(record, asked(body, 'USD'), FINGERPRINT), 'reused', 'a header that counted then')
    t.equal(meets(record, asked(body, 'EUR', 'a=c'), COUNTING), 'reused', 'another query')
  }
})

t.test(
  'F20 after a change of settings an unchanged request replays and a changed one is misuse',
  async (t) => {
    const settings: Partial<FingerprintPolicy>[] = [
      {},
      { body: 'raw' },
      { body: 'form' },
      { body: 'none' },
      { headers: ['x-currency'] },
      { query: 'ignore' },
    ]
    const first = request('a=b+c', { headers: ['Content-Type', FORM, 'X-Currency', 'EUR'] })
    const changed = request('a=b+d', { headers: first.headers })
    for (const then of settings)
      for (const now of settings) {
        if (then === now) continue
        const [old, policy] = [
          { ...FINGERPRINT, ...then },
          { ...FINGERPRINT, ...now },
        ]
        const recipe = recipeOf(old)
        const record = {
          recipe,
          fingerprint: fingerprintOf(first, old),
          rawDigest: rawDigestOf(first, recipe),
        }
        const what = `${JSON.stringify(then)} → ${JSON.stringify(now)}`
        t.equal(meets(record, first, policy), 'replay', what)
        t.equal(meets(record, changed, policy), 'reused', what)
      }
  },
)

t.test('hostile forms and multipart bodies of 1 MiB are handled without an error', async (t) => {
  const size = 1024 * 1024
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
