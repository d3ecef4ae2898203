#!/usr/bin/env node
import { createInterface } from 'node:readline/promises'
import { type Io, USAGE } from './commands/command.ts'
import { dispatch } from './commands/dispatch.ts'

/** Null where nobody can answer. The question goes to standard error: standard output may be read by a program. */
function terminal(): Io['ask'] {
  if (!process.stdin.isTTY || !process.stderr.isTTY) return null
  return async (question) => {
    const lines = createInterface({ input: process.stdin, output: process.stderr })
    try {
      return await lines.question(question)
    } finally {
      lines.close()
    }
  }
}

const [major = 0, minor = 0] = process.versions.node.split('.').map(Number)
if (major < 24 || (major === 24 && minor < 13)) {
  process.stderr.write(`idempotency-proxy needs Node 24.13 or newer; this is ${process.version}.\n`)
  process.exit(USAGE)
}

// Who reads may have seen enough: `list | head`.
process.stdout.on('error', () => process.exit())
process.exitCode = await dispatch(process.argv.slice(2), {
  out: (text) => void process.stdout.write(text),
  err: (text) => void process.stderr.write(text),
  env: process.env,
  ask: terminal(),
})
// What a dependency left open must not keep it: once everything is out.
process.stdout.write('', () => process.exit())
