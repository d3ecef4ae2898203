/**
 * The process that runs tests on mutants, forked by `bench.ts` with `plant.ts` loaded: one test file after the other, until one fails.
 */
import { Session } from 'node:inspector/promises'
import { pathToFileURL } from 'node:url'
import fc from 'fast-check'
import { Test } from 'tap'
import type { Mutant } from './mutants.ts'
import { ROOT, TAP } from './plant.ts'

export interface Order {
  readonly mutant: Mutant | null
  readonly tests: readonly string[]
  readonly isCovered: boolean
}

/** Of each file of the product that was loaded: from where to where it was executed. */
export type Covered = Readonly<Record<string, readonly (readonly [start: number, end: number])[]>>

export type Report =
  | { readonly kind: 'started'; readonly test: string }
  /** Sent at once: what comes after it is only tidying up. */
  | { readonly kind: 'failed'; readonly test: string; readonly why: string }
  | { readonly kind: 'ended'; readonly test: string; readonly time: number; readonly covered: Covered | null }
  | { readonly kind: 'idle' }

// Which input fails is of no interest, and shrinking it takes longer than the test.
fc.configureGlobal({ endOnFailure: true })

const session = new Session()
session.connect()
let runs = 0
let isRunning = false

process.on('message', (order: Order) => void follow(order))
// Nothing is left that could go on: a promise that is never settled. Whoever waits for the test is told by the end of this process.
process.on('beforeExit', () => {
  if (isRunning) process.exit(9)
})

async function follow({ mutant, tests, isCovered }: Order): Promise<void> {
  process.env['MUTANT'] = JSON.stringify(mutant)
  isRunning = true
  process.channel?.unref()
  for (const test of tests) {
    tell({ kind: 'started', test })
    if (isCovered) {
      await session.post('Profiler.enable')
      await session.post('Profiler.startPreciseCoverage', { callCount: true, detailed: true })
    }
    const began = performance.now()
    const isGreen = await run(test)
    const time = performance.now() - began
    tell({ kind: 'ended', test, time, covered: isCovered ? await takeCoverage() : null })
    if (!isGreen) break
  }
  process.channel?.ref()
  isRunning = false
  tell({ kind: 'idle' })
}

function tell(report: Report): void {
  process.send?.(report)
}

async function run(test: string): Promise<boolean> {
  runs++
  let isGreen = true
  const fail = (why: string): void => {
    if (isGreen) tell({ kind: 'failed', test, why })
    isGreen = false
  }
  // A module that looks at the end of its own name finds `.ts`.
  const url = `${pathToFileURL(ROOT + test).href}?run=${runs}&.ts`
  const body = async (file: Test): Promise<void> => {
    Object.assign(globalThis, { [TAP]: untilFailed(file, () => isGreen) })
    try {
      await import(url)
    } catch (error) {
      fail(String(error))
    }
  }
  const file = new Test({ name: test, timeout: 3_600_000, cb: body })
  watch(file.parser, fail)
  file.resume()
  await new Promise<void>((resolve) => {
    file.runMain(resolve)
  })
  return isGreen
}

interface Parser {
  on(
    event: 'assert',
    listener: (result: { ok: boolean; todo?: unknown; skip?: unknown; name: string }) => void,
  ): void
  on(event: 'child', listener: (parser: Parser) => void): void
}

function watch(parser: Parser, fail: (why: string) => void): void {
  parser.on('assert', ({ ok, todo, skip, name }) => {
    if (!ok && !todo && !skip) fail(name)
  })
  parser.on('child', (child) => {
    watch(child, fail)
  })
}

/** A root test whose further tests are empty once something has failed: teardowns run, and nothing else. */
function untilFailed(file: Test, isGreen: () => boolean): Test {
  return new Proxy(file, {
    get(target, name) {
      const member: unknown = Reflect.get(target, name, target)
      if (typeof member !== 'function') return member
      // Patience is the bench's; tap would end the process.
      if (name === 'setTimeout') return () => undefined
      if (name !== 'test') return member.bind(target) as unknown
      return (...given: unknown[]) => {
        const body = given.at(-1) as (t: Test) => unknown
        // A body that is no promise would have to end its test.
        const guarded = (t: Test): unknown => (isGreen() ? body(t) : Promise.resolve())
        return Reflect.apply(member, target, [...given.slice(0, -1), guarded]) as unknown
      }
    },
  })
}

async function takeCoverage(): Promise<Covered> {
  const { result } = await session.post('Profiler.takePreciseCoverage')
  await session.post('Profiler.stopPreciseCoverage')
  const covered: Record<string, [number, number][]> = {}
  const source = `${pathToFileURL(ROOT).href}src/`
  for (const { url, functions } of result) {
    if (!url.startsWith(source) || !url.endsWith(`run=${runs}&.ts`)) continue
    const file = `src/${url.slice(source.length, url.indexOf('?'))}`
    // Outer ranges come before those in them, which say otherwise of a part.
    const ranges = functions.flatMap(({ ranges }) => ranges)
    ranges.sort((a, b) => a.startOffset - b.startOffset || b.endOffset - a.endOffset)
    const painted = new Uint8Array(Math.max(0, ...ranges.map(({ endOffset }) => endOffset)))
    for (const { startOffset, endOffset, count } of ranges)
      painted.fill(count > 0 ? 1 : 0, startOffset, endOffset)
    const parts: [number, number][] = []
    for (let at = painted.indexOf(1); at >= 0; ) {
      const end = painted.indexOf(0, at)
      parts.push([at, end < 0 ? painted.length : end])
      at = end < 0 ? -1 : painted.indexOf(1, end)
    }
    covered[file] = [...(covered[file] ?? []), ...parts]
  }
  return covered
}
