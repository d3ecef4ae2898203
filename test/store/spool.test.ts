import { createHash, randomBytes } from 'node:crypto'
import {
  copyFileSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs'
import { join, relative } from 'node:path'
import t from 'tap'
import { workerFolder } from '../../src/store/spool/folders.ts'
import type { KeepResult, SpoolEntry } from '../../src/store/spool/log.ts'
import { entryFrame, frameBytes, parseSegmentName, readSegment, Spool } from '../../src/store/spool/log.ts'
import { settling } from './fixtures.ts'
import {
  around,
  aside,
  CUT,
  closing,
  dropsInVain,
  fails,
  folder,
  keptAll,
  left,
  lookInto,
  MiB,
  opened,
  segments,
} from './spool-fixtures.ts'

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

void t.test('kept entries are found again, in order, until they are dropped', async (t) => {
  const directory = join(folder(t), 'made', 'where', 'missing')
  const first = await opened(directory)
  t.same(first.found, [])
  t.equal(statSync(directory).mode & 0o777, 0o700)
  const [a, b, c] = ['a', '', 'c'].map(first.append)
  t.same(await keptAll([a, b, c] as SpoolEntry[]), ['kept', 'kept', 'kept'])
  for (const name of readdirSync(directory))
    t.equal(statSync(join(directory, name)).mode & 0o777, 0o600, name)
  first.spool.drop(a as SpoolEntry)
  first.spool.drop(a as SpoolEntry)
  await first.spool.close()

  const second = await opened(directory)
  t.same(second.found, ['', 'c'])
  t.same(await keptAll(second.entries), ['kept', 'kept'])
  t.equal(await second.append('d').done, 'kept')
  second.spool.drop(second.entries[1] as SpoolEntry)
  await second.spool.close()

  const third = await opened(directory)
  t.same(third.found, ['', 'd'])
  for (const entry of third.entries) third.spool.drop(entry)
  await third.spool.close()
  t.same(segments(directory), [], 'nothing is left over')
  t.same(await lookInto(directory), { found: [], said: [] })
  t.same([first.said, second.said, third.said], [[], [], []])
})

void t.test('payloads may be any bytes, even a forged frame', async (t) => {
  const { directory, file } = await left(t, ['x'])
  const { marker } = parseSegmentName(file.slice(directory.length + 1)) ?? { marker: Buffer.alloc(0) }
  const forged = entryFrame(marker, 99, Buffer.from('forged'))
  const payloads = [randomBytes(300_000), forged, Buffer.concat([Buffer.alloc(9), forged])]
  const { spool, append } = await opened(directory)
  t.same(await keptAll(payloads.map(append)), ['kept', 'kept', 'kept'])
  await spool.close()
  const { found } = await Spool.open({ directory, maxBytes: MiB, say: () => t.fail() })
  t.same(
    found.map(({ payload }) => payload),
    [Buffer.from('x'), ...payloads],
  )
})

void t.test('entries appended while the disk is busy share a sync', async (t) => {
  const { directory, spool, append } = await opened(folder(t))
  let syncs = 0
  await around(t, 'datasync', (call) => (syncs++, call()))
  const entries = Array.from({ length: 500 }, (_, i) => append(`entry ${i}`))
  t.ok((await keptAll(entries)).every((end) => end === 'kept'))
  t.ok(syncs < 5, `${syncs} syncs for 500 entries`)
  await spool.close()
  t.equal((await lookInto(directory)).found.length, 500)
})

void t.test('an entry counts as kept once it is synced, not when it is written', async (t) => {
  const { directory, spool, append } = await opened(folder(t))
  const [syncing, synced] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()]
  await around(t, 'datasync', async (call) => {
    syncing.resolve()
    await synced.promise
    await call()
  })
  const entry = append('x')
  const ended = settling(entry.done)
  await syncing.promise
  t.ok(statSync(join(directory, segments(directory)[0] as string)).size > 0, 'it is written')
  t.notOk(ended())
  synced.resolve()
  t.equal(await entry.done, 'kept')
  await spool.close()
})

void t.test('an entry dropped before it is written never reaches the disk', async (t) => {
  const { directory, spool, append } = await opened(folder(t))
  const first = append('first')
  const second = append('second')
  spool.drop(second)
  t.same(await keptAll([first, second]), ['kept', 'kept'])
  const bytes = readFileSync(join(directory, segments(directory)[0] as string))
  t.notOk(bytes.includes('second'))
  const last = append('last')
  spool.drop(last)
  t.equal(await last.done, 'kept')
  await spool.close()
  t.same((await lookInto(directory)).found, ['first'])
})

