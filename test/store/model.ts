import { join } from 'node:path'
import fc from 'fast-check'
import type { Test } from 'tap'
import { type RecordId, readAt, type State } from '../../src/core/record.ts'
import { orThrow, Records } from '../../src/store/records.ts'
import type { Harness } from './contract.ts'
import { draft, HOUR, MINUTE, memoryHarness, newId, newToken, tempDir } from './fixtures.ts'
import { open } from './sqlite-fixtures.ts'

export const EVENTS = [
  'claim',
  'completed',
  'not_executed',
  'unknown',
  'lapse',
  'late completed',
  'operator completed',
  'operator retryable',
  'loss',
] as const
export type Event = (typeof EVENTS)[number]

const LEASE = MINUTE
const CLAIMED = { dueIn: LEASE, dropIn: 24 * 30 * HOUR }
/** Longer than any sequence of lapses. */
const SETTLED = { dueIn: 24 * HOUR, dropIn: 24 * 30 * HOUR }

/** What contract §2 says about one record, in its own words: `owner` is the number of the record's latest attempt. */
class Model {
  state: State | 'absent' = 'absent'
  owner: number | null = null
  attempts = 0
  /** The life of the record, and that of each attempt: a lost record that is claimed again begins another life. */
  #life = 0
  readonly #lives: number[] = []

  /** True where the event changes the record. */
  apply(event: Event): boolean {
    switch (event) {
      case 'claim':
        if (this.state !== 'absent' && this.state !== 'failed_retryable') return false
        this.owner = ++this.attempts
        if (this.state === 'absent') this.#life = this.attempts
        this.#lives[this.attempts] = this.#life
        return this.#become('in_progress')
      case 'completed':
        return this.#outcome(this.attempts, 'completed')
      case 'not_executed':
        return this.#outcome(this.attempts, 'failed_retryable')
      case 'unknown':
        return this.#outcome(this.attempts, 'unknown')
      case 'late completed':
        return this.#outcome(this.attempts - 1, 'completed')
      case 'lapse':
        // Reads as unknown for everybody at once; nothing is written.
        if (this.state === 'in_progress') this.state = 'unknown'
        return false
      case 'operator completed':
        if (this.state !== 'unknown') return false
        this.owner = null
        return this.#become('completed')
      case 'operator retryable':
        return this.state === 'unknown' && this.#become('failed_retryable')
      case 'loss':
        if (this.state === 'absent') return false
        this.owner = null
        return this.#become('absent')
    }
  }

  #outcome(attempt: number, state: State): boolean {
    if (attempt < 1) return false
    if (this.state === 'absent') {
      // Gone when its outcome arrives: it is written, so that a retry finds it.
      this.owner = attempt
      this.#life = this.#lives[attempt] as number
      return this.#become(state)
    }
    // A later life came to nothing: without this outcome a retry would execute it again.
    const isOfAnother = this.#life > (this.#lives[attempt] as number)
    if (isOfAnother && this.state === 'failed_retryable' && state !== 'failed_retryable') {
      this.owner = attempt
      return this.#become(state)
    }
    const open = ['in_progress', 'unknown', 'failed_retryable'].includes(this.state)
    return open && this.owner === attempt && this.#become(state)
  }

  #become(state: State | 'absent'): true {
    this.state = state
    return true
  }
}

interface Attempt {
  readonly token: Buffer
  readonly fence: number
  readonly createdAt: number
}

/** Drives the real thing through `events` beside the model. Throws where they differ. */
export async function follow(harness: Harness, events: readonly Event[]): Promise<void> {
  const walk = new Walk(harness)
  const model = new Model()
  for (const [n, event] of events.entries()) {
    const told = events.slice(0, n + 1).join(', ')
    const before = await walk.look()
    const expected = model.apply(event)
    const changed = await walk.apply(event)
    if (changed !== expected)
      throw new Error(`${told}: ${changed ? 'accepted' : 'refused'}, not as the contract says`)
    const after = await walk.look()
    if (after.state !== model.state)
      throw new Error(`${told}: is ${after.state}, the contract says ${model.state}`)
    if (!changed && !before.bytes.equals(after.bytes))
      throw new Error(`${told}: refused, and still changed the record`)
    if (changed && after.version <= before.version && after.state !== 'absent')
      throw new Error(`${told}: the version did not grow`)
  }
}

class Walk {
  readonly #harness: Harness
  readonly #records: Records
  readonly #id: RecordId = newId()
  readonly #attempts: Attempt[] = []

  constructor(harness: Harness) {
    this.#harness = harness
    this.#records = new Records(harness.register)
  }

