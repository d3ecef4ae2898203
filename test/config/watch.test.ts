import { mkdirSync, readFileSync, renameSync, rmSync, symlinkSync, unlinkSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import { FileWatch } from '../../src/config/files.ts'
import { tempDir, until } from '../support/e2e.ts'
import { Mount } from '../support/mount.ts'

t.setTimeout(200_000)

/** What a watch reported: the content of the file at each report. */
function watched(t: Test, file: string): string[] {
  const seen: string[] = []
  const read = (): string => {
    try {
      return readFileSync(file, 'utf8')
    } catch {
      return '(none)'
    }
  }
  const watch = new FileWatch(file, () => seen.push(read()), 20)
  t.teardown(() => watch[Symbol.dispose]())
  return seen
}

void t.test('every replacement of a file by a rename is reported', async (t) => {
  const dir = tempDir(t)
  const file = join(dir, 'proxy.yaml')
  writeFileSync(file, '0')
  const seen = watched(t, file)
  for (let n = 1; n <= 5; n++) {
    writeFileSync(join(dir, '.proxy.yaml.swp'), String(n))
    renameSync(join(dir, '.proxy.yaml.swp'), file)
    await until(() => seen.at(-1) === String(n))
  }
  t.strictSame(seen, ['1', '2', '3', '4', '5'])
})

void t.test('every swap of ..data in a ConfigMap, as the kubelet does it, is reported', async (t) => {
  const mount = new Mount(t, { 'proxy.yaml': '0', other: 'a' })
  const seen = watched(t, mount.file('proxy.yaml'))
  for (let n = 1; n <= 5; n++) {
    mount.swap({ 'proxy.yaml': String(n), other: 'b' })
    await until(() => seen.at(-1) === String(n))
  }
  t.strictSame(seen, ['1', '2', '3', '4', '5'])
})

void t.test('a file written in place is reported once it stops changing', async (t) => {
  const file = join(tempDir(t), 'proxy.yaml')
  writeFileSync(file, 'before')
  const looks: (() => Promise<void>)[] = []
  const { setInterval: real } = globalThis
  t.teardown(() => Object.assign(globalThis, { setInterval: real }))
  Object.assign(globalThis, {
    setInterval: (look: () => Promise<void>) => ({ unref: () => void looks.push(look) }),
  })
  const seen = watched(t, file)
  const look = async (): Promise<void> => looks[0]?.()
  for (const part of ['', 'a', 'ab', 'abc']) {
    writeFileSync(file, part)
    await look()
  }
  t.strictSame(seen, [])
  await look()
  t.strictSame(seen, ['abc'], 'neither the empty file nor another in between')
})

void t.test('the deletion and the return of a file are both reported', async (t) => {
  const file = join(tempDir(t), 'proxy.yaml')
  writeFileSync(file, '1')
  const seen = watched(t, file)
  unlinkSync(file)
  await until(() => seen.includes('(none)'))
  writeFileSync(file, '2')
  await until(() => seen.at(-1) === '2')
  t.strictSame(seen, ['(none)', '2'])
})

void t.test('a file behind a link to another folder is watched', async (t) => {
  const dir = tempDir(t)
  const real = join(tempDir(t), 'real.yaml')
  writeFileSync(real, '1')
  symlinkSync(real, join(dir, 'proxy.yaml'))
  const seen = watched(t, join(dir, 'proxy.yaml'))
  writeFileSync(real, '2')
  await until(() => seen.at(-1) === '2')
  t.strictSame(seen, ['2'])
})

void t.test('a folder may go, and come back with another file', async (t) => {
  const dir = join(tempDir(t), 'conf')
  const file = join(dir, 'proxy.yaml')
  mkdirSync(dir)
  writeFileSync(file, '1')
  const seen = watched(t, file)
  rmSync(dir, { recursive: true })
  await until(() => seen.includes('(none)'))
  mkdirSync(dir)
  writeFileSync(file, '2')
  await until(() => seen.at(-1) === '2')
})

void t.test('nothing is reported for other files, nor after the watch is closed', async (t) => {
  const dir = tempDir(t)
  const file = join(dir, 'proxy.yaml')
  writeFileSync(file, '1')
  const seen: string[] = []
  {
    using _watch = new FileWatch(file, () => seen.push('told'), 20)
    writeFileSync(join(dir, 'other'), '2')
    await wait(100)
  }
  writeFileSync(file, '3')
  await wait(100)
  t.strictSame(seen, [])
})