void t.test('a segment cut at any byte yields its whole entries and nothing else', async (t) => {
  const texts = ['one', '', 'three and more']
  const { directory, file } = await left(t, texts)
  const whole = readFileSync(file)
  const ends = texts.map((_, i) =>
    texts.slice(0, i + 1).reduce((sum, text) => sum + frameBytes(text.length), 0),
  )
  t.equal(ends.at(-1), whole.length)
  for (let length = 0; length <= whole.length; length++) {
    writeFileSync(file, whole.subarray(0, length))
    const { spool, found, said, entries } = await opened(directory)
    const complete = ends.filter((end) => end <= length)
    t.strictSame(found, texts.slice(0, complete.length), `cut at ${length}`)
    const torn = length > (complete.at(-1) ?? 0)
    t.strictSame(said, torn ? [CUT] : [], `cut at ${length}`)
    for (const entry of entries) spool.drop(entry)
    await spool.close()
    t.equal(aside(directory).length, torn ? 1 : 0, `cut at ${length}: set aside`)
    for (const name of readdirSync(directory)) rmSync(join(directory, name))
  }
})

void t.test('flipping any bit of a frame makes it unreadable', async (t) => {
  const marker = randomBytes(8)
  const frames = [1, 2].map((number) => entryFrame(marker, number, Buffer.from(`payload ${number}`)))
  const [one, two] = frames as [Buffer, Buffer]
  for (let bit = 0; bit < one.length * 8; bit++) {
    const flipped = Buffer.from(one)
    flipped.writeUInt8(flipped.readUInt8(bit >> 3) ^ (1 << (bit & 7)), bit >> 3)
    t.strictSame(
      readSegment(Buffer.concat([flipped, two]), marker),
      [
        { kind: 'unreadable', at: 0, bytes: one.length, blank: false },
        { kind: 'entry', number: 2, payload: Buffer.from('payload 2') },
      ],
      `bit ${bit}`,
    )
  }
  t.strictSame(readSegment(Buffer.concat(frames), randomBytes(8)), [
    { kind: 'unreadable', at: 0, bytes: one.length + two.length, blank: false },
  ])
})

void t.test('a frame of an unknown kind, from a later version, is skipped and set aside', async (t) => {
  const { directory, file } = await left(t, ['x'])
  const bytes = readFileSync(file)
  bytes.writeUInt8(9, 8)
  const digest = createHash('sha256').update(bytes.subarray(0, 19)).update(bytes.subarray(35)).digest()
  digest.copy(bytes, 19, 0, 16)
  writeFileSync(file, bytes)
  t.same(await lookInto(directory), { found: [], said: [CUT] })
  t.equal(aside(directory).length, 1)
})

void t.test('a tail of zeros, as a system crash leaves it, is reported but not set aside', async (t) => {
  const { directory, file } = await left(t, ['x'])
  writeFileSync(file, Buffer.concat([readFileSync(file), Buffer.alloc(4096)]))
  const { spool, found, said, entries } = await opened(directory)
  t.same(found, ['x'])
  t.same(said, [CUT])
  spool.drop(entries[0] as SpoolEntry)
  await spool.close()
  t.same(readdirSync(directory), ['spool.lock'])
})

void t.test('a damaged segment is set aside once its other entries are dropped', async (t) => {
  const { directory, file } = await left(t, ['one', 'two', 'three'])
  const bytes = readFileSync(file)
  bytes.fill(0xff, frameBytes(3), frameBytes(3) + 10)
  writeFileSync(file, bytes)
  const first = await opened(directory)
  t.same(first.found, ['one', 'three'])
  first.spool.drop(first.entries[0] as SpoolEntry)
  await first.spool.close()
  t.same(aside(directory), [])
  const second = await opened(directory)
  t.same(second.found, ['three'])
  second.spool.drop(second.entries[0] as SpoolEntry)
  await second.spool.close()
  const [name] = aside(directory)
  t.same(readFileSync(join(directory, name as string)), bytes)
  t.same(segments(directory), [])
  const { found, said } = await lookInto(directory)
  t.same(found, [])
  t.same(said, ['damaged files of the spool were set aside; inspect and remove them'])
})

