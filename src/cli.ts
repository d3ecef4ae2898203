#!/usr/bin/env node
import type { Io } from './commands/command.ts'

// Checked before anything else is loaded: an older Node may fail to load it.
const [major = 0, minor = 0] = process.versions.node.split('.').map(Number)
if (major < 24 || (major === 24 && minor < 13)) {
  process.stderr.write(`idempotency-proxy needs Node 24.13 or later; this is ${process.version}.\n`)
  process.exit(2)
}

/** Null without a terminal. The prompt goes to standard error, as a program may read standard output. */
function terminal(): Io['ask'] {
  if (!process.stdin.isTTY || !process.stderr.isTTY) return null
  return async (prompt) => {
    const { createInterface } = await import('node:readline/promises')
    const lines = createInterface({ input: process.stdin, output: process.stderr })
    try {
      return await lines.question(prompt)
    } finally {
      lines.close()
    }
  }
}

// The reader may have seen enough: `list | head`.
process.stdout.on('error', () => process.exit())
void import('./commands/dispatch.ts').then(async ({ dispatch }) => {
  process.exitCode = await dispatch(process.argv.slice(2), {
    out: (text) => void process.stdout.write(text),
    err: (text) => void process.stderr.write(text),
    env: process.env,
    ask: terminal(),
    isTerminal: process.stderr.isTTY,
  })
  // Exits once everything is written, whatever dependencies have left open.
  process.stdout.write('', () => process.exit())
})
