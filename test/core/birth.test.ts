import t from 'tap'
import { isBornSince, issuedAt } from '../../src/core/key.ts'

const SINCE = 1_795_000_000_000
const NOW = SINCE + 60_000
const grace = { now: NOW, since: SINCE }

function uuid7(at: number): string {
  const hex = at.toString(16).padStart(12, '0')
  return `${hex.slice(0, 8)}-${hex.slice(8)}-7abc-8def-0123456789ab`
}

void t.test('W03 a UUIDv7 key shows when it was created', async (t) => {
  t.equal(isBornSince(grace, uuid7(SINCE + 1000), null), true)
  t.equal(isBornSince(grace, uuid7(SINCE + 1000).toUpperCase(), null), true)
  t.equal(isBornSince(grace, uuid7(SINCE + 999), null), false, 'the client’s clock may be a second ahead')
  t.equal(isBornSince(grace, uuid7(NOW), null), true)
  t.equal(isBornSince(grace, uuid7(NOW + 1), null), false, 'a time in the future proves nothing')
})

void t.test('W03 a time of issue or of first sending also shows when the key was created', async (t) => {
  t.equal(isBornSince(grace, 'k', SINCE + 1000), true)
  t.equal(isBornSince(grace, 'k', SINCE), false)
  t.equal(isBornSince(grace, 'k', NOW + 1), false)
})

void t.test('W03 any other key proves nothing about its age', async (t) => {
  for (const key of ['k', '', 'c9e3a1f0-0000-4000-8000-000000000000', `x${uuid7(NOW)}`, `${uuid7(NOW)}0`])
    t.equal(isBornSince(grace, key, null), false)
})

void t.test('W03 the earlier of two creation times counts', async (t) => {
  t.equal(isBornSince(grace, uuid7(NOW), SINCE), false)
  t.equal(isBornSince(grace, uuid7(SINCE), NOW), false)
  t.equal(isBornSince(grace, uuid7(NOW), 0), false, 'a derived key proves nothing, whatever its form')
  t.equal(isBornSince(grace, uuid7(NOW), NOW - 1), true)
})

void t.test('an issued key carries its time of issue, unless an earlier version issued it', async (t) => {
  const key = (payload: object) => `h.${Buffer.from(JSON.stringify(payload)).toString('base64url')}.signature`
  t.equal(issuedAt(key({ jti: 'x', iat: 1_800_000_000, exp: 1 })), 1_800_000_000_000)
  t.equal(issuedAt(key({ jti: 'x', exp: 1 })), null)
  t.equal(issuedAt('no token'), null)
})