void t.test('other files in the directory are left alone', async (t) => {
  const { directory } = await left(t, ['x'])
  mkdirSync(join(directory, 'lost+found'))
  const skipped = 'spool-v1-00000001-0123456789abcdef.skipped'
  for (const name of ['notes.txt', skipped, 'spool-v2-00000001-0123456789abcdef', 'other.damaged'])
    writeFileSync(join(directory, name), 'theirs')
  const { spool, found, said, entries } = await opened(directory)
  t.same(found, ['x'])
  t.same(said, ['the spool directory has other files; they are ignored'])
  spool.drop(entries[0] as SpoolEntry)
  await spool.close()
  t.same(readdirSync(directory).sort(), [
    'lost+found',
    'notes.txt',
    'other.damaged',
    skipped,
    'spool-v2-00000001-0123456789abcdef',
    'spool.lock',
  ])
})

void t.test('unneeded segments are deleted, and tombstones outlive the entries they revoke', async (t) => {
  const directory = folder(t)
  // A segment is closed once it has 100 bytes.
  let { spool, append, found, entries } = await opened(directory, 1600)
  const text = (n: number): string => `${n}`.padEnd(100, '.')
  const all: SpoolEntry[] = []
  for (let n = 0; n < 6; n++) {
    const entry = append(text(n))
    all.push(entry)
    t.equal(await entry.done, 'kept')
  }
  t.equal(segments(directory).length, 6)
  // Tombstones are in a later segment, which must outlive those of the entries that they revoke.
  for (const n of [1, 2, 3, 4, 5]) spool.drop(all[n] as SpoolEntry)
  await spool.close()
  ;({ spool, append, found, entries } = await opened(directory, 1600))
  t.same(found, [text(0)])
  t.ok(segments(directory).length < 7, 'segments without a live entry are gone')
  t.equal(await append('later').done, 'kept')
  spool.drop(entries[0] as SpoolEntry)
  await spool.close()
  t.equal(segments(directory).length, 1)
  ;({ spool, found } = await opened(directory, 1600))
  t.same(found, ['later'])
  await spool.close()
})

void t.test('a segment from another spool is read, though its entry numbers are the same', async (t) => {
  const [mine, theirs] = [await left(t, ['mine 1', 'mine 2']), await left(t, ['theirs 1', 'theirs 2'])]
  copyFileSync(theirs.file, join(mine.directory, theirs.file.slice(theirs.directory.length + 1)))
  const { spool, found, entries } = await opened(mine.directory)
  t.same(new Set(found), new Set(['mine 1', 'mine 2', 'theirs 1', 'theirs 2']))
  spool.drop(entries[found.indexOf('mine 1')] as SpoolEntry)
  await spool.close()
  t.same(new Set((await lookInto(mine.directory)).found), new Set(['mine 2', 'theirs 1', 'theirs 2']))
})

void t.test('a full spool refuses entries until there is room again', async (t) => {
  const directory = folder(t)
  const room = 2 * frameBytes(100) + 60
  const { spool, append } = await opened(directory, room)
  const text = 'x'.repeat(100)
  const [one, two, three] = [append(text), append(text), append(text)]
  t.same(await keptAll([one, two]), ['kept', 'kept'])
  t.match(await three.done, { message: `the spool is full: its limit is ${room} bytes` })
  t.match(await append('y'.repeat(100)).done, Error)
  spool.drop(three)
  spool.drop(one)
  spool.drop(two)
  t.equal(await lookUntil(() => append(text)), 'kept')
  await spool.close()
  t.same((await lookInto(directory)).found, [text])
})

/** Asks until an entry is kept: no event says when bytes are free again. */
async function lookUntil(ask: () => SpoolEntry): Promise<KeepResult> {
  for (;;) {
    const end = await ask().done
    if (end === 'kept') return end
    await new Promise((next) => setImmediate(next))
  }
}

void t.test('an entry that the disk refuses is not kept, and the next one is tried', async (t) => {
  for (const method of ['appendFile', 'datasync'] as const) {
    const { directory, spool, append, said } = await opened(folder(t), 10_000)
    const before = append('before')
    t.equal(await before.done, 'kept')
    await fails(t, method, 'ENOSPC: no space left on device')
    const refused = append('refused')
    t.match(await refused.done, { message: 'ENOSPC: no space left on device' }, method)
    t.same(said, ['the spool cannot be written'])
    t.equal(spool.room, 10_000 - frameBytes(6), 'it takes no room')
    t.equal(bytesIn(directory), frameBytes(6))
    spool.drop(refused)
    t.equal(await append('after').done, 'kept')
    await spool.close()
    t.same(await lookInto(directory), { found: ['before', 'after'], said: [] }, method)
  }
})

