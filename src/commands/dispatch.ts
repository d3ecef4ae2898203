import { VERSION } from '../version.ts'
import { type Command, Exit, FINE, type Io, npmHint, run, SERVE_USAGE, usage } from './command.ts'

const HELP = `idempotency-proxy ${VERSION}: makes any HTTP API safe to retry

  idempotency-proxy [serve] ${SERVE_USAGE}
      serves; flags override the file; with only --upstream it runs on the embedded store
  idempotency-proxy check [FILE]
      checks a configuration; exit 1 with all errors if it is invalid
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
  idempotency-proxy delete ID
      deletes a record, even an unreadable one: a retry with its key is executed
  idempotency-proxy report
      counts what was executed, replayed and prevented, and what is unknown
  idempotency-proxy probe URL
      tests whether an API, this proxy's or another, is safe to retry
  idempotency-proxy routes from OPENAPI
      drafts a configuration from an OpenAPI description
  idempotency-proxy routes overlay OPENAPI --config FILE
      prints an OpenAPI overlay that documents the key and the proxy's responses
  idempotency-proxy policy [FILE]
      prints what clients need to know about a configuration, as /.well-known/idempotency serves it
  idempotency-proxy migrate --print
      prints the SQL that creates the schema of the PostgreSQL store
  idempotency-proxy copy --from STORE --to STORE
      copies records to another store, so that proxies can switch to it
  idempotency-proxy drain
      makes a running proxy fail its readiness while it keeps serving
  idempotency-proxy undrain
      undoes drain

The record commands ask a running proxy (--admin URL --token-file FILE) or the store itself
(--config FILE, --store URL, --service NAME). Every command has its own --help.

Exit codes: 0 fine, 1 a finding, 2 usage.
`

/** Loaded on demand, so that a hook does not load the server. */
export const COMMANDS: Readonly<Record<string, () => Promise<Command>>> = {
  serve: async () => (await import('./serve.ts')).serve,
  check: async () => (await import('./check.ts')).check,
  schema: async () => (await import('./check.ts')).schema,
  doctor: async () => (await import('./doctor.ts')).doctor,
  list: async () => (await import('./list.ts')).list,
  inspect: async () => (await import('./inspect.ts')).inspect,
  resolve: async () => (await import('./deciding.ts')).resolve,
  delete: async () => (await import('./deciding.ts')).deleteCommand,
  report: async () => (await import('./report.ts')).report,
  probe: async () => (await import('./probe.ts')).probe,
  routes: async () => (await import('./routes.ts')).routes,
  policy: async () => (await import('./check.ts')).policy,
  migrate: async () => (await import('./check.ts')).migrate,
  copy: async () => (await import('./copy.ts')).copy,
  drain: async () => (await import('./drain.ts')).drain,
  undrain: async () => (await import('./drain.ts')).undrain,
}

export async function dispatch(words: readonly string[], io: Io): Promise<number> {
  const [first = '', ...rest] = words
  if (first === '--help' || first === '-h') {
    io.out(HELP)
    return FINE
  }
  try {
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
