import { createHmac, hkdfSync } from 'node:crypto'
import { SignJWT } from 'jose'
import t from 'tap'
import { readKey } from '../../src/core/key.ts'
import type { KeyPolicy } from '../../src/core/policy.ts'
import { Issuer } from '../../src/credentials/issuer.ts'
import { ROUTE } from '../core/fixtures.ts'

/** 2027-01-15T08:00:00Z. */
const NOW = 1_800_000_000_000
const HOUR = 3_600_000
const SECRET = Buffer.from('0123456789abcdef')
const issuer = new Issuer(SECRET, HOUR)

t.test('an issued key is a valid Idempotency-Key, quoted or not', async (t) => {
  const policy: KeyPolicy = { ...ROUTE.key, from: [{ kind: 'header', name: 'idempotency-key' }] }
  // Expiry in seconds has eleven digits in the year 5138.
  for (const now of [0, NOW, 99_999_999_999_000]) {
    const { key } = await issuer.issue(now)
    t.match(key, /^[A-Za-z0-9_.-]{1,255}$/)
    t.ok(key.length <= 200, `${key.length} characters`)
    for (const line of [key, `"${key}"`])
      t.match(readKey({ headers: ['Idempotency-Key', line], query: '' }, policy, null), { kind: 'key', key })
  }
})

t.test('a key is valid until it expires by the given clock, and expired from then on', async (t) => {
  const { key, expiresAt } = await issuer.issue(NOW)
  t.equal(expiresAt, NOW + HOUR)
  for (const [now, expected] of [
    [NOW, 'valid'],
    [NOW - HOUR, 'valid'],
    [expiresAt - 1, 'valid'],
    [expiresAt, 'expired'],
    [expiresAt + 1000 * HOUR, 'expired'],
  ] as const)
    t.equal(await issuer.check(key, now), expected)
})

t.test('a key lives at least its ttl, and less than a second longer', async (t) => {
  const brief = new Issuer(SECRET, 1)
  for (const now of [NOW - 1, NOW, NOW + 1, NOW + 998, NOW + 999]) {
    const { key, expiresAt } = await brief.issue(now)
    t.ok(expiresAt >= now + 1 && expiresAt < now + 1001)
    t.equal(await brief.check(key, expiresAt - 1), 'valid')
    t.equal(await brief.check(key, expiresAt), 'expired')
  }
})

t.test('no two keys are the same', async (t) => {
  const keys = await Promise.all(Array.from({ length: 500 }, () => issuer.issue(NOW)))
  t.equal(new Set(keys.map(({ key }) => key)).size, 500)
  const [, payload = ''] = (keys[0]?.key ?? '').split('.')
  const { jti } = JSON.parse(Buffer.from(payload, 'base64url').toString()) as { jti: string }
  t.equal(Buffer.from(jti, 'base64url').length, 16, '128 bits')
})

t.test('replicas with the same secret accept each other’s keys; others do not', async (t) => {
  const { key } = await issuer.issue(NOW)
  t.equal(await new Issuer(Buffer.from(SECRET), 1).check(key, NOW), 'valid')
  t.equal(await new Issuer(Buffer.from('0123456789abcdeF'), HOUR).check(key, NOW), 'forged')
  t.equal(await new Issuer(Buffer.concat([SECRET, Buffer.alloc(1)]), HOUR).check(key, NOW), 'forged')
})

t.test('a key that this issuer did not make is forged, expired or not', async (t) => {
  const { key } = await issuer.issue(NOW)
  const [head = '', body = '', signature = ''] = key.split('.')
  const part = (value: unknown): string => Buffer.from(JSON.stringify(value)).toString('base64url')
  const type = 'idempotency-key+jwt'
  const seconds = NOW / 1000
  const claims = { jti: 'x', exp: seconds + 60 }
  const derived = Buffer.from(hkdfSync('sha256', SECRET, '', 'idempotency-proxy/issuer/1', 32))
  const signed = async (secret: Buffer, header: object, payload: object): Promise<string> =>
    new SignJWT({ ...payload }).setProtectedHeader({ alg: 'HS256', ...header }).sign(secret)
  t.equal(await issuer.check(await signed(derived, { typ: type }, claims), NOW), 'valid', 'the control')
  const none = part({ alg: 'none', typ: type })
  for (const [what, forged] of [
    ['nothing', ''],
    ['a plain key', 'order-4711'],
    ['a long key', 'a.b.'.repeat(2000)],
    ['a changed payload', `${head}.${part({ ...claims, exp: seconds + 9e6 })}.${signature}`],
    ['a changed header', `${part({ alg: 'HS512', typ: type })}.${body}.${signature}`],
    ['no algorithm', `${none}.${body}.`],
    ['no algorithm, with a signature', `${none}.${body}.${signature}`],
    ['a signature cut short', key.slice(0, -1)],
    ['a longer signature', `${key}A`],
    ['signed with the secret itself', await signed(SECRET, { typ: type }, claims)],
    [
      'signed with the secret itself, and expired',
      await signed(SECRET, { typ: type }, { ...claims, exp: 1 }),
    ],
    ['of the same secret for another purpose', await signed(SECRET, { typ: 'JWT' }, { ...claims, sub: 'u' })],
    ['of another type', await signed(derived, { typ: 'JWT' }, claims)],
    ['of no type', await signed(derived, {}, claims)],
    ['without an end', await signed(derived, { typ: type }, { jti: 'x' })],
    ['without an id', await signed(derived, { typ: type }, { exp: claims.exp })],
    ['another algorithm', await signed(derived, { typ: type, alg: 'HS512' }, claims)],
    [
      'an HMAC with the secret, by hand',
      `${head}.${body}.${createHmac('sha256', SECRET).update(`${head}.${body}`).digest('base64url')}`,
    ],
    ['a trailing space', `${key} `],
    ['a trailing newline', `${key}\n`],
    ['padding', `${key}=`],
  ] as const)
    t.equal(await issuer.check(forged, NOW), 'forged', what)
})

t.test('an issued key has only one valid spelling', async (t) => {
  const { key } = await issuer.issue(NOW)
  const alphabet = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_'
  const spellings = alphabet.split('').map((last) => key.slice(0, -1) + last)
  const verdicts = await Promise.all(spellings.map((spelling) => issuer.check(spelling, NOW)))
  t.strictSame(
    spellings.filter((_, i) => verdicts[i] === 'valid'),
    [key],
  )
})