void t.test('a failed write that cannot be undone may be found again, and can be dropped', async (t) => {
  const { directory, spool, append } = await opened(folder(t), 10_000)
  await fails(t, 'datasync', 'EIO')
  await fails(t, 'truncate', 'EIO')
  await closing(t, 'appendFile', async (close) => {
    await close()
    throw new Error('EIO')
  })
  const entry = append('perhaps')
  t.match(await entry.done, { message: 'EIO' })
  t.equal(spool.room, 10_000 - bytesIn(directory), 'it keeps its room')
  const copy = folder(t)
  for (const name of segments(directory)) copyFileSync(join(directory, name), join(copy, name))
  t.same((await lookInto(copy)).found, ['perhaps'])
  spool.drop(entry)
  await spool.close()
  t.same((await lookInto(directory)).found, [])
})

void t.test('a tombstone that cannot be written is retried; at worst its entry is found again', async (t) => {
  for (const [way, found] of [
    ['with the next write', ['two', 'three', 'four']],
    ['at the end', ['two']],
    ['never', ['one', 'two']],
  ] as const) {
    const { directory, spool, append, said } = await opened(folder(t))
    const [one, two] = [append('one'), append('two')]
    await keptAll([one, two])
    await dropsInVain(t, { spool, said }, one)
    if (way === 'with the next write')
      for (const text of ['three', 'four']) t.equal(await append(text).done, 'kept')
    if (way === 'never') await fails(t, 'appendFile', 'EIO')
    await spool.close()
    if (way === 'with the next write')
      t.strictSame(framesIn(directory), ['+1', '+2', '+3', '-1', '+4'], 'once')
    t.equal(said.length, way === 'never' ? 2 : 1)
    t.same((await lookInto(directory)).found, found, way)
  }
})

void t.test('a segment whose tombstone could not be written is deleted with its last entry', async (t) => {
  const { directory, spool, append, said } = await opened(folder(t))
  const [one, two] = [append('one'), append('two')]
  await keptAll([one, two])
  await dropsInVain(t, { spool, said }, one, 'ENOSPC')
  spool.drop(two)
  await spool.close()
  t.same(segments(directory), [])
})

void t.test('after somebody removes the directory, nothing counts as kept and nothing crashes', async (t) => {
  const { directory, spool, append, said } = await opened(folder(t))
  const kept = append('kept')
  await kept.done
  rmSync(directory, { recursive: true })
  t.match(await append('gone').done, { message: /^spool-v1-00000001-.* was removed from outside/ })
  t.match(await append('gone').done, { message: /ENOENT/ })
  spool.drop(kept)
  await spool.close()
  t.equal(said.at(-1), 'a file of the spool cannot be removed')
})

void t.test('an entry is not kept if the directory entry of its new segment cannot be synced', async (t) => {
  const { directory, spool, append } = await opened(folder(t))
  await fails(t, 'sync', 'EIO: the directory')
  t.match(await append('x').done, { message: 'EIO: the directory' })
  t.equal(await append('y').done, 'kept')
  await spool.close()
  t.same((await lookInto(directory)).found, ['y'])
})

void t.test('folders that the spool needed are synced into those above', async (t) => {
  const above = folder(t)
  const spool = join(above, 'spool')
  const synced: string[] = []
  await around(t, 'sync', (call, { fd }) => {
    synced.push(readlinkSync(`/proc/self/fd/${fd}`))
    return call()
  })
  for (const [directory, wanted] of [
    [workerFolder(spool, 1), [spool, above]],
    [workerFolder(spool, 2), [spool]],
    [workerFolder(spool, 1), []],
    [relative('.', workerFolder(spool, 3)), [spool]],
  ] as const) {
    await lookInto(directory)
    t.strictSame(synced.splice(0), wanted, directory)
  }
})

void t.test('a closed spool takes no more entries or drops', async (t) => {
  const { directory, spool, append } = await opened(folder(t))
  const entry = append('x')
  const closing = spool.close()
  t.match(await append('y').done, { message: 'the spool is closed' })
  spool.drop(entry)
  await closing
  t.same((await lookInto(directory)).found, ['x'])
})

