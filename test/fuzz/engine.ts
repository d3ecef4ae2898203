import { type Profiler, Session } from 'node:inspector'
import { isDeepStrictEqual } from 'node:util'
import { Random } from '../simulation/scheduler.ts'

/** What strangers can reach, and what has to hold of whatever they send. */
export interface Target {
  readonly name: string
  /** How the paths of the files begin, below src/, whose coverage guides. */
  readonly files: readonly string[]
  readonly seeds: readonly (string | Buffer)[]
  /** What mutations put in. */
  readonly words: readonly string[]
  /** @throws where something does not hold. */
  check(input: Buffer): void | Promise<void>
}

export interface Finding {
  readonly input: Buffer
  readonly error: unknown
}

/** @throws unless the two are the same. */
export function same(what: string, one: unknown, other: unknown): void {
  if (!isDeepStrictEqual(one, other))
    throw new Error(`${what}: ${JSON.stringify(one)} is not ${JSON.stringify(other)}`)
}

const LONGEST = 4096
/** Inputs between two looks at the coverage, which cost as much as hundreds of them. */
const BATCH = 200

/** The input with one to six changes. */
export function mutated(input: Buffer, other: Buffer, words: readonly string[], random: Random): Buffer {
  let bytes = input
  for (let n = random.pick([1, 1, 2, 3, 6]); n > 0; n--) {
    const at = random.whole(bytes.length + 1)
    const end = at + random.whole(Math.min(bytes.length - at, 64) + 1)
    const [before, within, after] = [bytes.subarray(0, at), bytes.subarray(at, end), bytes.subarray(end)]
    const pieces: Buffer[] = []
    switch (random.whole(7)) {
      case 0:
        pieces.push(before, after)
        break
      case 1:
        pieces.push(before, within, within, after)
        break
      case 2:
        pieces.push(before, Buffer.from(random.pick(words), 'latin1'), within, after)
        break
      case 3:
        pieces.push(before, Buffer.from(random.pick(words), 'latin1'), after)
        break
      case 4:
        pieces.push(before, random.bytes(1), bytes.subarray(at + 1))
        break
      case 5: {
        const from = random.whole(other.length + 1)
        pieces.push(before, other.subarray(from, from + random.whole(64)), after)
        break
      }
      default: {
        const changed = Buffer.from(bytes)
        const bit = 1 << random.whole(8)
        if (at < changed.length) changed[at] = (changed[at] as number) ^ bit
        pieces.push(changed)
      }
    }
    bytes = Buffer.concat(pieces).subarray(0, LONGEST)
  }
  return Buffer.from(bytes)
}

/** Says whether a target's code ran where it never ran before: V8's own block coverage. */
export class Coverage {
  readonly #session = new Session()
  readonly #files: readonly string[]
  /** By file: 1 for each character of code that ran. */
  readonly #ran = new Map<string, Uint8Array>()

  constructor(files: Target['files']) {
    this.#files = files.map((file) => new URL(`../../src/${file}`, import.meta.url).href)
    this.#session.connect()
    this.#session.post('Profiler.enable')
    this.#session.post('Profiler.startPreciseCoverage', { callCount: false, detailed: true })
  }

  /** Characters of code. */
  get size(): number {
    let sum = 0
    for (const ran of this.#ran.values()) for (const one of ran) sum += one
    return sum
  }

  /** Since the last time. In one process the inspector's callbacks come at once. `note`: it counts as having run. */
  isNew(note: boolean): boolean {
    let isNew = false
    this.#session.post('Profiler.takePreciseCoverage', (error, taken) => {
      if (error !== null) throw error
      for (const { url, functions } of taken.result) {
        if (!this.#files.some((file) => url.startsWith(file))) continue
        for (const { ranges } of functions) if (this.#add(url, ranges, note)) isNew = true
      }
    })
    return isNew
  }

  /** A range holds for what the ranges within it, which follow, do not say otherwise. */
  #add(url: string, ranges: readonly Profiler.CoverageRange[], note: boolean): boolean {
    const [whole] = ranges
    if (whole === undefined || whole.count === 0) return false
    const { startOffset, endOffset } = whole
    const now = new Uint8Array(endOffset - startOffset)
    for (const range of ranges)
      now.fill(range.count > 0 ? 1 : 0, range.startOffset - startOffset, range.endOffset - startOffset)
    let ran = this.#ran.get(url)
    if (ran === undefined || ran.length < endOffset) {
      const longer = new Uint8Array(2 * endOffset)
      longer.set(ran ?? [])
      ran = longer
      this.#ran.set(url, ran)
    }
    let isNew = false
    for (let n = 0; n < now.length; n++) {
      if (now[n] === 0 || ran[startOffset + n] === 1) continue
      isNew = true
      if (!note) return true
      ran[startOffset + n] = 1
    }
    return isNew
  }

  close(): void {
    this.#session.disconnect()
  }
}

export interface Fuzzed {
  readonly tries: number
  /** What made code run that had not. */
  readonly kept: readonly Buffer[]
  readonly ran: number
  readonly finding: Finding | null
}

/** Changes inputs again and again, those that took new ways among them, until something does not hold or `isOver`. */
export async function fuzz(
  target: Target,
  corpus: readonly Buffer[],
  seed: number,
  isOver: (tries: number) => boolean,
  coverage: Coverage | null,
): Promise<Fuzzed> {
  const random = new Random(seed)
  const inputs = [...corpus]
  const kept: Buffer[] = []
  let tries = 0
  const fuzzed = (finding: Finding | null): Fuzzed => ({ tries, kept, ran: coverage?.size ?? 0, finding })
  /** Finds by halves which of them made new code run: a look costs as much as hundreds of inputs. */
  const keep = async (candidates: readonly Buffer[]): Promise<void> => {
    for (const input of candidates) await found(target, input)
    const [only, ...others] = candidates
    if (only === undefined || coverage?.isNew(others.length === 0) !== true) return
    if (others.length === 0) {
      inputs.push(only)
      kept.push(only)
      return
    }
    const middle = candidates.length >> 1
    await keep(candidates.slice(0, middle))
    await keep(candidates.slice(middle))
  }
  for (const input of corpus) {
    const finding = await found(target, input)
    if (finding !== null) return fuzzed(finding)
  }
  coverage?.isNew(false)
  await keep(corpus)
  for (let batch: Buffer[] = []; !isOver(tries); tries++) {
    // The latest more often than the others.
    const at = random.chance(0.3)
      ? Math.floor(Math.sqrt(random.next()) * inputs.length)
      : random.whole(inputs.length)
    const input = mutated(inputs[at] as Buffer, random.pick(inputs), target.words, random)
    const finding = await found(target, input)
    if (finding !== null) return fuzzed(await smallest(target, finding))
    if (coverage === null || batch.push(input) < BATCH) continue
    if (coverage.isNew(false)) await keep(batch)
    batch = []
  }
  return fuzzed(null)
}

async function found(target: Target, input: Buffer): Promise<Finding | null> {
  try {
    await target.check(Buffer.from(input))
    return null
  } catch (error) {
    return { input, error }
  }
}

/** The same mistake with less around it. */
async function smallest(target: Target, first: Finding): Promise<Finding> {
  let best = first
  for (let size = best.input.length >> 1; size > 0; size >>= 1)
    for (let at = 0; at + size <= best.input.length; ) {
      const less = Buffer.concat([best.input.subarray(0, at), best.input.subarray(at + size)])
      const finding = await found(target, less)
      if (finding === null) at += size
      else best = finding
    }
  return best
}
