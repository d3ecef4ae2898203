import { randomBytes } from 'node:crypto'
import { gzipSync, zstdCompressSync } from 'node:zlib'
import t from 'tap'
import type { CompletedResponse } from '../../src/core/record.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { decodeRecord, keptIn } from '../../src/store/record/codec.ts'
import { coded, codingOf, decoded, decodedSoon, mayShrink } from '../../src/store/record/compression.ts'
import { packed } from '../../src/store/record/packed.ts'
import { Sealer } from '../../src/store/record/sealing.ts'
import { Records } from '../../src/store/records.ts'
import { bytesOf, draft, newId, newToken, SPANS } from './fixtures.ts'

const [GZIP, ZSTD] = [codingOf('gzip'), codingOf('zstd')]
const CODINGS = { gzip: GZIP, zstd: ZSTD } as const
const KiB = 1024
const MiB = KiB ** 2

function text(length: number): Buffer {
  return Buffer.alloc(length, '{"id":"ch_1","amount":4200,"currency":"eur"},')
}

function answer(body: Buffer, headers = ['Content-Type', 'application/json']): CompletedResponse {
  return { kept: true, response: { status: 200, reason: 'OK', headers, body, trailers: [] } }
}

function setup() {
  return memoryStore({ clock: () => 1_795_000_000_000, maxBytes: MEMORY_BYTES })
}

void t.test('only bodies from 512 bytes that are not compressed already may shrink', async (t) => {
  for (const [headers, length, may] of [
    [[], 512, true],
    [[], 511, false],
    [['Content-Type', 'application/json'], 512, true],
    [['Content-Type', ' image/svg+xml; charset=utf-8'], 512, true],
    [['X-Type', 'image/png'], 512, true],
    [['Vary', 'Content-Encoding', 'X', 'y'], 512, true],
    [['Content-Encoding', 'identity'], 512, false],
    [['X', 'y', 'CONTENT-ENCODING', 'gzip'], 512, false],
    ...[
      'image/png',
      'Image/JPEG',
      ' image/webp',
      'video/mp4',
      'audio/ogg',
      'font/woff2',
      'application/pdf',
    ].map((type) => [['content-type', type], 9999, false] as const),
    ...[
      'zip',
      'gzip',
      'zstd',
      'x-7z-compressed',
      'vnd.openxmlformats-officedocument.wordprocessingml.document',
    ].map((type) => [['Content-Type', `application/${type}`], 9999, false] as const),
  ] as const)
    t.equal(mayShrink(headers, length), may, `${headers.join()} ${length}`)
})

void t.test('a compressed body is restored, at once or on the thread pool', async (t) => {
  for (const coding of [GZIP, ZSTD])
    for (const length of [600, 16 * KiB, 16 * KiB + 1, 16 * MiB]) {
      const payload = text(length)
      const code = (await coded(payload, coding)) as Buffer
      t.ok(code.length < payload.length * 0.9)
      t.ok(decoded(code, coding).equals(payload))
      t.ok((await decodedSoon(code, coding)).equals(payload))
    }
})

void t.test('a body that saves less than a tenth, or is too large, is not compressed', async (t) => {
  for (const coding of [GZIP, ZSTD]) {
    t.equal(await coded(randomBytes(600), coding), null)
    t.equal(await coded(randomBytes(100_000), coding), null)
    t.equal(await coded(text(16 * MiB + 1), coding), null)
  }
})

void t.test('a decompression bomb and damaged bytes are corrupt records', async (t) => {
  const long = text(20 * KiB)
  const framed = (length: number, code: Buffer) => {
    const frame = Buffer.alloc(4)
    frame.writeUInt32BE(length)
    return Buffer.concat([frame, code])
  }
  for (const [coding, pack] of [
    [GZIP, gzipSync],
    [ZSTD, zstdCompressSync],
  ] as const) {
    const code = pack(long)
    const cases: [Buffer, RegExp][] = [
      [Buffer.alloc(0), /compressed from 0 bytes; allowed: 1 to 16777216/],
      [Buffer.alloc(3), /compressed from 0 bytes/],
      [framed(0, code), /compressed from 0 bytes/],
      [framed(16 * MiB + 1, pack(Buffer.alloc(16 * MiB + 1))), /compressed from 16777217 bytes/],
      [framed(0xffffffff, code), /compressed from 4294967295 bytes/],
      [framed(1000, pack(Buffer.alloc(20 * MiB))), /cannot be decompressed/],
      [framed(20_000, pack(Buffer.alloc(20 * MiB))), /cannot be decompressed/],
      [framed(long.length + 1, code), /^the stored response differs in length from what the record says$/],
      [
        framed(long.length, Buffer.concat([code, Buffer.alloc(1)])),
        /differs in length|cannot be decompressed/,
      ],
      [framed(long.length, code.subarray(0, -1)), /cannot be decompressed/],
      [framed(long.length, Buffer.alloc(0)), /cannot be decompressed/],
      [framed(long.length, randomBytes(50)), /cannot be decompressed/],
    ]
    for (const [bytes, message] of cases) {
      t.throws(() => decoded(bytes, coding), { name: 'CorruptRecord', message })
      await t.rejects(async () => decodedSoon(bytes, coding), { name: 'CorruptRecord', message })
    }
  }
  t.throws(() => decoded(framed(long.length, gzipSync(long)), 3), {
    message: /coding 3; this version reads 0 to 2/,
  })
})

