import {
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  symlinkSync,
  unlinkSync,
  writeFileSync,
} from 'node:fs'
import { join } from 'node:path'
import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import { FileWatch } from '../../src/config/files.ts'
import { tempDir, until } from '../support/e2e.ts'
import { Mount } from '../support/mount.ts'

t.setTimeout(200_000)

/** What a watch reported: the content of the file at each report. */
function watched(t: Test, file: string, poll = 60_000, still = 50): { seen: string[]; lost: Error[] } {
  const seen: string[] = []
  const lost: Error[] = []
  const read = (): string => {
    try {
      return readFileSync(file, 'utf8')
    } catch {
      return '(none)'
    }
  }
  const watch = new FileWatch(file, () => seen.push(read()), {
    still,
    poll,
    onLost: (error) => lost.push(error),
  })
  t.teardown(() => watch[Symbol.dispose]())
  return { seen, lost }
}

void t.test('every replacement of a file by a rename is reported', async (t) => {
  const dir = tempDir(t)
  const file = join(dir, 'proxy.yaml')
  writeFileSync(file, '0')
  const { seen, lost } = watched(t, file)
  for (let n = 1; n <= 5; n++) {
    writeFileSync(join(dir, '.proxy.yaml.swp'), String(n))
    renameSync(join(dir, '.proxy.yaml.swp'), file)
    await until(() => seen.at(-1) === String(n))
  }
  t.strictSame(seen, ['1', '2', '3', '4', '5'])
  t.strictSame(lost, [])
})

void t.test('every swap of ..data in a ConfigMap, as the kubelet does it, is reported', async (t) => {
  const mount = new Mount(t, { 'proxy.yaml': '0', other: 'a' })
  const { seen } = watched(t, mount.file('proxy.yaml'))
  for (let n = 1; n <= 5; n++) {
    mount.swap({ 'proxy.yaml': String(n), other: 'b' })
    await until(() => seen.at(-1) === String(n))
  }
  t.strictSame(seen, ['1', '2', '3', '4', '5'])
})

void t.test('a file written in place is reported once it stops changing', async (t) => {
  const file = join(tempDir(t), 'proxy.yaml')
  writeFileSync(file, 'before')
  // The watch waits this long for another change; here it waits for the test.
  const still = 12_345
  const waiting: (() => void)[] = []
  const { setTimeout: real } = globalThis
  t.teardown(() => Object.assign(globalThis, { setTimeout: real }))
  const held = (run: () => void, ms: number) =>
    ms === still ? { unref: () => void waiting.push(run) } : real(run, ms)
  Object.assign(globalThis, { setTimeout: held })
  const { seen } = watched(t, file, 60_000, still)
  for (const part of ['', 'a', 'ab', 'abc']) {
    writeFileSync(file, part)
    await until(() => waiting.length > 0)
    if (part !== 'abc') writeFileSync(file, `${part}+`)
    waiting.shift()?.()
  }
  await until(() => seen.length > 0)
  t.strictSame(seen, ['abc'], 'neither the empty file nor another in between')
})

void t.test('the deletion and the return of a file are both reported', async (t) => {
  const file = join(tempDir(t), 'proxy.yaml')
  writeFileSync(file, '1')
  const { seen } = watched(t, file)
  unlinkSync(file)
  await until(() => seen.includes('(none)'))
  writeFileSync(file, '2')
  await until(() => seen.at(-1) === '2')
  t.strictSame(seen, ['(none)', '2'])
})

void t.test('a file behind a link to another folder is polled', async (t) => {
  const dir = tempDir(t)
  const real = join(tempDir(t), 'real.yaml')
  writeFileSync(real, '1')
  symlinkSync(real, join(dir, 'proxy.yaml'))
  const { seen } = watched(t, join(dir, 'proxy.yaml'), 50)
  writeFileSync(real, '2')
  await until(() => seen.at(-1) === '2')
  t.strictSame(seen, ['2'])
})

void t.test('the loss of a folder is reported once, and another one under its name is watched', async (t) => {
  const dir = join(tempDir(t), 'conf')
  const file = join(dir, 'proxy.yaml')
  mkdirSync(dir)
  writeFileSync(file, '1')
  const { seen, lost } = watched(t, file, 50)
  rmSync(dir, { recursive: true })
  await until(() => lost.length > 0 && seen.includes('(none)'))
  await wait(200)
  t.equal(lost.length, 1)
  mkdirSync(dir)
  writeFileSync(file, '2')
  await until(() => seen.at(-1) === '2')
  writeFileSync(join(dir, 'new'), '3')
  renameSync(join(dir, 'new'), file)
  await until(() => seen.at(-1) === '3')
})

void t.test('nothing is reported for other files, nor after the watch is closed', async (t) => {
  const dir = tempDir(t)
  const file = join(dir, 'proxy.yaml')
  writeFileSync(file, '1')
  const seen: string[] = []
  {
    using _watch = new FileWatch(file, () => seen.push('told'), { still: 10, poll: 20, onLost: () => {} })
    writeFileSync(join(dir, 'other'), '2')
    await wait(100)
  }
  writeFileSync(file, '3')
  await wait(100)
  t.strictSame(seen, [])
})

/** Whether this process has a kernel watch on the folder. */
function isWatched(folder: string): boolean {
  const inode = `ino:${statSync(folder).ino.toString(16)} `
  return readdirSync('/proc/self/fdinfo').some((fd) => {
    try {
      return readFileSync(`/proc/self/fdinfo/${fd}`, 'utf8').includes(inode)
    } catch {
      return false
    }
  })
}

void t.test(
  'a folder that others write to all the time is not watched until the next poll',
  { skip: process.platform !== 'linux' },
  async (t) => {
    const dir = tempDir(t)
    const file = join(dir, 'proxy.yaml')
    writeFileSync(file, '1')
    const { seen, lost } = watched(t, file, 3000)
    await until(() => isWatched(dir))
    for (let n = 0; isWatched(dir); n++) {
      writeFileSync(join(dir, `idempotency.db-wal${n % 2}`), String(n))
      await wait(1)
    }
    writeFileSync(file, '2')
    await until(() => seen.at(-1) === '2')
    await until(() => isWatched(dir))
    writeFileSync(file, '3')
    await until(() => seen.at(-1) === '3')
    t.strictSame(lost, [])
  },
)
