import { hash, randomBytes } from 'node:crypto'
import t from 'tap'
import { STATES } from '../../src/core/record.ts'
import { around } from '../../src/store/around.ts'
import { memoryStore } from '../../src/store/memory.ts'
import { PREFIX } from '../../src/store/record/codec.ts'
import { packed } from '../../src/store/record/packed.ts'
import { prefixOf, versionOf } from '../../src/store/record/prefix.ts'
import { Sealer } from '../../src/store/record/sealing.ts'
import { Records } from '../../src/store/records.ts'
import { CorruptRecord, type Store } from '../../src/store/register.ts'
import { bytesOf, newId, newToken, SPANS } from './fixtures.ts'

const NOW = 1_790_000_000_000

function memory(): Store {
  return memoryStore({ clock: () => NOW, maxBytes: 1e6 })
}

function sealer(): Sealer {
  return new Sealer([{ id: 'k1', key: randomBytes(32) }])
}

void t.test('§11 the first bytes of a record give its version, state and lease', async (t) => {
  const bytes = bytesOf('in_progress', newToken())
  bytes.writeUIntBE(7, PREFIX.version, 6)
  bytes.writeUIntBE(NOW, PREFIX.due, 6)
  t.same(prefixOf(bytes), { version: 7, state: 'in_progress', leaseUntil: NOW })
  bytes[PREFIX.schema] = 99
  t.equal(versionOf(bytes), 7, 'whatever its schema')
  bytes[PREFIX.state] = 99
  t.strictSame(prefixOf(bytes), { version: 7, state: null, leaseUntil: null }, 'an unknown state')
})

void t.test('§11 these bytes suffice, and fewer are no record', async (t) => {
  for (const state of STATES) {
    const bytes = bytesOf(state, newToken())
    bytes.writeUIntBE(7, PREFIX.version, 6)
    bytes.writeUIntBE(NOW, PREFIX.due, 6)
    const leaseUntil = state === 'in_progress' ? NOW : null
    t.strictSame(prefixOf(bytes.subarray(0, PREFIX.end)), { version: 7, state, leaseUntil })
    const short = bytes.subarray(0, PREFIX.end - 1)
    t.strictSame(prefixOf(short), {
      version: Number.parseInt(hash('sha1', short).slice(0, 12), 16),
      state: null,
      leaseUntil: null,
    })
  }
})

void t.test('§11 a wrapper asks a store for the prefix alone, if it can read less', async (t) => {
  const store = memory()
  const id = newId()
  const key = sealer()
  await packed(store, key).put(id, bytesOf('in_progress', newToken()), SPANS)
  const { now, bytes } = await store.get(id)
  t.strictSame(await packed(store, key).stored?.(id), { now, bytes }, 'it stays sealed')
  const cheap = { now, bytes: Buffer.from('the beginning') }
  t.equal(await packed({ ...store, stored: async () => cheap }, key).stored?.(id), cheap)
})

void t.test('§11 bytes that are not a record have the start of their SHA-1 as their version', async (t) => {
  const zeros = 0xda39a3ee5e6b
  t.same(prefixOf(Buffer.alloc(0)), { version: zeros, state: null, leaseUntil: null })
  t.not(versionOf(Buffer.alloc(60)), versionOf(Buffer.alloc(61)))
})

void t.test('§11 a record that no key here opens still gives its version through wrappers', async (t) => {
  const store = memory()
  const id = newId()
  const put = await packed(store, sealer()).put(id, bytesOf('in_progress', newToken()), SPANS)
  const other = packed(store, sealer())
  const wrappedBy = (inner: Store): Store => ({ ...around(inner, (_, run) => run()), close: inner.close })
  for (const wrapped of [other, wrappedBy(other), packed(wrappedBy(store), sealer())]) {
    const records = new Records(packed(wrapped, null))
    t.match(await records.get(id), { kind: 'corrupt', error: CorruptRecord })
    const read = await records.prefix(id)
    t.match(read, { kind: 'prefix', prefix: { state: 'in_progress', leaseUntil: NOW + SPANS.dueIn } })
    if (!put.done || read.kind !== 'prefix') throw new Error('unreachable')
    t.equal(read.prefix?.version, put.stamp.version)
    t.match(await records.prefix(newId()), { prefix: null })
  }
})
