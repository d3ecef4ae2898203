import type { ChildProcess } from 'node:child_process'
import { readFileSync } from 'node:fs'
import type { Test } from 'tap'
import { configFile, tempDir, until } from './e2e.ts'
import { type ChildProxy, proxyProcess } from './proxy.ts'

/** Why they cannot be tested here. */
export const NO_PROC = process.platform !== 'linux' && 'the workers are found in /proc'

/** A proxy of several processes; those that are left are killed with the test. */
export async function fleet(t: Test, yaml: string): Promise<ChildProxy> {
  const proxy = await proxyProcess(configFile(tempDir(t), yaml))
  t.teardown(async () => {
    const workers = workersOf(proxy)
    // Before them, or it would replace them.
    await proxy[Symbol.asyncDispose]()
    for (const pid of workers) kill(pid, 'SIGKILL')
    await gone(workers)
  })
  return proxy
}

/** The process ids of its workers, the oldest first; none once it has ended. */
export function workersOf({ child }: { readonly child: Pick<ChildProcess, 'pid'> }): number[] {
  try {
    const children = readFileSync(`/proc/${child.pid}/task/${child.pid}/children`, 'utf8')
    return children.trim().split(' ').filter(Boolean).map(Number)
  } catch {
    return []
  }
}

/** Does nothing to a process that has ended. */
export function kill(pid: number, signal: NodeJS.Signals): void {
  try {
    process.kill(pid, signal)
  } catch {}
}

export async function gone(pids: readonly number[]): Promise<void> {
  await until(() => pids.every(isGone))
}

/** A zombie has ended, too: whoever has adopted it may not ask. */
function isGone(pid: number): boolean {
  try {
    return / Z /.test(readFileSync(`/proc/${pid}/stat`, 'utf8'))
  } catch {
    return true
  }
}
