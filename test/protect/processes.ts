import { cpSync, mkdtempSync, rmSync } from 'node:fs'
import { type FileHandle, open } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import type { Test } from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { spoolRoom } from '../../src/protect/settler.ts'
import { Outbox } from '../../src/store/spool/outbox.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import { type Fault, idle, LEASE, never, Replica, type Seen, Store, seen, TTL, until } from './harness.ts'

/** Processes with a spool, that die and leave it to the next one. */

export const MiB = 1024 ** 2

type When = 'before' | 'after'

/** `on`: called before and after each disk operation of this process. */
export const disk: { on: ((when: When) => Promise<void> | undefined) | null } = { on: null }

const handle = await open(fileURLToPath(import.meta.url))
const methods = Object.getPrototypeOf(handle) as FileHandle
await handle.close()
for (const method of ['appendFile', 'datasync', 'sync'] as const) {
  const original = methods[method] as (...args: unknown[]) => Promise<void>
  methods[method] = async function (this: FileHandle, ...args: unknown[]) {
    await disk.on?.('before')
    await original.apply(this, args)
    await disk.on?.('after')
  } as never
}

export function folder(t: Test): string {
  const path = mkdtempSync(join(tmpdir(), 'spool-'))
  t.teardown(() => rmSync(path, { recursive: true, force: true }))
  return path
}

/** Copies what a process killed now would leave on disk. */
export function remains(t: Test, directory: string): string {
  const copy = folder(t)
  cpSync(directory, copy, { recursive: true, filter: (path) => !path.endsWith('spool.lock') })
  return copy
}

export interface Spooling {
  readonly directory: string
  readonly outbox: Outbox
  readonly replica: Replica
  readonly said: string[]
  /** How long each outcome that the process before left may be useful. */
  readonly left: readonly number[]
}

/** Starts a process whose spool is in that directory. */
export async function spooling(
  t: Test,
  store: Store,
  directory = folder(t),
  options: { maxBytes?: number; forward?: (one: () => Replica) => Promise<Forwarded> } = {},
): Promise<Spooling> {
  const said: string[] = []
  const { maxBytes = spoolRoom(MiB), forward } = options
  const say = (message: string): void => void said.push(message)
  const { outbox, left } = await Outbox.open({ service: 'test', sealer: null, directory, maxBytes, say })
  const replica: Replica = new Replica({
    store,
    outbox,
    ...(forward === undefined ? {} : { forward: () => forward(() => replica) }),
  })
  t.teardown(async () => {
    replica.close()
    await replica.ports.settler.close()
    await outbox.close()
  })
  replica.ports.settler.restore(left, (bytes) => replica.bytes.take(bytes))
  return { directory, outbox, replica, said, left: left.map(({ unsettled }) => unsettled.usefulFor) }
}

/** What one request meets. */
export interface Story {
  readonly name: string
  readonly policy: RoutePolicy
  /** Runs before the process that dies starts. */
  readonly before?: (store: Store) => Promise<unknown>
  /** The upstream's answer; calls `executed` where the upstream does the work. */
  readonly reply: (r: Replica, executed: () => void) => Forwarded
  /** Of the store's calls, in order. */
  readonly faults?: readonly (Fault | null)[]
  /** Of those that follow. */
  readonly afterwards?: Fault | null
}

/**
 * Plays a story in processes that die at every call of the store, the upstream or the disk in turn, before it begins or once it is done but
 * before the process hears of it, each followed by others that start on what it left. Returns what was wrong.
 */
export async function deaths(t: Test, story: Story, hasSpool: boolean): Promise<string[]> {
  const wrong: string[] = []
  for (let k = 1, survived = false; !survived; k++)
    for (const when of ['before', 'after'] as const) survived = await life(t, story, hasSpool, k, when, wrong)
  return wrong
}

/** Returns true if the process made fewer than `k` calls. */
async function life(t: Test, story: Story, hasSpool: boolean, k: number, when: When, wrong: string[]) {
  const store = new Store()
  await story.before?.(store)
  let n = 0
  const executed = (): void => void n++
  let calls = 0
  let storeCalls = 0
  let dead = false
  const hang = Promise.withResolvers<void>()
  if (hasSpool)
    disk.on = (now) => {
      if (now === 'before') calls++
      if (!dead && calls === k && now === when) dead = true
      return dead ? hang.promise : undefined
    }
  store.fault = () => {
    const planned = story.faults?.[storeCalls++]
    if (dead) return 'dead'
    if (++calls === k) {
      dead = true
      return when === 'before' ? 'dead' : 'dead_applied'
    }
    return planned === undefined ? (story.afterwards ?? null) : planned
  }
  const forward = async (one: () => Replica): Promise<Forwarded> => {
    if (dead) return never
    if (++calls !== k) return story.reply(one(), executed)
    dead = true
    if (when === 'after') story.reply(one(), executed)
    return never
  }
  const spool = hasSpool ? await spooling(t, store, undefined, { forward }) : null
  const mortal: Replica = spool?.replica ?? new Replica({ store, forward: () => forward(() => mortal) })
  const answers: Seen[] = []
  const left = (): string => (spool === null ? '' : remains(t, spool.directory))
  let copied: string | null = null
  const answered = mortal.send({ route: story.policy }).then((answer) => {
    // A dead process answers nobody, though its promises may still settle here.
    if (dead) return
    answers.push(seen(answer))
    // From now on death costs nothing, if the disk has it.
    if (hasSpool) copied = left()
  })
  await Promise.race([answered, until(() => dead)])
  await idle()
  if (!dead && !hasSpool)
    for (let i = 0; i < 3 && mortal.ports.settler.size > 0; i++)
      await Promise.race([mortal.ports.settler.flush(), idle()])
  const survived = !dead
  dead = true
  copied ??= left()
  disk.on = null
  mortal.close()

  const whole = answers[0]?.bytes ?? null
  const before = n
  const title = `${story.name}, ${when} call ${k}`
  const check = (holds: boolean, what: string): void => void (holds || wrong.push(`${title}: ${what}`))
  for (const [fault, later] of [
    ['down', 0],
    [null, 0],
    [null, 1],
    [null, LEASE],
    [null, LEASE],
    [null, TTL / 2],
  ] as const) {
    store.fault = () => fault
    store.now += later
    const works = async (one: () => Replica): Promise<Forwarded> => {
      executed()
      return one().responded(201, `again ${n}`)
    }
    const started = hasSpool ? await spooling(t, store, copied, { forward: works }) : null
    const next: Replica = started?.replica ?? new Replica({ store, forward: () => works(() => next) })
    const answer = await next.get({ route: story.policy })
    answers.push(answer)
    if (hasSpool && whole !== null)
      check(answer.replayed && answer.bytes === whole, `not replayed, the store ${fault}`)
    if (fault === null) check(await next.ports.settler.flush(), 'not everything is written')
    if (started !== null) copied = remains(t, started.directory)
    next.close()
    await started?.outbox.close()
  }
  await store.arrive()
  hang.resolve()
  // `bypass` explicitly gives up the promise: nobody knows of what died before it was on disk.
  const isOpen = story.policy.onStoreUnavailable === 'bypass' && whole === null
  check(n <= (isOpen ? before + 1 : 1), `executed ${n} times`)
  check(new Set(answers.filter((one) => one.replayed).map((one) => one.bytes)).size <= 1, 'replays differ')
  const { replayed, code } = answers.at(-1) as Seen
  const isDecided = replayed || /(?:outcome_unknown|response_unavailable)$/.test(String(code))
  check(isDecided, `in the end ${code}`)
  return survived
}
