import { VERSION } from '../version.ts'
import { type Command, Exit, FINE, type Io, npmHint, run, usage } from './command.ts'

const HELP = `idempotency-proxy ${VERSION}: makes any HTTP API safe to retry

  idempotency-proxy [serve] [--config FILE] [--upstream URL] [--listen ADDR] [--store URL] [--service NAME]
      serves; flags override the file; with only --upstream it runs on the embedded store
  idempotency-proxy check [FILE]
      checks a configuration; exit 1 and all errors if there are any
  idempotency-proxy schema
      prints the configuration's JSON Schema
  idempotency-proxy doctor
      checks configuration, store, spool, audit log and a running proxy; exit 1 if something is wrong
  idempotency-proxy list
      lists records
  idempotency-proxy inspect ID | inspect KEY --caller LINE --method M --path P
      explains one record: was it executed, how often, and what to do next
  idempotency-proxy resolve ID --completed FILE | --retryable
      resolves a record whose outcome is unknown
  idempotency-proxy report
      counts what was executed, replayed and prevented, and what is unknown
  idempotency-proxy routes from OPENAPI
      drafts a configuration from an OpenAPI description
  idempotency-proxy routes overlay OPENAPI --config FILE
      prints an OpenAPI overlay that documents the key and the proxy's responses
  idempotency-proxy policy [FILE]
      prints what clients must know of a configuration, as /.well-known/idempotency serves it
  idempotency-proxy drain
      makes a running proxy fail its readiness while it keeps serving

The record commands ask a running proxy (--admin URL --token-file FILE) or the store itself
(--config FILE, --store URL, --service NAME). Every command has its own --help.

Exit codes: 0 fine, 1 a finding, 2 usage.
`

/** Loaded on demand: a hook does not wait for a server to be read from disk. */
export const COMMANDS: Readonly<Record<string, () => Promise<Command>>> = {
  serve: async () => (await import('./serve.ts')).serve,
  check: async () => (await import('./check.ts')).check,
  schema: async () => (await import('./check.ts')).schema,
  doctor: async () => (await import('./doctor.ts')).doctor,
  list: async () => (await import('./list.ts')).list,
  inspect: async () => (await import('./inspect.ts')).inspect,
  resolve: async () => (await import('./resolve.ts')).resolve,
  report: async () => (await import('./report.ts')).report,
  routes: async () => (await import('./routes.ts')).routes,
  policy: async () => (await import('./check.ts')).policy,
  drain: async () => (await import('./drain.ts')).drain,
}

/** Commands of the contract that are not implemented yet. */
export const LATER = ['migrate', 'copy']

export async function dispatch(words: readonly string[], io: Io): Promise<number> {
  const [first = '', ...rest] = words
  if (first === '--help' || first === '-h') {
    io.out(HELP)
    return FINE
  }
  try {
    if (LATER.includes(first)) throw usage(`"${first}" is not implemented in this version`)
    const named = Object.hasOwn(COMMANDS, first) ? COMMANDS[first] : undefined
    if (named !== undefined) return await run(await named(), rest, io)
    if (first === '' || first.startsWith('-')) return await run((await import('./serve.ts')).serve, words, io)
    const known = `; known are ${Object.keys(COMMANDS).join(', ')}`
    throw usage(`unknown command "${first}"${npmHint(io.env) || known}`)
  } catch (error) {
    if (!(error instanceof Exit)) throw error
    io.err(error.message)
    return error.code
  }
}
