import { setTimeout as wait } from 'node:timers/promises'
import { until } from '../store/fixtures.ts'
import type { Relay } from '../support/relay.ts'
import type { Disk } from './disk.ts'
import { LEASE, type Replica } from './fleet.ts'
import type { History } from './history.ts'
import type { Random } from './random.ts'
import type { TormentedStore } from './stores.ts'

/** A fault that lasts for `duration` milliseconds; resolves when it is over. */
type Fault = (duration: number) => Promise<void>

/** What a relay does to the connections through it. */
const LINKS: Readonly<Record<string, (link: Relay, duration: number) => Promise<void>>> = {
  cut: async (link) => link.cut(),
  refused: async (link, duration) => {
    link.accept = false
    link.cut()
    await wait(duration)
    link.accept = true
  },
  'loses replies': async (link, duration) => {
    link.passReplies = false
    await wait(duration)
    link.passReplies = true
    // A connection cannot go on with a hole in its byte stream.
    link.cut()
  },
  'holds replies': async (link, duration) => {
    link.holdReplies = true
    await wait(duration)
    link.release()
  },
  'holds commands': async (link, duration) => {
    link.passCommands = false
    await wait(duration)
    link.release()
  },
  'holds commands, then cut': async (link, duration) => {
    link.passCommands = false
    await wait(duration)
    link.release()
    link.cut()
  },
}

/** A replica's clock may show anything. An embedded store's clock is the replicas' own, and decides when a lease ends. */
const STEP = { own: 86_400_000, embedded: 5000 }

/** Everything that can go wrong here, by name. */
export function faultsOf(
  replicas: readonly Replica[],
  store: TormentedStore,
  disk: Disk,
  random: Random,
  workers: number,
): ReadonlyMap<string, Fault> {
  const any = (): Replica => random.pick(replicas)
  // The first one lives as long as the run: whether it grows is judged at the end.
  const mortal = (): Replica => random.pick(replicas.slice(1))
  const { silent, forgetful } = apart()
  const faults = new Map<string, Fault>([
    ['replica killed', silent((duration) => mortal().restart('SIGKILL', duration / 4))],
    ['replica drained', silent((duration) => mortal().restart('SIGTERM', duration / 4))],
    [
      'replica paused',
      silent(async (duration) => {
        const replica = any()
        replica.signalAll('SIGSTOP')
        await wait(duration + (random.chance(0.5) ? LEASE : 0))
        replica.signalAll('SIGCONT')
      }),
    ],
    [
      'replica reloaded',
      async (duration) => {
        const replica = any()
        await replica.reload(random.pick(['as it was', 'changed', 'broken']))
        await wait(duration)
        await replica.reload('as it was')
      },
    ],
    [
      'clock set',
      async () => {
        const most = store.isEmbedded ? STEP.embedded : STEP.own
        const ahead = random.between(-most, most)
        for (const replica of store.isEmbedded ? replicas : [any()]) replica.setClock(ahead)
      },
    ],
  ])
  if (workers > 1) {
    faults.set(
      'worker killed',
      silent(async (duration) => {
        any().signalWorker(random, 'SIGKILL')
        await wait(duration / 4)
      }),
    )
    faults.set(
      'worker paused',
      silent(async (duration) => {
        const replica = any()
        replica.signalWorker(random, 'SIGSTOP')
        await wait(duration)
        replica.signalAll('SIGCONT')
      }),
    )
    faults.set(
      'first process paused',
      silent(async (duration) => {
        const replica = any()
        replica.signal('SIGSTOP')
        await wait(duration)
        replica.signal('SIGCONT')
      }),
    )
  }
  for (const [name, torment] of Object.entries(LINKS)) {
    faults.set(`upstream ${name}`, (duration) => torment(any().upstream, duration))
    if (store.port !== null)
      faults.set(`link to the store ${name}`, (duration) => torment(any().store as Relay, duration))
  }
  // The server has one fault at a time: a dead one cannot be paused.
  let turn: Promise<void> = Promise.resolve()
  const inTurn =
    (begin: () => Promise<() => Promise<void>>): Fault =>
    async (duration) => {
      const before = turn
      const { promise, resolve } = Promise.withResolvers<void>()
      turn = promise
      await before
      const end = await begin()
      await wait(duration)
      await end()
      resolve()
    }
  for (const [name, begin] of Object.entries(store.faults)) faults.set(name, inTurn(begin))
  for (const [name, begin] of Object.entries(store.losses ?? {})) faults.set(name, forgetful(inTurn(begin)))
  if (disk.canFill)
    faults.set(
      'disk full',
      forgetful(async (duration) => {
        if (!disk.fill()) throw new Error('the disk cannot be filled')
        await wait(duration)
        if (!disk.free()) throw new Error('the disk cannot be freed')
        for (const replica of replicas) await replica.holdsNothing()
      }),
    )
  return faults
}

/**
 * While the store forgets or the disk is full, what only a process knows dies with the process: that is an assumption, not a finding.
 * So processes fall silent only while nothing is forgotten, and the other way round.
 */
function apart(): Readonly<Record<'silent' | 'forgetful', (fault: Fault) => Fault>> {
  let silent = 0
  let forgetful = 0
  return {
    silent: (fault) => async (duration) => {
      await until(() => forgetful === 0)
      silent++
      await fault(duration)
      silent--
    },
    forgetful: (fault) => async (duration) => {
      forgetful++
      await until(() => silent === 0)
      await fault(duration)
      forgetful--
    },
  }
}

/** Returns one name after the other: all of them in random order, then again. */
export function inRandomOrder(names: readonly string[], random: Random): () => string {
  let left: string[] = []
  return () => {
    if (left.length === 0) left = [...names]
    return left.splice(random.between(0, left.length - 1), 1)[0] as string
  }
}

/** One fault after the other, each when it is due, until `over`; `count` says how many there were of each kind. */
export async function torment(
  faults: ReadonlyMap<string, Fault>,
  next: () => string,
  history: History,
  random: Random,
  pace: { over(): boolean; due(): boolean },
  count: Map<string, number>,
): Promise<void> {
  while (!pace.over()) {
    await wait(random.between(20, 400))
    if (!pace.due()) continue
    const name = next()
    const duration = random.chance(0.2) ? random.between(600, 2500) : random.between(10, 600)
    history.fault(`${name}, ${duration} ms`)
    await (faults.get(name) as Fault)(duration)
    history.fault(`${name}: over`)
    count.set(name, (count.get(name) ?? 0) + 1)
  }
}
