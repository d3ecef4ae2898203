import t from 'tap'
import {
  type Field,
  formContent,
  formField,
  multipartContent,
  multipartParts,
  queryField,
} from '../../src/core/body/form.ts'
import { atOnce, type Steps } from '../../src/core/steps.ts'

const URLENCODED = ['Content-Type', 'application/x-www-form-urlencoded']
const MULTIPART = ['Content-Type', 'multipart/form-data; boundary=XYZ']
const KiB = 1024

/** The value, or why there is none. */
const shown = (field: Field): string => (field.kind === 'value' ? `value:${field.value}` : field.kind)
const field = (body: string, name = 'key', headers = URLENCODED): string =>
  shown(atOnce(formField(headers, Buffer.from(body, 'latin1'), name)))
const part = (name: string, content: string, more = ''): string =>
  `--XYZ\r\nContent-Disposition: form-data; name="${name}"\r\n${more}\r\n${content}\r\n`
const multipart = (...parts: string[]): string => `${parts.join('')}--XYZ--\r\n`

/** The result, and after how many pauses. */
function paused<T>(steps: Steps<T>): { result: T; pauses: number } {
  for (let pauses = 0; ; pauses++) {
    const step = steps.next()
    if (step.done === true) return { result: step.value, pauses }
  }
}

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
    t.equal(field(multipart(part('key', 'k')), 'key', headers as string[]), expected, headers.join())
})

t.test('a part is read as any server reads it, or not at all', async (t) => {
  const read = (...parts: string[]): string => field(multipart(...parts), 'key', MULTIPART)
  const raw = (head: string, content = 'k'): string => read(`--XYZ\r\n${head}\r\n\r\n${content}\r\n`)
  t.equal(read(part('a', 'x'), part('key', 'k\r\n\xff '), part('b', 'x')), 'value:k\r\n\xff ')
  t.equal(read(part('key', '')), 'value:')
  t.equal(read(part('key', '1'), part('key', '')), 'unclear')
  t.equal(read(part('key', ''), part('key', '')), 'unclear')
  t.equal(read(), 'absent')
  t.equal(read(part('a', 'x')), 'absent')
  t.equal(read(part('key', 'k', `X: ${'y'.repeat(8 * KiB - 150)}\r\n`)), 'value:k', 'a long head')
  t.equal(read(part('key', 'k', `X: ${'y'.repeat(8 * KiB)}\r\n`)), 'unclear', 'a longer one')
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
    ['Content-Disposition: form-data; name="f"; filename="a"; filename="b"; filename="c"', 'unclear'],
    ['Content-Disposition: form-data; name="a"\r\nContent-Disposition: form-data; name="a"', 'unclear'],
    ['Content-Disposition: attachment\r\nContent-Disposition: form-data; name="key"', 'unclear'],
    ['Content-Disposition: form-data; name="a"x', 'unclear'],
    ['Content-Disposition: xform-data; name="a"', 'unclear'],
    ['Content-Type: text/plain', 'unclear'],
    ['Content-Disposition : form-data; name="key"', 'unclear'],
    ['Content-Disposition: form-data; name="key"\r\n', 'value:\r\nk'],
  ] as const)
    t.equal(raw(head), expected, JSON.stringify(head))
  t.equal(field('--XYZ\r\nno head\r\n--XYZ--', 'key', MULTIPART), 'unclear')
  t.equal(field('no parts', 'key', MULTIPART), 'unclear')
  t.equal(
    field('--XYZ\r\nContent-Disposition: form-data; name="key"x\r\n--XYZ--', 'key', MULTIPART),
    'unclear',
  )
})