  /** The record as it reads, and as it is stored. */
  async look(): Promise<{ state: State | 'absent'; version: number; bytes: Buffer }> {
    const { now, bytes } = await this.#harness.register.get(this.#id)
    const { record } = orThrow(await this.#records.get(this.#id))
    const read = record && readAt(record, now)
    return { state: read?.state ?? 'absent', version: read?.version ?? 0, bytes: bytes ?? Buffer.alloc(0) }
  }

  async apply(event: Event): Promise<boolean> {
    // Fences and versions begin at the store's time: no two events of one record share a millisecond.
    this.#harness.advance(50)
    switch (event) {
      case 'claim':
        return this.#claim()
      case 'completed':
      case 'unknown':
        return this.#settle(this.#attempts.at(-1), event)
      case 'not_executed':
        return this.#settle(this.#attempts.at(-1), 'failed_retryable')
      case 'late completed':
        return this.#settle(this.#attempts.at(-2), 'completed')
      case 'lapse':
        this.#harness.advance(LEASE)
        return false
      case 'operator completed':
        return this.#resolve('completed')
      case 'operator retryable':
        return this.#resolve('failed_retryable')
      case 'loss': {
        const { version } = await this.look()
        return this.#harness.register.remove(this.#id, version)
      }
    }
  }

  async #claim(): Promise<boolean> {
    const token = newToken()
    const claim = draft('in_progress', token)
    let reply: Awaited<ReturnType<Records['claim']> | ReturnType<Records['takeOver']>>
    reply = await this.#records.claim(this.#id, claim, CLAIMED)
    if (reply.kind === 'exists') {
      if (readAt(reply.record, reply.now)?.state !== 'failed_retryable') return false
      reply = await this.#records.takeOver(this.#id, reply.record, claim, CLAIMED)
    }
    if (reply.kind !== 'claimed' || reply.recognised) throw new Error('a free record was not claimed')
    const { fence, createdAt } = reply.stamp
    const last = this.#attempts.at(-1)
    if (last !== undefined && fence <= last.fence)
      throw new Error(`the fence went from ${last.fence} to ${fence}`)
    this.#attempts.push({ token, fence, createdAt })
    return true
  }

  async #settle(
    attempt: Attempt | undefined,
    state: 'completed' | 'failed_retryable' | 'unknown',
  ): Promise<boolean> {
    if (attempt === undefined) return false
    const { token, fence, createdAt } = attempt
    const written = draft(state, token, { fence, createdAt })
    const reply = orThrow(await this.#records.settle(this.#id, written, SETTLED))
    if (reply.kind === 'refused') return false
    // In place of a later life it keeps the stamps that the later one began with.
    const isOver = reply.kind === 'recovered' && reply.stamp.fence > fence
    if (!isOver && (reply.stamp.fence !== fence || reply.stamp.createdAt !== createdAt))
      throw new Error(`written under fence ${reply.stamp.fence}, the attempt's is ${fence}`)
    return true
  }

  /** As the admin listener does it: the owner's token goes away with a completion, and stays with a "not executed". */
  async #resolve(state: 'completed' | 'failed_retryable'): Promise<boolean> {
    const { now, record } = orThrow(await this.#records.get(this.#id))
    if (record === null || readAt(record, now)?.state !== 'unknown') return false
    const token = state === 'completed' ? Buffer.alloc(16) : record.token
    const reply = await this.#records.replace(this.#id, record.version, draft(state, token), SETTLED)
    return reply?.kind === 'written'
  }
}

/** Follows every sequence of `depth` events after `start`; returns their number. */
export async function followAll(harness: Harness, start: readonly Event[], depth: number): Promise<number> {
  if (depth === 0) {
    await follow(harness, start)
    return 1
  }
  let count = 0
  for (const event of EVENTS) count += await followAll(harness, [...start, event], depth - 1)
  return count
}

/** Follows that many longer sequences, chosen by chance. */
export async function followSome(harness: Harness, numRuns: number): Promise<void> {
  const sequences = fc.array(fc.constantFrom(...EVENTS), { minLength: 3, maxLength: 14, size: 'max' })
  await fc.assert(
    fc.asyncProperty(sequences, (events) => follow(harness, events)),
    { numRuns },
  )
}

/** A store of one replica, whose clock `advance` moves. */
export function harnessOf(register: Harness['register'], advance: (ms: number) => void): Harness {
  const close = () => register.close()
  return { register, peer: register, other: null, tellsPeers: true, advance, [Symbol.asyncDispose]: close }
}

/** On memory each sequence of `depth` events, on SQLite some generated ones. */
export function followModel(t: Test, depth: number, runs: number): void {
  for (const start of [[], ['claim']] as const)
    void t.test(
      `memory: every ${depth} events after ${start[0] ?? 'nothing'} end as the contract says`,
      async (t) => {
        await using harness = memoryHarness()
        t.equal(await followAll(harness, start, depth), EVENTS.length ** depth)
      },
    )
  void t.test('sqlite: generated sequences end as the contract says', async (t) => {
    using dir = tempDir()
    const register = await open(join(dir.path, 'r.db'))
    let skew = 0
    await using harness = harnessOf(register, (ms) => void (register.skew = skew += ms))
    await followSome(harness, runs)
    t.pass()
  })
}
