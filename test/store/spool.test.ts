import { type ChildProcess, spawn } from 'node:child_process'
import { createHash, randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { copyFileSync, mkdirSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs'
import type { FileHandle } from 'node:fs/promises'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { text } from 'node:stream/consumers'
import { fileURLToPath } from 'node:url'
import t, { type Test } from 'tap'
import type { KeepResult, SpoolEntry } from '../../src/store/spool.ts'
import { entryFrame, frameBytes, parseSegmentName, readSegment, Spool } from '../../src/store/spool.ts'
import {
  aside,
  CUT,
  closing,
  dropsInVain,
  fails,
  folder,
  handles,
  keptAll,
  left,
  lookInto,
  MiB,
  opened,
  segments,
} from './spool-fixtures.ts'

t.setTimeout(120_000)

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
  const directory = folder(t)
  const { spool, append } = await opened(directory)
  const syncs = t.capture(await handles(), 'datasync', (await handles()).datasync)
  const entries = Array.from({ length: 500 }, (_, i) => append(`entry ${i}`))
  t.ok((await keptAll(entries)).every((end) => end === 'kept'))
  t.ok(syncs().length < 5, `${syncs().length} syncs for 500 entries`)
  await spool.close()
  t.equal((await lookInto(directory)).found.length, 500)
})

void t.test('an entry counts as kept once it is synced, not when it is written', async (t) => {
  const directory = folder(t)
  const { spool, append } = await opened(directory)
  const { promise, resolve } = Promise.withResolvers<void>()
  const prototype = await handles()
  const { datasync } = prototype
  let syncing = (): void => {}
  const reached = new Promise<void>((next) => {
    syncing = next
  })
  t.intercept(prototype, 'datasync', {
    value: async function (this: FileHandle) {
      syncing()
      await promise
      return datasync.call(this)
    },
  })
  let ended = false
  const entry = append('x')
  void entry.done.then(() => {
    ended = true
  })
  await reached
  t.ok(statSync(join(directory, segments(directory)[0] as string)).size > 0, 'it is written')
  t.notOk(ended)
  resolve()
  t.equal(await entry.done, 'kept')
  await spool.close()
})

