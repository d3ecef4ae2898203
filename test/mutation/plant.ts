/**
 * Loaded before everything else in the process that runs tests on mutants, and by each thread that a test starts there. Every load of a module with
 * another `?run=` is another instance, so one process runs the same test file on many mutants, each on modules of its own. The environment
 * variable MUTANT says what is planted; files stay as they are.
 */
import fs from 'node:fs'
import { registerHooks, stripTypeScriptTypes, syncBuiltinESMExports } from 'node:module'
import { fileURLToPath } from 'node:url'
import workerThreads from 'node:worker_threads'
import type { Mutant } from './mutants.ts'

export const ROOT = fileURLToPath(new URL('../..', import.meta.url))
/** The root test of the file that is loaded, as `runner.ts` left it here. */
export const TAP = Symbol.for('mutation.tap')
const OURS = new RegExp(`^file://${ROOT}(src|test|scripts|examples|bench)/(?!mutation/)`)
/** The end of the address of each module that a run loads. */
const RUN = /[?&](run=\d+&\.ts)$/

const { readFileSync } = fs

type Planted = Pick<Mutant, 'file' | 'start' | 'end' | 'text'>

function planted(path: string): Planted | null {
  const mutant = JSON.parse(process.env['MUTANT'] ?? 'null') as Planted | null
  return mutant !== null && path === ROOT + mutant.file ? mutant : null
}

function mutated(source: string, { start, end, text }: Planted): string {
  return source.slice(0, start) + text + source.slice(end)
}

const plain = new Map<string, string>()

function sourceOf(path: string): string {
  const mutant = planted(path)
  if (mutant !== null) return stripTypeScriptTypes(mutated(readFileSync(path, 'utf8'), mutant))
  let source = plain.get(path)
  if (source === undefined) {
    source = stripTypeScriptTypes(readFileSync(path, 'utf8'))
    plain.set(path, source)
  }
  return source
}

registerHooks({
  resolve(specifier, context, next) {
    const run = RUN.exec(context.parentURL ?? '')?.[1]
    if (run === undefined) return next(specifier, context)
    if (specifier === 'tap') return { url: `mutation:tap?${run}`, shortCircuit: true }
    const found = next(specifier, context)
    if (!OURS.test(found.url) || RUN.test(found.url)) return found
    // A test that needs several instances of a module tells them apart by a query of its own.
    return { ...found, url: `${found.url}${found.url.includes('?') ? '&' : '?'}${run}` }
  },
  load(url, context, next) {
    if (url.startsWith('mutation:tap'))
      return {
        format: 'module',
        source: `export default globalThis[Symbol.for('${TAP.description}')]`,
        shortCircuit: true,
      }
    if (!OURS.test(url)) return next(url, context)
    const path = fileURLToPath(url)
    return path.endsWith('.ts')
      ? { format: 'module', source: sourceOf(path), shortCircuit: true }
      : next(url, context)
  },
})

/** Lua and SQL are read as text. */
fs.readFileSync = ((from: Parameters<typeof readFileSync>[0], ...rest: [BufferEncoding]) => {
  const text = readFileSync(from, ...rest)
  if (!(from instanceof URL) || typeof text !== 'string') return text
  const mutant = planted(fileURLToPath(from))
  return mutant === null ? text : mutated(text, mutant)
}) as typeof readFileSync

/** A thread with arguments of its own would not load this file. */
workerThreads.Worker = class extends workerThreads.Worker {
  constructor(...[file, options]: ConstructorParameters<typeof workerThreads.Worker>) {
    const { execArgv } = options ?? {}
    super(file, execArgv ? { ...options, execArgv: ['--import', import.meta.url, ...execArgv] } : options)
  }
}
syncBuiltinESMExports()
