import type { Test } from 'tap'
import type { RecordDraft, RecordId, Spans } from '../../src/core/record.ts'
import { areTheSame, copyRecord } from '../../src/store/moving/copying.ts'
import { decodeRecord, readStamps } from '../../src/store/record/codec.ts'
import type { Store } from '../../src/store/register.ts'
import { bytesOf, HOUR, MINUTE, newId, newToken, SPANS } from './fixtures.ts'

export const ALL = { completedOnly: false, writes: true }
export const NOTE = { tag: 'replayed:a', count: 3, firstAgo: HOUR, lastAgo: MINUTE, text: '{"status":201}' }

export async function bytesIn(store: Store, id: RecordId): Promise<Buffer> {
  const { bytes } = await store.get(id)
  if (bytes === null) throw new Error('there is no record')
  return bytes
}

/** Writes it as a proxy does: claimed, then settled. */
export async function made(
  store: Store,
  state: RecordDraft['state'],
  more: { readonly id?: RecordId; readonly spans?: Spans; readonly over?: Partial<RecordDraft> } = {},
): Promise<{ readonly id: RecordId; readonly token: Buffer; readonly bytes: Buffer }> {
  const { id = newId(), spans = SPANS, over = {} } = more
  const token = newToken()
  await store.put(id, bytesOf('in_progress', token), SPANS)
  if (state !== 'in_progress' || spans !== SPANS) {
    const states = ['in_progress'] as const
    await store.swap(id, { token, states }, bytesOf(state, token, over), spans, false)
  }
  return { id, token, bytes: await bytesIn(store, id) }
}

/** What a copy keeps of a record. */
function essence(bytes: Buffer, now: number): unknown {
  const { version: _version, updatedAt: _updatedAt, dropAt, ...record } = decodeRecord(bytes)
  const { due } = readStamps(bytes)
  return { ...record, leaseUntil: 0, nextLookAt: 0, expiresAt: 0, dropIn: dropAt - now, dueIn: due - now }
}

/** How to open an empty store of each kind. */
export type Kinds = Readonly<Record<string, () => Promise<Store>>>

/** A record in any state is copied unchanged from each to each other one. */
export async function copiesUnchanged(t: Test, kinds: Kinds): Promise<void> {
  for (const [source, openFrom] of Object.entries(kinds))
    for (const [target, openTo] of Object.entries(kinds).filter(([name]) => name !== source)) {
      const [from, to] = [await openFrom(), await openTo()]
      const large = Buffer.alloc(300_000, 0xfe)
      const records = [
        await made(from, 'completed'),
        await made(from, 'completed', {
          over: {
            result: {
              kept: true,
              response: { status: 200, reason: '', headers: [], body: large, trailers: [] },
            },
          } as Partial<RecordDraft>,
        }),
        await made(from, 'failed_retryable', { over: { lastError: 'refused', attempts: 7 } }),
        await made(from, 'unknown', { spans: { dueIn: -MINUTE, dropIn: HOUR } }),
        await made(from, 'in_progress', { spans: { dueIn: -MINUTE, dropIn: HOUR } }),
        await made(from, 'completed', { spans: { dueIn: -MINUTE, dropIn: HOUR } }),
        await made(from, 'expired'),
      ]
      for (const { id, bytes } of records) {
        await from.history.append(id, [NOTE, { ...NOTE, tag: 'misuse:a' }])
        const { updatedAt } = readStamps(bytes)
        t.strictSame(await copyRecord(from, to, id, ALL), { became: 'copied', updatedAt })
        const [ours, there] = [await from.get(id), await to.get(id)]
        const state = decodeRecord(bytes).state
        // The remaining times may differ by as long as the copy took, not by more.
        const [a, b] = [essence(bytes, ours.now), essence(there.bytes as Buffer, there.now)] as [
          Record<string, number>,
          Record<string, number>,
        ]
        for (const left of ['dropIn', 'dueIn']) {
          t.ok(
            Math.abs((a[left] as number) - (b[left] as number)) < MINUTE,
            `${source} ${target} ${state} ${left}`,
          )
          a[left] = b[left] = 0
        }
        t.strictSame(b, a, `${source} → ${target}: ${state}`)
        const notes = await to.history.read(id)
        t.match(notes, [{ tag: 'replayed:a', count: 3, text: NOTE.text }, { tag: 'misuse:a' }])
        const [first] = notes
        t.ok(Math.abs(there.now - (first?.first ?? 0) - HOUR) < MINUTE, 'a note keeps its age')

        const version = readStamps(there.bytes as Buffer).version
        t.match(await copyRecord(from, to, id, ALL), { became: 'there' }, 'a second copy changes nothing')
        t.equal(readStamps(await bytesIn(to, id)).version, version)
        t.equal((await to.history.read(id)).length, 2)
      }
      const page = async (store: Store) => new Set((await store.list('unresolved', null, 10)).ids)
      t.strictSame(await page(to), await page(from), 'the sweeper of the target finds them')
    }
}

/** Each knows itself again, and no other. */
export async function knowsItself(t: Test, kinds: Kinds, other: Store): Promise<void> {
  for (const [kind, open] of Object.entries(kinds)) {
    const store = await open()
    t.equal(await areTheSame(store, other), false, kind)
    t.equal(await areTheSame(store, store), true, kind)
  }
}
