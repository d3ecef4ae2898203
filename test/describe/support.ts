import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import type { Test } from 'tap'
import { command, type Said } from '../support/commands.ts'
import { tempDir } from '../support/e2e.ts'

/** Writes a description into a temporary folder of its own. */
export function descriptionFile(t: Test, text: string | Uint8Array, name = 'api.yaml'): string {
  const file = join(tempDir(t), name)
  writeFileSync(file, text)
  return file
}

/** Runs `routes from` on a description. */
export async function drafted(t: Test, text: string, name?: string): Promise<Said> {
  return command(['routes', 'from', descriptionFile(t, text, name)])
}

/** A description with these paths, as YAML below `paths:`. */
export function withPaths(paths: string, more = ''): string {
  return `openapi: 3.1.0\ninfo: { title: T, version: "1" }\n${more}\npaths:\n${paths
    .trimEnd()
    .split('\n')
    .map((line) => `  ${line}\n`)
    .join('')}`
}