void t.test('a flipped bit anywhere never changes the body: it is noticed', async (t) => {
  const payload = text(600)
  for (const coding of [GZIP, ZSTD]) {
    const code = (await coded(payload, coding)) as Buffer
    let noticed = 0
    for (let bit = 0; bit < 8 * code.length; bit++) {
      const damaged = Buffer.from(code)
      damaged[bit >> 3] = (damaged[bit >> 3] as number) ^ (1 << (bit & 7))
      try {
        if (!decoded(damaged, coding).equals(payload)) t.fail(`bit ${bit} of coding ${coding}`)
      } catch {
        noticed++
      }
    }
    t.ok(noticed > 4 * code.length, `${noticed} of ${8 * code.length}`)
  }
})

for (const [compression, coding] of Object.entries(CODINGS) as ['gzip' | 'zstd', number][]) {
  for (const sealer of [null, new Sealer([{ id: 'a', key: randomBytes(32) }])]) {
    const how = `${compression}${sealer === null ? '' : ', sealed'}`
    void t.test(`${how}: responses are stored smaller and returned unchanged`, async (t) => {
      const register = setup()
      const records = new Records(packed(register, sealer, compression))
      for (const [body, headers, shrinks] of [
        [text(1000), undefined, true],
        [text(100 * KiB), undefined, true],
        [text(1000), ['Content-Encoding', 'br'], false],
        [text(100), undefined, false],
        [randomBytes(1000), undefined, false],
        [randomBytes(100 * KiB), undefined, false],
      ] as const) {
        const [id, token] = [newId(), newToken()]
        const result = answer(body, headers as string[] | undefined)
        await records.claim(id, draft('in_progress', token), SPANS)
        t.match(await records.settle(id, draft('completed', token, { result, key: 'k' }), SPANS), {
          kind: 'written',
        })
        t.match(await records.get(id), { record: { result, key: 'k' } })
        t.match(await records.claim(id, draft('in_progress', newToken()), SPANS), { record: { result } })
        t.match(await records.settle(id, draft('completed', newToken(), { result }), SPANS), {
          kind: 'refused',
          record: { result },
        })
        const { bytes } = await register.get(id)
        const stored = bytes as Buffer
        t.equal(stored.length < body.length, shrinks)
        if (sealer === null) {
          t.equal(stored[keptIn(stored)?.codingAt as number], shrinks ? coding : 0)
          t.match(
            await new Records(register).get(id),
            { record: { result } },
            'even after compression was switched off',
          )
        }
      }
    })
  }
}

void t.test('a record that does not decompress is refused and left unchanged', async (t) => {
  const register = setup()
  const [id, token] = [newId(), newToken()]
  for (const body of [text(1000), text(100 * KiB)]) {
    const plain = new Records(packed(register, null, 'zstd'))
    await plain.claim(id, draft('in_progress', token), SPANS)
    await plain.settle(id, draft('completed', token, { result: answer(body) }), SPANS)
    const { bytes } = await register.get(id)
    const damaged = Buffer.from(bytes as Buffer)
    damaged.writeUInt8(damaged.readUInt8(damaged.length - 1) ^ 1, damaged.length - 1)
    const version = damaged.readUIntBE(4, 6)
    await register.swap(id, { version }, damaged, SPANS, false)
    for (const store of [register, packed(register, null, 'gzip')]) {
      const records = new Records(store)
      t.match(await records.get(id), { kind: 'corrupt', error: { message: /cannot be decompressed/ } })
      t.match(await records.claim(id, draft('in_progress', newToken()), SPANS), { kind: 'corrupt' })
      t.match(await records.settle(id, draft('completed', newToken()), SPANS), { kind: 'corrupt' })
    }
    t.ok(await register.remove(id, version + 1))
  }
})

void t.test('a payload that is longer or shorter than its parts say is a corrupt record', async (t) => {
  for (const change of [
    (plain: Buffer) => Buffer.concat([plain, Buffer.alloc(1)]),
    (plain: Buffer) => plain.subarray(0, -1),
  ]) {
    const bytes = bytesOf('completed', newToken(), { result: answer(text(1000)) })
    const { codingAt, payloadAt } = keptIn(bytes) as { codingAt: number; payloadAt: number }
    const code = (await coded(change(bytes.subarray(payloadAt)), ZSTD)) as Buffer
    const record = Buffer.concat([bytes.subarray(0, payloadAt), code])
    record.writeUInt8(ZSTD, codingAt)
    t.throws(() => decodeRecord(record), { name: 'CorruptRecord' })
  }
})
