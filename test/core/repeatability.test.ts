import fc from 'fast-check'
import t from 'tap'
import { readFirstSent } from '../../src/core/key.ts'

const read = (...lines: string[]): ReturnType<typeof readFirstSent> =>
  readFirstSent(lines.flatMap((line) => ['Repeatability-First-Sent', line]))

t.test('T05 Repeatability-First-Sent is read as the instant of first sending', async (t) => {
  t.same(readFirstSent(['Repeatability-Request-ID', 'a']), { kind: 'absent' })
  t.same(read('Sun, 06 Nov 1994 08:49:37 GMT'), { kind: 'sent', at: 784_111_777_000 })
  t.same(read(' Sun, 06 Nov 1994 08:49:37 GMT\t'), { kind: 'sent', at: 784_111_777_000 })
  t.same(readFirstSent(['REPEATABILITY-FIRST-SENT', 'Thu, 29 Feb 2024 23:59:59 GMT']), {
    kind: 'sent',
    at: Date.UTC(2024, 1, 29, 23, 59, 59),
  })
})

t.test('T05 anything but one IMF-fixdate is invalid', async (t) => {
  for (const line of [
    '',
    'now',
    'Invalid Date',
    '1994-11-06T08:49:37Z',
    '784111777',
    // The obsolete forms of RFC 9110 §5.6.7.
    'Sunday, 06-Nov-94 08:49:37 GMT',
    'Sun Nov  6 08:49:37 1994',
    'Mon, 06 Nov 1994 08:49:37 GMT',
    'Thu, 30 Feb 2024 00:00:00 GMT',
    'Sun, 06 Nov 1994 24:00:00 GMT',
    'Sun, 06 Nov 1994 08:49:60 GMT',
    'Sun, 06 Foo 1994 08:49:37 GMT',
    'Sun, 6 Nov 1994 08:49:37 GMT',
    'sun, 06 nov 1994 08:49:37 gmt',
    'Sun, 06 Nov 1994 08:49:37 UTC',
    'Sun, 06 Nov 1994 08:49:37 +0000',
    'Sun, 06 Nov 1994 08:49:37 GMT, Sun, 06 Nov 1994 08:49:37 GMT',
    'Sat, 01 Jan 10000 00:00:00 GMT',
  ])
    t.match(read(line), { kind: 'invalid', detail: /^repeatability-first-sent: / }, line)
  const date = 'Sun, 06 Nov 1994 08:49:37 GMT'
  t.match(read(date, date), { kind: 'invalid', detail: /2 header lines/ })
})

t.test('T05 every date that a client prints is read back as the same instant', async () => {
  const seconds = fc.integer({ min: 0, max: Date.UTC(9999, 11, 31) / 1000 })
  fc.assert(
    fc.property(seconds, (second) => {
      const reading = read(new Date(second * 1000).toUTCString())
      return reading.kind === 'sent' && reading.at === second * 1000
    }),
  )
})
