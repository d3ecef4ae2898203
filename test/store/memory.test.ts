import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { MEMORY_BYTES, MemoryRegister } from '../../src/store/memory.ts'
import { SMALL_RECORD } from '../../src/store/stamping.ts'
import { registerContract } from './contract.ts'
import { bytesOf, newId, newToken, response, SPANS } from './fixtures.ts'

registerContract(t, 'memory', async () => {
  let now = 1_795_000_000_000
  const register = new MemoryRegister({ clock: () => now, maxBytes: MEMORY_BYTES })
  return {
    register,
    peer: register,
    advance: (ms) => void (now += ms),
    [Symbol.asyncDispose]: () => register.close(),
  }
})

void t.test('T01 a record is there up to the last millisecond', async (t) => {
  let now = 1000
  const register = new MemoryRegister({ clock: () => now, maxBytes: MEMORY_BYTES })
  const id = newId()
  await register.put(id, bytesOf('unknown', newToken()), { dueIn: 10, dropIn: 100 })
  now = 1009
  t.same(await register.due(1), [])
  now = 1010
  t.same(await register.due(1), [id])
  now = 1099
  t.ok((await register.get(id)).bytes)
  now = 1100
  t.equal((await register.get(id)).bytes, null)
})

void t.test(
  'a full store refuses new records, evicts nothing, and takes up again when something expires',
  async (t) => {
    let now = 1000
    const register = new MemoryRegister({ clock: () => now, maxBytes: 64 * 1024 })
    const token = newToken()
    const ids: RecordId[] = []
    for (;;) {
      const id = newId()
      const bytes = bytesOf('in_progress', token)
      try {
        await register.put(id, bytes, { dueIn: 10, dropIn: ids.length === 3 ? 500 : 1000 })
      } catch (error) {
        t.match(error, { name: 'StoreFull', maybeApplied: false })
        break
      }
      ids.push(id)
    }
    t.ok(ids.length > 20, `${ids.length} records fit`)
    for (const id of ids) t.ok((await register.get(id)).bytes)
    now = 1500
    t.ok((await register.put(newId(), bytesOf('in_progress', token), SPANS)).done, 'there is room again')
    t.equal((await register.get(ids[3] as RecordId)).bytes, null)
  },
)

void t.test(
  'a full store takes the outcome of what is executed, unless it brings a large body',
  async (t) => {
    const token = newToken()
    const room = bytesOf('in_progress', token).length + 600
    const register = new MemoryRegister({ clock: () => 1000, maxBytes: room })
    const id = newId()
    await register.put(id, bytesOf('in_progress', token), SPANS)
    const own = { token, states: ['in_progress', 'completed'] } as const
    const large = bytesOf('completed', token, { result: response(Buffer.alloc(SMALL_RECORD)) })
    await t.rejects(register.swap(id, own, large, SPANS, false), { name: 'StoreFull' })
    t.ok((await register.swap(id, own, bytesOf('completed', token), SPANS, false)).done)
    await t.rejects(register.put(newId(), bytesOf('in_progress', token), SPANS), { name: 'StoreFull' })
    t.ok(await register.remove(id, 1001), 'what is removed makes room')
    t.ok((await register.put(newId(), bytesOf('in_progress', token), SPANS)).done)
  },
)

void t.test('expiry and due order hold over many records in any order', async (t) => {
  let now = 0
  const register = new MemoryRegister({ clock: () => now, maxBytes: MEMORY_BYTES })
  const spans = Array.from({ length: 300 }, (_, n) => ({
    dueIn: 1 + ((n * 7919) % 1000),
    dropIn: 2000 + ((n * 104729) % 1000),
  }))
  const records: { id: RecordId; dueIn: number; dropIn: number }[] = []
  for (const span of spans) {
    const id = newId()
    await register.put(id, bytesOf('unknown', newToken(), { fence: 1, createdAt: 1 }), span)
    records.push({ id, ...span })
  }
  now = 500
  const due = records.filter((r) => r.dueIn <= now).map((r) => r.dueIn)
  const found = (await register.due(1000)).map((id) => records.find((r) => r.id === id)?.dueIn)
  t.same(
    found,
    due.toSorted((a, b) => a - b),
  )
  now = 2500
  for (const { id, dropIn } of records) t.equal((await register.get(id)).bytes !== null, dropIn > now)
})