t.test('the content of a multipart body is each part with its length, and what ends it', async (t) => {
  const content = (body: string): unknown =>
    atOnce(multipartContent(MULTIPART, Buffer.from(body, 'latin1')))?.map(String)
  const [one, two] = ['A: b\r\n\r\n1', 'A: b\r\n\r\n22\r\n']
  t.same(content(`--XYZ\r\n${one}\r\n--XYZ\r\n${two}\r\n--XYZ--\r\n`), ['9:', one, '12:', two, '--\r\n'])
  t.same(content('--XYZ--'), ['--'])
  t.same(content('--XYZ\r\n\r\n--XYZ--'), ['0:', '', '--'])
  t.equal((content(`${'--XYZ\r\n\r\n'.repeat(1000)}--XYZ--`) as unknown[]).length, 2001)
  t.equal(content(`${'--XYZ\r\n\r\n'.repeat(1001)}--XYZ--`), undefined, 'too many')
  t.same(content('--XYZ-- \t\r\n\r\n \t'), ['-- \t\r\n\r\n \t'])
  t.equal(content('--XYZ-- \t\r\n\r\n \t '), undefined, 'more than eight blanks')
  t.equal(content('--XYZ--\r\nx'), undefined)
  t.equal(content('--XYZ\r\nXYZ\r\n--XYZ--'), undefined, 'the boundary within a part')
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
  for (const type of ['text/plain', 'application/x-www-form-urlencoded; charset=utf-16'])
    t.equal(spelled('a=1', ['Content-Type', type]), undefined, type)
})

t.test('a body is read in steps of about 64 KiB', async (t) => {
  const long = 'a=1&'.repeat(64 * KiB)
  const small = Array.from({ length: 900 }, (_, n) => part(`f${n}`, 'x'.repeat(300)))
  const large = part('f', 'x'.repeat(256 * KiB))
  const of = (name: string, body: string): { result: string; pauses: number } => {
    const headers = body.startsWith('--XYZ') ? MULTIPART : URLENCODED
    const { result, pauses } = paused(formField(headers, Buffer.from(body), name))
    return { result: shown(result), pauses }
  }
  t.same(of('key', `${long}key=k`), { result: 'value:k', pauses: 3 })
  t.same(of('key', `x=${'y'.repeat(64 * KiB)}&key=k`), { result: 'value:k', pauses: 1 })
  t.same(of('key', 'a=1'), { result: 'absent', pauses: 0 })
  t.same(of('key', ''), { result: 'absent', pauses: 0 })
  for (const [body, parts, whole] of [
    [multipart(part('key', 'k')), 0, 0],
    [multipart(...small, part('key', 'k')), 8, 12],
    [multipart(large, part('key', 'k')), 10, 10],
    [multipart(large, large, part('key', 'k')), 20, 20],
  ] as const) {
    t.equal(paused(multipartParts(MULTIPART, Buffer.from(body))).pauses, parts)
    t.same(of('key', body), { result: 'value:k', pauses: whole })
  }
  const plain = paused(formContent(URLENCODED, Buffer.from('a'.repeat(256 * KiB))))
  t.equal(plain.pauses, 0, 'nothing to undo')
  const escaped = paused(formContent(URLENCODED, Buffer.from('%41'.repeat(88 * KiB))))
  t.equal(escaped.pauses, 4)
  t.equal(escaped.result?.toString(), 'A'.repeat(88 * KiB))
})

t.test('the boundary counts wherever it overlaps itself, and across two steps', async (t) => {
  const headers = ['Content-Type', 'multipart/form-data; boundary=aa']
  const parts = (content: string): number | undefined =>
    atOnce(multipartParts(headers, Buffer.from(`--aa\r\n\r\n${content}\r\n--aa--`)))?.parts.length
  t.equal(parts('a'), 1)
  for (const content of ['aa', 'baab', '-aa', 'aaa']) t.equal(parts(content), undefined, content)
  for (let length = 64 * KiB - 12; length < 64 * KiB + 4; length++) {
    t.equal(parts('b'.repeat(length)), 1, `${length}`)
    t.equal(parts(`${'b'.repeat(length)}aab`), undefined, `${length} and the boundary`)
  }
})