void t.test('entries of many segments are found in their order', async (t) => {
  const { directory, spool, append } = await opened(folder(t), 1600)
  const texts = Array.from({ length: 11 }, (_, n) => `${n}`.padEnd(100, '.'))
  for (const text of texts) t.equal(await append(text).done, 'kept')
  await spool.close()
  const names = segments(directory)
  t.equal(names.length, 11)
  t.same((await lookInto(directory)).found, texts)
  // The order of numbers, not of names.
  const copy = folder(t)
  for (const [n, name] of names.entries())
    copyFileSync(join(directory, name), join(copy, name.replace(/-\d{8}-/, `-${99_999_995 + n}-`)))
  t.same((await lookInto(copy)).found, texts)
})

void t.test('the directory is synced after a segment is created and after one is deleted', async (t) => {
  const { directory, spool, append } = await opened(folder(t))
  let [syncs, closed] = [0, 0]
  await closing(t, 'sync', (close) => (closed++, close()))
  await around(t, 'sync', (call) => (syncs++, call()))
  const entry = append('x')
  t.equal(await entry.done, 'kept')
  t.equal(syncs, 1)
  spool.drop(entry)
  await spool.close()
  t.same(segments(directory), [])
  t.equal(syncs, 2)
  t.equal(closed, 2, 'and no handle is left')
})

void t.test('a spool has closed, and lets go of its directory, once its segment has closed', async (t) => {
  const { directory, spool, append } = await opened(folder(t))
  t.equal(await append('x').done, 'kept')
  const { promise, resolve } = Promise.withResolvers<void>()
  let closed = 0
  await closing(t, 'appendFile', async (close) => {
    await promise
    closed++
    await close()
  })
  t.equal(await append('y').done, 'kept')
  const ending = spool.close()
  const isOver = settling(ending)
  for (let n = 0; n < 20; n++) await new Promise((next) => setImmediate(next))
  t.notOk(isOver())
  await t.rejects(opened(directory), { message: /another process is using it/ })
  resolve()
  await ending
  t.equal(closed, 1)
})

void t.test('startup errors name the directory and what is wrong with it', async (t) => {
  const directory = folder(t)
  const file = join(directory, 'file')
  writeFileSync(file, '')
  await t.rejects(opened(file), {
    message: `the directory ${file} cannot be used: EEXIST: file already exists, mkdir '${file}'`,
  })
  await t.rejects(opened(join(file, 'below')), { message: /cannot be used: ENOTDIR/ })
  const locked = join(directory, 'locked')
  mkdirSync(join(locked, 'spool.lock'), { recursive: true })
  await t.rejects(opened(locked), { message: /cannot be used: unable to open/ })
  const other = join(directory, 'other')
  mkdirSync(other)
  writeFileSync(join(other, 'spool.lock'), 'no database, and not empty')
  await t.rejects(opened(other), { message: /cannot be used: .*not a database/ })
  const unreadable = join(directory, 'unreadable')
  mkdirSync(join(unreadable, 'spool-v1-00000001-0123456789abcdef'), { recursive: true })
  await t.rejects(opened(unreadable), { message: /cannot be used: EISDIR/ })
  rmSync(join(unreadable, 'spool-v1-00000001-0123456789abcdef'), { recursive: true })
  t.same(await lookInto(unreadable), { found: [], said: [] }, 'the lock is free again')
})

/* What a spool has on disk, and holds open: no more than it needs, and all that it counts. */

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

void t.test('a spool that cannot be written at its end removes its empty segment', async (t) => {
  const { directory, spool, append, said } = await opened(folder(t))
  const [one, two] = [append('one'), append('two')]
  await keptAll([one, two])
  await dropsInVain(t, { spool, said }, one)
  await fails(t, 'appendFile', 'EIO')
  let syncs = 0
  await around(t, 'sync', (call) => call().then(() => void syncs++))
  await spool.close()
  t.equal(said.length, 2)
  t.equal(segments(directory).length, 1)
  t.equal(syncs, 2, 'the directory was synced with it and without it')
})

void t.test('a failed write is taken back before its file is closed', async (t) => {
  const { spool, append } = await opened(folder(t))
  const done: string[] = []
  await closing(t, 'appendFile', async (close) => {
    done.push('closed')
    await close()
  })
  await around(t, 'truncate', async (call) => {
    for (let n = 0; n < 3; n++) await new Promise((next) => setImmediate(next))
    await call()
    done.push('taken back')
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
  const { directory, spool, append } = await opened(folder(t))
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
