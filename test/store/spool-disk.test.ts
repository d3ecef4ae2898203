import { readdirSync, readFileSync, readlinkSync, rmSync, statSync, writeFileSync } from 'node:fs'
import type { FileHandle } from 'node:fs/promises'
import { join } from 'node:path'
import t from 'tap'
import { entryFrame, frameBytes, parseSegmentName, readSegment } from '../../src/store/spool.ts'
import {
  closing,
  dropsInVain,
  fails,
  folder,
  handles,
  keptAll,
  left,
  lookInto,
  opened,
  segments,
} from './spool-fixtures.ts'

/*
 * What a spool has on disk, and holds open: no more than it needs, and all that it counts.
 */

function bytesIn(directory: string): number {
  return segments(directory).reduce((sum, name) => sum + statSync(join(directory, name)).size, 0)
}

const SIGNS = { entry: '+', tombstone: '-' }

/** All frames, oldest first, as `+1` for entry 1 and `-1` for its tombstone. */
function framesIn(directory: string): string[] {
  return segments(directory).flatMap((name) => {
    const marker = parseSegmentName(name)?.marker ?? Buffer.alloc(8)
    return readSegment(readFileSync(join(directory, name)), marker).map((piece) =>
      piece.kind === 'unreadable' ? 'unreadable' : `${SIGNS[piece.kind]}${piece.number}`,
    )
  })
}

/** The segments that this process has open; null where the system does not say. */
function openSegments(directory: string): string[] | null {
  if (process.platform !== 'linux') return null
  return readdirSync('/proc/self/fd').flatMap((fd) => {
    try {
      const path = readlinkSync(`/proc/self/fd/${fd}`)
      return path.startsWith(join(directory, 'spool-v1-')) ? [path] : []
    } catch {
      // The one that has listed them.
      return []
    }
  })
}

void t.test('a spool has the room that its files leave, whatever is written, dropped or found', async (t) => {
  const directory = folder(t)
  const max = 10_000
  const { spool, append } = await opened(directory, max)
  t.equal(spool.room, max)
  const [one, two] = [append('x'.repeat(100)), append('')]
  t.equal(spool.room, max - frameBytes(100) - frameBytes(0), 'also of what is on its way')
  await keptAll([one, two])
  t.equal(spool.room, max - frameBytes(100) - frameBytes(0))
  t.equal(spool.room, max - bytesIn(directory))
  // Its tombstone is written once, however often it is dropped.
  spool.drop(one)
  spool.drop(one)
  t.equal(await append('three').done, 'kept')
  t.equal(spool.room, max - bytesIn(directory))
  spool.drop(one)
  // The disk is busy with the first of these.
  const [written, unwritten] = [append('four'), append('five')]
  spool.drop(unwritten)
  await keptAll([written, unwritten])
  t.equal(await append('six').done, 'kept')
  t.equal(spool.room, max - bytesIn(directory))
  await spool.close()
  t.strictSame(framesIn(directory), ['+1', '+2', '-1', '+3', '+4', '+6'])

  const again = await opened(directory, max)
  t.equal(again.spool.room, max - bytesIn(directory))
  for (const entry of again.entries) again.spool.drop(entry)
  await again.spool.close()
  t.same(segments(directory), [])
  t.equal(again.spool.room, max)
})

void t.test('a spool is filled to its last byte, and has no room if it was larger before', async (t) => {
  const directory = folder(t)
  const full = await opened(directory, frameBytes(100))
  t.equal(await full.append('x'.repeat(100)).done, 'kept')
  t.equal(full.spool.room, 0)
  await full.spool.close()
  const { spool, append } = await opened(directory, 100)
  t.equal(spool.room, 0)
  t.match(await append('').done, { message: /^the spool is full/ })
  await spool.close()
})

void t.test(
  'an entry that stays in a file after a failed write keeps its room, and its tombstone',
  async (t) => {
    const directory = folder(t)
    const { spool, append } = await opened(directory, 10_000)
    t.equal(await append('before').done, 'kept')
    await fails(t, 'datasync', 'EIO')
    await fails(t, 'truncate', 'EIO')
    const refused = append('refused')
    t.match(await refused.done, { message: 'EIO' })
    t.equal(spool.room, 10_000 - bytesIn(directory))
    spool.drop(refused)
    await spool.close()
    t.same((await lookInto(directory)).found, ['before'])
  },
)

void t.test('what was taken back after a failed write takes no room', async (t) => {
  const directory = folder(t)
  const { spool, append } = await opened(directory, 10_000)
  t.equal(await append('before').done, 'kept')
  await fails(t, 'datasync', 'EIO')
  t.match(await append('refused').done, { message: 'EIO' })
  t.equal(spool.room, 10_000 - frameBytes(6))
  t.equal(bytesIn(directory), frameBytes(6))
  await spool.close()
})

void t.test('a tombstone that was retried is not written again', async (t) => {
  const directory = folder(t)
  const { spool, append, said } = await opened(directory)
  const [one, two] = [append('one'), append('two')]
  await keptAll([one, two])
  await dropsInVain(t, { spool, said }, one)
  t.equal(await append('three').done, 'kept')
  t.equal(await append('four').done, 'kept')
  await spool.close()
  t.strictSame(framesIn(directory), ['+1', '+2', '+3', '-1', '+4'])
})

