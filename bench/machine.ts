import { spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { readdirSync, readFileSync } from 'node:fs'
import { connect } from 'node:net'
import { availableParallelism } from 'node:os'
import { setTimeout as wait } from 'node:timers/promises'

/** USER_HZ of Linux: the unit of times in /proc/<pid>/stat. */
const TICK_MICROS = 10_000
const READY_WITHIN = 20_000
/** For load, upstream and Redis, which would otherwise take turns with the candidate. */
const LOAD_CORES = 2

/** The core reserved for the candidate, and how to run a command on it. */
export interface Cores {
  /** The table's remark on pinning. */
  readonly remark: string
  /** Words before the candidate's command. */
  readonly candidate: readonly string[]
  /** The same on that many cores; on one, if there are too few beside them. */
  readonly several: (count: number) => readonly string[]
}

/** Moves this process, and those it starts from now on, off the candidate's core. */
export function pinCores(): Cores {
  const cores = availableParallelism()
  if (cores < 2)
    return {
      remark: 'one core only: candidate, load, upstream and Redis share it',
      candidate: [],
      several: () => [],
    }
  if (spawnSync('taskset', ['-V']).status !== 0)
    return {
      remark: '`taskset` (Debian: util-linux) is missing: nothing is pinned, so times vary more',
      candidate: [],
      several: () => [],
    }
  const own = cores - 1
  const others = own === 1 ? '0' : `0-${own - 1}`
  spawnSync('taskset', ['-a', '-c', '-p', others, String(process.pid)])
  return {
    remark: `the candidate has core ${own} to itself, load, upstream and Redis are on ${others}`,
    candidate: ['taskset', '-c', String(own)],
    several: (count) => ['taskset', '-c', `${cores - count < LOAD_CORES ? own : cores - count}-${own}`],
  }
}

/** The process and its current descendants. */
export function processTree(root: number): number[] {
  const childrenOf = new Map<number, number[]>()
  for (const entry of readdirSync('/proc')) {
    if (!/^\d+$/.test(entry)) continue
    const parent = Number(statOf(Number(entry))?.[1] ?? Number.NaN)
    if (!Number.isNaN(parent)) childrenOf.set(parent, [...(childrenOf.get(parent) ?? []), Number(entry)])
  }
  const tree: number[] = []
  const visit = (pid: number): void => {
    tree.push(pid)
    for (const child of childrenOf.get(pid) ?? []) visit(child)
  }
  visit(root)
  return tree
}

/** Fields of /proc/<pid>/stat from the state on; null: the process is gone. */
function statOf(pid: number): string[] | null {
  try {
    const text = readFileSync(`/proc/${pid}/stat`, 'utf8')
    return text.slice(text.lastIndexOf(')') + 2).split(' ')
  } catch {
    return null
  }
}

/** User and system time of the processes with all their threads, in microseconds. */
export function cpuMicros(pids: readonly number[]): number {
  return pids.reduce((sum, pid) => sum + (scheduled(pid) ?? ticked(pid)), 0)
}

/** From the scheduler, to the nanosecond; null: the kernel does not count it. */
function scheduled(pid: number): number | null {
  let nanos = 0
  try {
    for (const thread of readdirSync(`/proc/${pid}/task`))
      nanos += Number(readFileSync(`/proc/${pid}/task/${thread}/schedstat`, 'utf8').split(' ', 1)[0])
  } catch {
    return null
  }
  return nanos === 0 ? null : nanos / 1000
}

function ticked(pid: number): number {
  const stat = statOf(pid)
  return stat === null ? 0 : (Number(stat[11]) + Number(stat[12])) * TICK_MICROS
}

/** Resident memory in MB (10^6 bytes): now, or the peak. */
export function residentMb(pids: readonly number[], which: 'VmRSS' | 'VmHWM'): number {
  let kib = 0
  for (const pid of pids) {
    const status = readFileSync(`/proc/${pid}/status`, 'utf8')
    kib += Number(new RegExp(`^${which}:\\s+(\\d+)`, 'm').exec(status)?.[1] ?? 0)
  }
  return (kib * 1024) / 1e6
}

/** Resolves when something accepts connections on that loopback port; rejects if the process ends first. */
export async function listening(port: number, ended: () => string | null): Promise<void> {
  const deadline = performance.now() + READY_WITHIN
  for (;;) {
    const socket = connect(port, '127.0.0.1')
    try {
      await once(socket, 'connect')
      return
    } catch (error) {
      const why = ended()
      if (why !== null) throw new Error(why, { cause: error })
      if (performance.now() > deadline) throw new Error(`nothing listens on port ${port}`, { cause: error })
    } finally {
      socket.destroy()
    }
    await wait(2)
  }
}

export function median(values: readonly number[]): number {
  const sorted = values.toSorted((a, b) => a - b)
  const middle = sorted.length >> 1
  const upper = sorted[middle] ?? Number.NaN
  return sorted.length % 2 === 1 ? upper : ((sorted[middle - 1] ?? Number.NaN) + upper) / 2
}