void t.test('an entry dropped before it is written never reaches the disk', async (t) => {
  const directory = folder(t)
  const { spool, append } = await opened(directory)
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

void t.test('a flipped bit in any byte yields no wrong entry and hides no other one', async (t) => {
  const texts = ['one', '', 'three', 'four']
  const { directory, file } = await left(t, texts.slice(0, 3))
  const again = await opened(directory)
  await again.append('four').done
  again.spool.drop(again.entries[2] as SpoolEntry)
  await again.spool.close()
  const [first, second] = segments(directory).map((name) => join(directory, name)) as [string, string]
  t.equal(first, file)
  const originals = [first, second].map((name) => [name, readFileSync(name)] as const)
  for (const [name, whole] of originals) {
    for (let at = 0; at < whole.length; at++) {
      for (const [other, bytes] of originals) writeFileSync(other, bytes)
      const flipped = Buffer.from(whole)
      flipped.writeUInt8(flipped.readUInt8(at) ^ (1 << (at % 8)), at)
      writeFileSync(name, flipped)
      const { spool, found, said } = await opened(directory)
      await spool.close()
      const title = `bit ${at % 8} of byte ${at} of ${name === first ? 'the first' : 'the second'}`
      t.strictSame(said, [CUT], title)
      // One frame is damaged: either an entry is lost, or a tombstone is, and then its entry comes back.
      t.ok(
        [
          ['', 'four'],
          ['one', 'four'],
          ['one', ''],
          ['one', '', 'four'],
          ['one', '', 'three', 'four'],
        ].some((expected) => JSON.stringify(found) === JSON.stringify(expected)),
        `${title}: ${JSON.stringify(found)}`,
      )
      t.same(aside(directory), [], 'the segment is still needed for its other entries')
    }
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
  t.same(said, ['the spool directory has other files; they are left alone'])
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

void t.test('no order of drops and restarts loses an entry or brings one back', async (t) => {
  let seed = 7
  const random = (below: number): number => {
    seed = (seed * 1_103_515_245 + 12_345) % 2 ** 31
    return Math.floor((seed / 2 ** 31) * below)
  }
  for (let round = 0; round < 10; round++) {
    const directory = folder(t)
    const live = new Map<string, SpoolEntry>()
    let now = await opened(directory, 8000)
    for (let step = 0; step < 80; step++) {
      const what = random(10)
      if (what < 5) {
        const text = `${round}.${step}`.padEnd(random(120), '-')
        const entry = now.append(text)
        if ((await entry.done) === 'kept') live.set(text, entry)
      } else if (what < 9) {
        const text = [...live.keys()][random(live.size)]
        if (text === undefined) continue
        now.spool.drop(live.get(text) as SpoolEntry)
        live.delete(text)
      } else {
        await now.spool.close()
        now = await opened(directory, 8000)
        t.strictSame(now.found, [...live.keys()], `round ${round}, step ${step}`)
        for (const [i, text] of now.found.entries()) live.set(text, now.entries[i] as SpoolEntry)
      }
    }
    for (const entry of live.values()) now.spool.drop(entry)
    await now.spool.close()
    t.same(segments(directory), [])
    t.same(now.said, [])
  }
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
  t.match(await three.done, { message: `the spool is full: it may take ${room} bytes` })
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
    const directory = folder(t)
    const { spool, append, said } = await opened(directory)
    const before = append('before')
    t.equal(await before.done, 'kept')
    await fails(t, method, 'ENOSPC: no space left on device')
    const refused = append('refused')
    t.match(await refused.done, { message: 'ENOSPC: no space left on device' }, method)
    t.same(said, ['the spool cannot be written'])
    spool.drop(refused)
    t.equal(await append('after').done, 'kept')
    await spool.close()
    t.same(await lookInto(directory), { found: ['before', 'after'], said: [] }, method)
  }
})

void t.test('a failed write that cannot be undone may be found again, and can be dropped', async (t) => {
  const directory = folder(t)
  const { spool, append } = await opened(directory)
  await fails(t, 'datasync', 'EIO')
  await fails(t, 'truncate', 'EIO')
  await closing(t, async (close) => {
    await close()
    throw new Error('EIO')
  })
  const entry = append('perhaps')
  t.match(await entry.done, { message: 'EIO' })
  const copy = folder(t)
  for (const name of segments(directory)) copyFileSync(join(directory, name), join(copy, name))
  t.same((await lookInto(copy)).found, ['perhaps'])
  spool.drop(entry)
  await spool.close()
  t.same((await lookInto(directory)).found, [])
})

void t.test('a tombstone that cannot be written is retried; at worst its entry is found again', async (t) => {
  for (const [way, found] of [
    ['with the next write', ['two', 'three']],
    ['at the end', ['two']],
    ['never', ['one', 'two']],
  ] as const) {
    const directory = folder(t)
    const { spool, append, said } = await opened(directory)
    const [one, two] = [append('one'), append('two')]
    await keptAll([one, two])
    await dropsInVain(t, { spool, said }, one)
    if (way === 'with the next write') t.equal(await append('three').done, 'kept')
    if (way === 'never') await fails(t, 'appendFile', 'EIO')
    await spool.close()
    t.equal(said.length, way === 'never' ? 2 : 1)
    t.same((await lookInto(directory)).found, found, way)
  }
})

void t.test('a segment whose tombstone could not be written is deleted with its last entry', async (t) => {
  const directory = folder(t)
  const { spool, append, said } = await opened(directory)
  const [one, two] = [append('one'), append('two')]
  await keptAll([one, two])
  await dropsInVain(t, { spool, said }, one, 'ENOSPC')
  spool.drop(two)
  await spool.close()
  t.same(segments(directory), [])
})

void t.test('after somebody removes the directory, nothing counts as kept and nothing crashes', async (t) => {
  const directory = folder(t)
  const { spool, append, said } = await opened(directory)
  const kept = append('kept')
  await kept.done
  rmSync(directory, { recursive: true })
  t.match(await append('gone').done, { message: /^somebody removed spool-v1-00000001-/ })
  t.match(await append('gone').done, { message: /ENOENT/ })
  spool.drop(kept)
  await spool.close()
  t.equal(said.at(-1), 'a file of the spool cannot be removed')
})

void t.test('an entry is not kept if the directory entry of its new segment cannot be synced', async (t) => {
  const directory = folder(t)
  const { spool, append } = await opened(directory)
  await fails(t, 'sync', 'EIO: the directory')
  t.match(await append('x').done, { message: 'EIO: the directory' })
  t.equal(await append('y').done, 'kept')
  await spool.close()
  t.same((await lookInto(directory)).found, ['y'])
})

void t.test('a closed spool takes no more entries or drops', async (t) => {
  const directory = folder(t)
  const { spool, append } = await opened(directory)
  const entry = append('x')
  const closing = spool.close()
  t.match(await append('y').done, { message: 'the spool is closed' })
  spool.drop(entry)
  await closing
  t.same((await lookInto(directory)).found, ['x'])
})

void t.test('entries of many segments are found in their order', async (t) => {
  const directory = folder(t)
  const { spool, append } = await opened(directory, 1600)
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
  const directory = folder(t)
  const { spool, append } = await opened(directory)
  const prototype = await handles()
  const { sync } = prototype
  let [syncs, closed] = [0, 0]
  t.intercept(prototype, 'sync', {
    value: async function (this: FileHandle) {
      syncs++
      const { close } = this
      this.close = () => {
        closed++
        return close.call(this)
      }
      return sync.call(this)
    },
  })
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
  const directory = folder(t)
  const { spool, append } = await opened(directory)
  t.equal(await append('x').done, 'kept')
  const { promise, resolve } = Promise.withResolvers<void>()
  let closed = 0
  await closing(t, async (close) => {
    await promise
    closed++
    await close()
  })
  t.equal(await append('y').done, 'kept')
  let isOver = false
  const ending = spool.close().then(() => void (isOver = true))
  for (let n = 0; n < 20; n++) await new Promise((next) => setImmediate(next))
  t.notOk(isOver)
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

const PROGRAM = fileURLToPath(new URL('../support/spool-writer.ts', import.meta.url))

/** A process that writes into the directory until it is killed; `said` is its output so far. */
async function writer(
  t: Test,
  directory: string,
): Promise<{ child: ChildProcess; said: string[]; enough: Promise<void> }> {
  const child = spawn(process.execPath, [PROGRAM, directory], {
    stdio: ['ignore', 'pipe', 'inherit'],
    env: { ...process.env, NODE_V8_COVERAGE: '' },
  })
  t.teardown(() => child.kill('SIGKILL'))
  const said: string[] = []
  const { promise, resolve } = Promise.withResolvers<void>()
  createInterface({ input: child.stdout as NodeJS.ReadableStream }).on('line', (line) => {
    said.push(line)
    if (said.length === 60) resolve()
  })
  return { child, said, enough: promise }
}

void t.test('only one process can use a spool; the lock of a killed one is free', async (t) => {
  const directory = folder(t)
  const { child, enough } = await writer(t, directory)
  await enough
  const inUse = `the directory ${directory} cannot be used: another process is using it; each needs its own`
  await t.rejects(opened(directory), { message: inUse })
  const exited = once(child, 'exit')
  child.kill('SIGKILL')
  await exited
  const { spool } = await opened(directory)
  await t.rejects(opened(directory), { message: inUse }, 'not even the same process')
  const refused = spawn(process.execPath, [PROGRAM, directory], { stdio: ['ignore', 'ignore', 'pipe'] })
  t.teardown(() => refused.kill('SIGKILL'))
  t.match(
    await text(refused.stderr),
    /another process is using it/,
    'and the refused attempt did not release the lock',
  )
  await spool.close()
})

void t.test('after kill -9 while it writes, every entry reported as kept is found', async (t) => {
  for (let round = 0; round < 5; round++) {
    const directory = folder(t)
    const { child, said, enough } = await writer(t, directory)
    await enough
    const closed = once(child, 'close')
    child.kill('SIGKILL')
    await closed
    const { spool, found } = await opened(directory, 64 * MiB)
    await spool.close()
    const names = new Set(found.map((text) => text.split(' ')[0]))
    const dropped = new Set(said.filter((line) => line.startsWith('drop ')).map((line) => line.slice(5)))
    const kept = said.filter((line) => line.startsWith('kept ')).map((line) => line.slice(5))
    t.ok(kept.length > 20)
    for (const name of kept) if (!dropped.has(name)) t.ok(names.has(name), name)
    for (const text of found) t.match(text, /^\d+\.\d x*$/)
  }
})