void t.test(
  'a spool that cannot be written at its end has removed the empty segment when it has closed',
  async (t) => {
    const directory = folder(t)
    const { spool, append, said } = await opened(directory)
    const [one, two] = [append('one'), append('two')]
    await keptAll([one, two])
    await dropsInVain(t, { spool, said }, one)
    await fails(t, 'appendFile', 'EIO')
    const prototype = await handles()
    let syncs = 0
    const { sync } = prototype
    t.intercept(prototype, 'sync', {
      value: async function (this: FileHandle) {
        await sync.call(this)
        syncs++
      },
    })
    await spool.close()
    t.equal(said.length, 2)
    t.equal(segments(directory).length, 1)
    t.equal(syncs, 2, 'the directory was synced with it and without it')
  },
)

void t.test('a failed write is taken back before its file is closed', async (t) => {
  const directory = folder(t)
  const { spool, append } = await opened(directory)
  const done: string[] = []
  await closing(t, async (close) => {
    done.push('closed')
    await close()
  })
  const prototype = await handles()
  const { truncate } = prototype
  t.intercept(prototype, 'truncate', {
    value: async function (this: FileHandle, length: number) {
      for (let n = 0; n < 3; n++) await new Promise((next) => setImmediate(next))
      await truncate.call(this, length)
      done.push('taken back')
    },
  })
  await fails(t, 'datasync', 'EIO')
  t.match(await append('refused').done, { message: 'EIO' })
  t.strictSame(done, ['taken back', 'closed'])
  await spool.close()
})

void t.test('the segment that is written to stays open when an older one is deleted', async (t) => {
  const directory = folder(t)
  // A segment is full at 1000 bytes.
  const { spool, append } = await opened(directory, 16_000)
  const old = append('x'.repeat(1000))
  t.equal(await old.done, 'kept')
  t.equal(await append('new').done, 'kept')
  t.equal(segments(directory).length, 2)
  spool.drop(old)
  t.equal(await append('newer').done, 'kept')
  t.equal(await append('newest').done, 'kept')
  await spool.close()
  t.strictSame(framesIn(directory), ['+2', '+3', '-1', '+4'])
  t.equal(segments(directory).length, 1)
})

void t.test('one segment is open at most, and none after the end', async (t) => {
  const directory = folder(t)
  if (openSegments(directory) === null) return
  const { spool, append } = await opened(directory, 1600)
  for (let n = 0; n < 3; n++) t.equal(await append('x'.repeat(100)).done, 'kept')
  t.strictSame(
    openSegments(directory),
    segments(directory)
      .slice(2)
      .map((name) => join(directory, name)),
  )
  // The name of the next one cannot be synced.
  await fails(t, 'sync', 'EIO')
  t.match(await append('x').done, { message: 'EIO' })
  t.strictSame(openSegments(directory), [])
  await spool.close()
})

void t.test('a damaged segment that cannot be set aside is reported', async (t) => {
  const { directory, file } = await left(t, ['one'])
  writeFileSync(file, Buffer.concat([readFileSync(file), Buffer.from('damage')]))
  const { spool, entries, said } = await opened(directory)
  rmSync(file)
  for (const entry of entries) spool.drop(entry)
  await spool.close()
  t.strictSame(said.slice(1), ['a file of the spool cannot be removed'])
})

void t.test('one other file in the directory is reported', async (t) => {
  const directory = folder(t)
  writeFileSync(join(directory, 'notes.txt'), 'theirs')
  t.strictSame((await lookInto(directory)).said, ['the spool directory has other files; they are left alone'])
})

void t.test('stray bytes hide no frame, and are counted', async (t) => {
  const marker = Buffer.from('0123456789abcdef', 'hex')
  const [one, two] = [1, 2].map((n) => entryFrame(marker, n, Buffer.from('payload'))) as [Buffer, Buffer]
  const entry = (number: number) => ({ kind: 'entry', number, payload: Buffer.from('payload') })
  const stray = (at: number, bytes: number) => ({ kind: 'unreadable', at, bytes, blank: false })
  t.strictSame(
    readSegment(Buffer.concat([Buffer.from('x'), one, Buffer.from('yz'), two, Buffer.from('end')]), marker),
    [stray(0, 1), entry(1), stray(43, 2), entry(2), stray(87, 3)],
  )
})

// docs/record-format.md
void t.test('a frame has its kind and its number where the format says', async (t) => {
  const directory = folder(t)
  const { spool, append } = await opened(directory)
  const [one, two] = [append('payload'), append('')]
  await keptAll([one, two])
  spool.drop(one)
  await spool.close()
  const [name = ''] = segments(directory)
  const marker = /-([0-9a-f]{16})$/.exec(name)?.[1] ?? ''
  const bytes = readFileSync(join(directory, name))
  const frame = (at: number, length: number) => {
    const hex = bytes.subarray(at, at + 35 + length).toString('hex')
    return [hex.slice(0, 38), hex.slice(70)]
  }
  t.strictSame(frame(0, 7), [
    `${marker}01${'1'.padStart(12, '0')}00000007`,
    Buffer.from('payload').toString('hex'),
  ])
  t.strictSame(frame(42, 0), [`${marker}01${'2'.padStart(12, '0')}00000000`, ''])
  t.strictSame(frame(77, 8), [`${marker}02${'1'.padStart(12, '0')}00000008`, marker])
  t.equal(bytes.length, 120)
})
