import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { RedisKeys } from '../../src/store/redis.ts'

const KEYS = new RedisKeys('pay.eu')
/** The digest that begins with this byte. */
const idOf = (first: number, rest = 0xaf) =>
  Buffer.from([first, ...Array.from({ length: 31 }, () => rest)]).toString('base64url') as RecordId

void t.test('the layout of keys is fixed for good', async (t) => {
  const id = idOf(0xaf)
  const own = 'idempotency:pay.eu:{af}:'
  t.equal(KEYS.record(id), `${own}r:${id}`)
  t.equal(KEYS.history(id), `${own}h:${id}`)
  t.equal(KEYS.channel(id), `${own}c:${id}`)
  t.equal(KEYS.bucket(id), `${own}n:${id}`)
  t.equal(KEYS.index(id), `${own}u`)
  t.equal(KEYS.epoch(id), `${own}e`)
  t.equal(KEYS.marker(0xaf), `${own}w`)
  t.strictSame(KEYS.recordAndIndex(id), [`${own}r:${id}`, `${own}u`])
  t.equal(KEYS.globOf(id.slice(0, 8)), `${own}r:${id.slice(0, 8)}*`)
  t.equal(KEYS.glob, 'idempotency:pay.eu:*:r:*')
})

void t.test('the shard of an id is its first byte', async (t) => {
  const bytes = Array.from({ length: 256 }, (_, n) => n)
  t.strictSame(KEYS.shards, bytes)
  for (const rest of [0x00, 0xff])
    t.strictSame(
      bytes.map((n) => KEYS.shardOf(idOf(n, rest))),
      bytes,
    )
  t.strictSame(
    KEYS.indexes,
    bytes.map((n) => KEYS.index(idOf(n))),
  )
  t.strictSame(
    KEYS.epochs,
    bytes.map((n) => KEYS.epoch(idOf(n))),
  )
  t.equal(KEYS.index(idOf(7)), 'idempotency:pay.eu:{07}:u')
})

void t.test('only the key of a record is taken for one', async (t) => {
  const id = idOf(1)
  t.equal(KEYS.idOf(KEYS.record(id)), id)
  for (const other of [
    KEYS.history(id),
    KEYS.index(id),
    KEYS.record(id).replace('{01}', '{02}'),
    new RedisKeys('pay').record(id),
    `x${KEYS.record(id)}`,
    `${KEYS.record(id)}x`,
    KEYS.record(id.slice(1) as RecordId),
    `idempotency:pay.eu:{00}:r:${'*'.repeat(43)}`,
    id,
    '',
  ])
    t.equal(KEYS.idOf(other), null, other)
})
