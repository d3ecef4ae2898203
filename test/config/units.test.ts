import t from 'tap'
import { didYouMean, substitute } from '../../src/config/read.ts'
import { formatDuration, formatSize, type Parsed, parseDuration, parseSize } from '../../src/config/units.ts'
import { address, isLoopback } from '../../src/config/urls.ts'

function told<T>(parsed: Parsed<T>): T | string {
  return parsed.ok ? parsed.value : parsed.message
}

void t.test('a duration is a whole number with a unit, or 0', async (t) => {
  for (const [text, value] of Object.entries({
    '250ms': 250,
    '30s': 30_000,
    '5m': 300_000,
    '24h': 86_400_000,
    '7d': 604_800_000,
    '0': 0,
    '0s': 0,
    '007s': 7000,
  })) {
    t.equal(told(parseDuration(text)), value, text)
  }
  for (const text of ['', '1 s', ...'30 1.5h -1s 1h30m 1w 30S s 1toString 99999999999999999d'.split(' ')]) {
    t.match(
      told(parseDuration(text)),
      /^found .*; allowed: a duration: a whole number with ms, s, m, h or d/,
      text,
    )
  }
})

void t.test('a size is a whole number with a unit, or 0', async (t) => {
  for (const [text, value] of Object.entries({
    '0': 0,
    '512B': 512,
    '64KiB': 65_536,
    '1MiB': 1_048_576,
    '2GiB': 2_147_483_648,
  })) {
    t.equal(told(parseSize(text)), value, text)
  }
  for (const text of ['1', '1MB', '1 MiB', '1mib', '1.5MiB', '-1B']) {
    t.match(told(parseSize(text)), /^found .*; allowed: a size: a whole number with B, KiB, MiB or GiB/, text)
  }
})

void t.test('values are shown in the largest unit that leaves a whole number', async (t) => {
  t.equal(
    [0, 250, 1500, 30_000, 60_000, 120_000, 86_400_000, 172_800_000].map(formatDuration).join(),
    '0ms,250ms,1500ms,30s,60s,2m,24h,2d',
  )
  t.strictSame([100, 65_536, 1_048_577, 2 ** 30].map(formatSize), ['100B', '64KiB', '1048577B', '1GiB'])
})

void t.test('an address is host:port, and loopback addresses are recognised', async (t) => {
  t.strictSame(told(address.parse('0.0.0.0:0')), { host: '0.0.0.0', port: 0 })
  t.strictSame(told(address.parse('[::1]:8080')), { host: '::1', port: 8080 })
  t.strictSame(told(address.parse('proxy.internal:65535')), { host: 'proxy.internal', port: 65_535 })
  for (const text of [
    'a b:80',
    ...'8080 :8080 a: a:65536 ::1:80 [a]:80 [127.0.0.1]:80 300.1.1.1:80 -a:80 a..b:80 a:80/'.split(' '),
  ]) {
    t.match(told(address.parse(text)), /^found .*; allowed: host:port/, text)
  }
  for (const host of ['127.0.0.1', '127.1.2.3', '::1', 'localhost']) t.ok(isLoopback(host), host)
  for (const host of ['0.0.0.0', '::', '128.0.0.1', '127.example.com']) t.notOk(isLoopback(host), host)
})

void t.test('environment variables are substituted, with defaults and an escape', async (t) => {
  const env = { A: 'a', EMPTY: '', NESTED: '${A}' }
  const texts = {
    '${A}': 'a',
    'x${A}y${A}z': 'xayaz',
    '${NONE:-b}': 'b',
    '${EMPTY:-b}': 'b',
    '${EMPTY}': '',
    '${NONE:-}': '',
    '${NONE:-a:-b}': 'a:-b',
    '${NESTED}': '${A}',
    '$${A}': '${A}',
    '$A $ $$': '$A $ $$',
  }
  for (const [text, value] of Object.entries(texts)) t.equal(told(substitute(text, env)), value, text)
  t.equal(
    told(substitute('${NONE}', env)),
    'the environment variable NONE is not set; allowed: set it, or ${NONE:-default}',
  )
  for (const text of ['${}', '${1A}', '${A', '${A-b}', '${ A }'])
    t.match(told(substitute(text, env)), 'allowed: ${NAME}', text)
})

void t.test('didYouMean finds the name that was meant, or none', async (t) => {
  const known = ['timeout', 'connectTimeout', 'url', 'tls']
  t.equal(didYouMean('timout', known), 'timeout')
  t.equal(didYouMean('connecttimeout', known), 'connectTimeout')
  t.equal(didYouMean('uri', known), 'url')
  t.equal(didYouMean('ulr', known), 'url', 'neighbours swapped')
  t.equal(didYouMean('retries', known), null)
})
