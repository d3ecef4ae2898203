#!/usr/bin/env node
import type { Io } from './commands/command.ts'

// Before anything else is loaded: an older Node may not be able to.
const [major = 0, minor = 0] = process.versions.node.split('.').map(Number)
if (major < 24 || (major === 24 && minor < 13)) {
  process.stderr.write(`idempotency-proxy needs Node 24.13 or later; this is ${process.version}.\n`)
  process.exit(2)
}

/** Null where nobody can answer. The question goes to standard error: standard output may be read by a program. */
function terminal(): Io['ask'] {
  if (!process.stdin.isTTY || !process.stderr.isTTY) return null
  return async (question) => {
    const { createInterface } = await import('node:readline/promises')
    const lines = createInterface({ input: process.stdin, output: process.stderr })
    try {
      return await lines.question(question)
    } finally {
      lines.close()
    }
  }
}

// The reader may have seen enough: `list | head`.
process.stdout.on('error', () => process.exit())
const { dispatch } = await import('./commands/dispatch.ts')
process.exitCode = await dispatch(process.argv.slice(2), {
  out: (text) => void process.stdout.write(text),
  err: (text) => void process.stderr.write(text),
  env: process.env,
  ask: terminal(),
})
// Nothing that a dependency left open may keep the process once everything is written.
process.stdout.write('', () => process.exit())
