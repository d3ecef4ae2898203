import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { createInterface } from 'node:readline'
import { text } from 'node:stream/consumers'
import { fileURLToPath } from 'node:url'
import t, { type Test } from 'tap'
import type { SpoolEntry } from '../../src/store/spool/log.ts'
import { folder, MiB, opened, segments } from './spool-fixtures.ts'

t.setTimeout(300_000)

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
