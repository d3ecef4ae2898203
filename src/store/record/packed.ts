import type { StoreConfig } from '../../config/config.ts'
import type { RecordId } from '../../core/record.ts'
import type { GetReply, Note, Store, WriteReply } from '../register.ts'
import { BinaryReader } from './binary.ts'
import { keptIn } from './codec.ts'
import { coded, codingOf, decodedSoon, mayShrink } from './compression.ts'
import type { Sealer } from './sealing.ts'

/** Wraps `store`: compresses and then seals records, and seals histories. Returns records as they were given, with the store's stamps. */
export function packed(
  store: Store,
  sealer: Sealer | null,
  compression: StoreConfig['compression'] = 'off',
): Store {
  const { history } = store
  const pack = async (id: RecordId, bytes: Buffer): Promise<Buffer> => {
    const smaller = compression === 'off' ? bytes : await compressed(bytes, codingOf(compression))
    return sealer === null ? smaller : sealer.seal(id, smaller)
  }
  const unpacked = async <Reply extends WriteReply<Buffer | null> | GetReply>(
    id: RecordId,
    reply: Reply,
  ): Promise<Reply> => {
    if (!('bytes' in reply) || reply.bytes === null) return reply
    const plain = sealer === null ? reply.bytes : sealer.open(id, reply.bytes)
    return { ...reply, bytes: await decompressed(plain) }
  }
  return {
    ...store,
    put: async (id, bytes, spans, entry) =>
      unpacked(id, await store.put(id, await pack(id, bytes), spans, entry)),
    swap: async (id, condition, bytes, spans, nextFence) =>
      unpacked(id, await store.swap(id, condition, await pack(id, bytes), spans, nextFence)),
    get: async (id) => unpacked(id, await store.get(id)),
    stored: (id) => store.stored?.(id) ?? store.get(id),
    history: sealer === null ? history : sealedHistory(history, sealer),
  }
}

function sealedHistory(history: Store['history'], sealer: Sealer): Store['history'] {
  const sealed = (id: RecordId, note: Note): Note => ({
    ...note,
    text: sealer.sealNote(id, note.tag, note.text),
  })
  return {
    append: (id, notes) =>
      history.append(
        id,
        notes.map((note) => sealed(id, note)),
      ),
    async read(id) {
      const notes = await history.read(id)
      return notes.map((note) => ({ ...note, text: sealer.openNote(id, note.tag, note.text) }))
    },
  }
}

/** Compresses the record's response, if there is one and it pays off. */
async function compressed(bytes: Buffer, coding: number): Promise<Buffer> {
  const kept = keptIn(bytes)
  if (kept === null) return bytes
  const { codingAt, payloadAt } = kept
  const r = new BinaryReader(bytes, payloadAt)
  const headers = r.lines()
  r.lines()
  if (!mayShrink(headers, r.u32())) return bytes
  const payload = await coded(bytes.subarray(payloadAt), coding)
  return payload === null ? bytes : withPayload(bytes, payloadAt, payload, codingAt, coding)
}

/** Restores the record's response. */
async function decompressed(bytes: Buffer): Promise<Buffer> {
  const kept = keptIn(bytes)
  if (kept === null) return bytes
  const { codingAt, payloadAt } = kept
  const coding = bytes[codingAt] as number
  if (coding === 0) return bytes
  return withPayload(bytes, payloadAt, await decodedSoon(bytes.subarray(payloadAt), coding), codingAt, 0)
}

function withPayload(
  bytes: Buffer,
  payloadAt: number,
  payload: Buffer,
  codingAt: number,
  coding: number,
): Buffer {
  const record = Buffer.concat([bytes.subarray(0, payloadAt), payload])
  record[codingAt] = coding
  return record
}
