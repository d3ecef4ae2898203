import type { ProblemCode } from '../admin/answers.ts'
import { FINDING, type Io, usage } from './command.ts'
import { plain } from './terminal.ts'

/** A request to the admin API, whether over a socket or in this process. */
export interface SourceRequest {
  readonly method: 'GET' | 'POST'
  readonly path: string
  readonly query?: Readonly<Record<string, string>>
  readonly body?: object
  /** Of the record that is decided about. */
  readonly version?: number
}

export interface SourceRefusal {
  readonly ok: false
  readonly code: ProblemCode | 'unreachable' | 'unexpected'
  readonly detail: string
}
/** `body` is what the endpoint gives, by the schema of its name. */
export type SourceReply = { readonly ok: true; readonly body: unknown } | SourceRefusal

/** Answers the commands about records: a running proxy, or the store itself. */
export interface RecordSource extends AsyncDisposable {
  /** For people, without secrets: `the proxy at …`, `the store …`. */
  readonly name: string
  ask(call: SourceRequest): Promise<SourceReply>
}

/** Says what was refused, and where. What cannot be read is the caller's mistake, everything else a finding. */
export function printRefusal(io: Io, source: RecordSource, { code, detail }: SourceRefusal): number {
  if (code === 'invalid_request') return usage(io, `${source.name} does not take that: ${plain(detail)}`)
  io.err(`idempotency-proxy: ${source.name}: ${code}: ${plain(detail)}\n`)
  return FINDING
}
