import { readdir } from 'node:fs/promises'
import { join } from 'node:path'

const NAME = /^worker-(\d{1,6})$/

/** Where a worker's outcomes are, below `store.spool`: a spool belongs to one process. */
export function workerFolder(spool: string, number: number): string {
  return join(spool, `worker-${number}`)
}

export function isWorkerFolder(name: string): boolean {
  return NAME.test(name)
}

/** The numbers of all such folders, in order; none if there is no spool yet. */
export async function workerFolders(spool: string): Promise<number[]> {
  const names = await readdir(spool).catch((error: NodeJS.ErrnoException) => {
    if (error.code === 'ENOENT') return []
    throw error
  })
  return names
    .filter(isWorkerFolder)
    .map((name) => Number(NAME.exec(name)?.[1]))
    .toSorted((a, b) => a - b)
}
