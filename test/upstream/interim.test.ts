import t from 'tap'
import { InterimFilter } from '../../src/upstream/undici-fixes.ts'

const CONTINUE = 'HTTP/1.1 100 Continue\r\n\r\n'
const ANSWER = 'HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok'

/** What the parser sees of these pieces after a request was written. */
function filtered(...pieces: string[]): string {
  const filter = new InterimFilter()
  filter.expectHead()
  return pieces.map((piece) => filter.pass(Buffer.from(piece, 'latin1'))?.toString('latin1') ?? '').join('')
}

void t.test('P09 interim heads are removed, however they are cut into pieces', (t) => {
  for (const interim of [
    '',
    CONTINUE,
    CONTINUE + CONTINUE,
    'HTTP/1.0 100\r\n\r\n',
    'HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nLink: </b>\r\n\r\n',
    `HTTP/1.1 102 Processing\r\n\r\n${CONTINUE}`,
    'HTTP/1.1 199 \r\nX: 1\r\n\r\n',
  ]) {
    const all = interim + ANSWER
    t.equal(filtered(all), ANSWER)
    t.equal(filtered(...all.split('')), ANSWER)
    for (let i = 1; i < all.length; i++) t.equal(filtered(all.slice(0, i), all.slice(i)), ANSWER)
  }
  t.end()
})

void t.test('P09 interim heads are removed only at the start of an expected answer', (t) => {
  const body = `HTTP/1.1 201 Created\r\nContent-Length: ${CONTINUE.length}\r\n\r\n${CONTINUE}`
  t.equal(filtered(body), body)
  t.equal(filtered(...body.split('')), body)
  const filter = new InterimFilter()
  t.equal(filter.pass(Buffer.from(CONTINUE))?.toString(), CONTINUE, 'nothing is expected: unchanged')
  t.end()
})

void t.test('P09 interim heads are removed for each request of a kept connection', (t) => {
  const filter = new InterimFilter()
  for (let i = 0; i < 3; i++) {
    filter.expectHead()
    t.equal(filter.pass(Buffer.from(CONTINUE)), null)
    t.equal(filter.pass(Buffer.from(ANSWER))?.toString(), ANSWER)
  }
  t.end()
})

void t.test('U07 what is not an interim head reaches the parser unchanged', (t) => {
  for (const bytes of [
    'garbage',
    '\r\n\r\n',
    'HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n',
    `HTTP/1.1 100 Continue\n\nHTTP/1.1 201 Created\r\n\r\n${ANSWER}`,
    `HTTP/1.1 100 Continue\r\nX: 1\nHTTP/1.1 200 OK\r\n\r\n${ANSWER}`,
    `HTTP/1.1 1000 Odd\r\n\r\n${ANSWER}`,
    `HTTP/1.1 10\r\n\r\n${ANSWER}`,
    `HTTP/1.1 100 ${'x'.repeat(20_000)}`,
    `HTTP/1.1 201 ${'x'.repeat(20_000)}`,
  ])
    t.equal(filtered(bytes), bytes)
  t.equal(filtered('HTTP/1.1 2', '\r\nx'), 'HTTP/1.1 2\r\nx')
  t.equal(filtered('HTT', 'Q'), 'HTTQ')
  t.equal(filtered(''), '')
  t.end()
})

void t.test('P01 the reason phrase reaches a parser that reads UTF-8 as the latin1 of its bytes', (t) => {
  const rest = '\r\nX: caf\xe9\r\n\r\n\xe9'
  const wire = `HTTP/1.1 201 Cr\xe9\xe9${rest}`
  const seen = `HTTP/1.1 201 ${Buffer.from('Créé').toString('latin1')}${rest}`
  t.equal(filtered(wire), seen)
  t.equal(filtered(...wire.split('')), seen)
  t.end()
})
