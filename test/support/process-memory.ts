import { closeSync, openSync, readFileSync, readSync } from 'node:fs'

/** What a core file of a process would hold: everything in its memory that can be written, latin1. Linux only. */
export function memoryOf(pid: number): string {
  const memory = openSync(`/proc/${pid}/mem`, 'r')
  try {
    const regions = readFileSync(`/proc/${pid}/maps`, 'latin1').matchAll(/^(\w+)-(\w+) rw/gm)
    return [...regions].map(([, from = '', to = '']) => read(memory, from, to)).join('\n')
  } finally {
    closeSync(memory)
  }
}

function read(memory: number, from: string, to: string): string {
  const bytes = Buffer.alloc(Number.parseInt(to, 16) - Number.parseInt(from, 16))
  // Stops at a page that is not there.
  const length = readSync(memory, bytes, 0, bytes.length, Number.parseInt(from, 16))
  return bytes.toString('latin1', 0, length)
}
