import { VERSION } from '../version.ts'
import { type Command, FINE, type Io, run, usage } from './command.ts'
import { npmHint } from './npm-flags.ts'

const HELP = `idempotency-proxy ${VERSION}: makes any HTTP API safe to retry

  idempotency-proxy [serve] [--config FILE] [--upstream URL] [--listen ADDR] [--store URL] [--service NAME]
      serves; flags go over the file, with only --upstream it runs on the embedded store
  idempotency-proxy check [FILE]
      checks a configuration (default: the file of --config); exit 1 and all errors where there are any
  idempotency-proxy schema
      prints the configuration's JSON Schema
  idempotency-proxy doctor
      looks at configuration, store, spool, audit log and a running proxy; exit 1 where something is wrong
  idempotency-proxy list
      lists records
  idempotency-proxy inspect ID | inspect KEY --caller LINE --method M --path P
      tells what happened to one: was it executed, how often, and what to do next
  idempotency-proxy resolve ID --completed FILE | --retryable
      decides about a record whose outcome is unknown
  idempotency-proxy report
      tells what was executed, replayed and prevented, and what is unknown
  idempotency-proxy routes from OPENAPI
      drafts a configuration from an OpenAPI description
  idempotency-proxy routes overlay OPENAPI --config FILE
      prints an OpenAPI overlay that documents the key and the answers of the proxy
  idempotency-proxy policy [FILE]
      prints what clients have to know of a configuration, as /.well-known/idempotency serves it
  idempotency-proxy drain
      makes a running proxy fail its readiness, while it keeps serving

  --config FILE     YAML configuration
  --upstream URL    the API behind it: http://, https:// or unix:/path
  --listen ADDR     host:port for traffic; port 0 takes any free one (default 127.0.0.1:8080)
  --store URL       memory:, sqlite:<path>, redis:// or rediss:// (default sqlite:./idempotency.db)
  --service NAME    what it protects, such as payments; needed where the store can be shared
  --help, --version

The commands about records ask a running proxy (--admin URL --token-file FILE) or the store itself
(--config FILE, --store URL, --service NAME). Every command has a --help of its own.

Exit codes: 0 fine, 1 a finding, 2 usage.
`

/** Each is loaded when it is called: a hook waits for no server to be read from the disk. */
export const COMMANDS: Readonly<Record<string, () => Promise<Command>>> = {
  serve: async () => (await import('./serve.ts')).serve,
  check: async () => (await import('./check.ts')).check,
  schema: async () => (await import('./schema.ts')).schema,
  doctor: async () => (await import('./doctor.ts')).doctor,
  list: async () => (await import('./list.ts')).list,
  inspect: async () => (await import('./inspect.ts')).inspect,
  resolve: async () => (await import('./resolve.ts')).resolve,
  report: async () => (await import('./report.ts')).report,
  routes: async () => (await import('./routes.ts')).routes,
  policy: async () => (await import('./policy.ts')).policy,
  drain: async () => (await import('./drain.ts')).drain,
}

/** Of the contract's commands those that are still to come. */
export const LATER = ['migrate', 'copy']

/** Runs what the words of a command line name. */
export async function dispatch(words: readonly string[], io: Io): Promise<number> {
  const [first = '', ...rest] = words
  if (first === '--help' || first === '-h') {
    io.out(HELP)
    return FINE
  }
  if (LATER.includes(first)) return usage(io, `"${first}" is not implemented in this version`)
  const named = Object.hasOwn(COMMANDS, first) ? COMMANDS[first] : undefined
  if (named !== undefined) return run(await named(), rest, io)
  if (first !== '' && !first.startsWith('-'))
    return usage(
      io,
      `unknown command "${first}"${npmHint(io.env) || `; known are ${Object.keys(COMMANDS).join(', ')}`}`,
    )
  const { serve } = await import('./serve.ts')
  return run(serve, words, io)
}
