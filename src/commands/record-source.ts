import { hostname } from 'node:os'
import { type AdminPorts, adminApi } from '../admin/api.ts'
import { adminApp } from '../admin/app.ts'
import { RecordLookup } from '../admin/lookup.ts'
import { PROBLEMS, type ProblemCode } from '../admin/problems.ts'
import type { Config } from '../config/config.ts'
import { quote } from '../config/units.ts'
import type { Millis } from '../core/record.ts'
import { Audit } from '../observe/audit.ts'
import { History } from '../observe/history.ts'
import { openStore } from '../store/open.ts'
import { Records } from '../store/records.ts'
import { VERSION } from '../version.ts'
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

/** A listing looks at up to 5,000 records; a report at more. */
const TIMEOUT: Millis = 60_000

/** A running proxy, by its admin listener. `origin`: without a slash at the end; `tokenFile`: where the token is from. */
export function openRemote(origin: string, token: string, tokenFile: string): RecordSource {
  return {
    name: `the proxy at ${origin}`,
    async ask(call) {
      const { method, url, headers, payload = null } = messageOf(call)
      try {
        const response = await fetch(origin + url, {
          method,
          // The token is for this address and no other.
          redirect: 'error',
          signal: AbortSignal.timeout(TIMEOUT),
          headers: { authorization: `Bearer ${token}`, ...headers },
          body: payload,
        })
        const reply = replyOf(response.status, await response.text())
        return reply.ok || reply.code !== 'unauthorized'
          ? reply
          : refused(
              reply.code,
              `the token in ${quote(tokenFile)} is not this proxy's admin token (admin.tokenFile)`,
            )
      } catch (error) {
        return refused('unreachable', whyNot(error as Error))
      }
    },
    [Symbol.asyncDispose]: async () => {},
  }
}

/**
 * The admin API in this process, on the store itself. Changes are written down as a proxy does (`audit.file`; without one on
 * standard error), so `changes` opens that file.
 * `isConfigured`: `config` is a file's, so what it says of routes holds.
 * @throws where the store cannot be opened, or the audit log cannot be continued.
 */
export async function openDirect(
  config: Config,
  isConfigured: boolean,
  changes: boolean,
  io: Io,
): Promise<RecordSource> {
  const { file } = config.audit
  await using opened = new AsyncDisposableStack()
  const audit = await Audit.open(changes ? file : null, config.service, (line) => {
    if (file === null) io.err(`${JSON.stringify({ audit: line })}\n`)
  })
  opened.defer(() => audit.close())
  const store = await openStore(config, { onEvent: () => {}, onBreaker: () => {} })
  opened.defer(() => store.close())
  const history = new History({
    note: (id, notes) => store.history.append(id, notes),
    replica: `${hostname()}:${process.pid}`,
    onDropped: () => {},
  })
  opened.defer(() => history.close())
  const ports: AdminPorts = {
    version: VERSION,
    config,
    isConfigured,
    records: new Records(store),
    store,
    subjects: new RecordLookup(config),
    // Nobody waits here; the store tells other processes.
    waiters: { tell: () => {} },
    // Nothing runs here, and no outcome is held: what a proxy knows must be asked there.
    own: { isRunning: () => false, tell: async () => true },
    audit,
    history,
    announceDrain: () => {},
  }
  let bug: unknown = null
  const app = adminApp({
    onBug: (error) => {
      bug = error
    },
  })
  await app.register(adminApi, { ports })
  const closing = opened.move()
  return {
    name: `the store ${shownUrl(config.store.url)}`,
    async ask(call) {
      const remoteAddress = `${hostname()} (command line)`
      const { statusCode, body } = await app.inject({ ...messageOf(call), remoteAddress })
      if (bug !== null) throw bug
      return replyOf(statusCode, body)
    },
    [Symbol.asyncDispose]: () => closing.disposeAsync(),
  }
}

function messageOf({ method, path, query, body, version }: SourceRequest) {
  return {
    method,
    url: query === undefined ? path : `${path}?${new URLSearchParams(query).toString()}`,
    headers: {
      ...(body === undefined ? {} : { 'content-type': 'application/json' }),
      ...(version === undefined ? {} : { 'if-match': `"${version}"` }),
    },
    ...(body === undefined ? {} : { payload: JSON.stringify(body) }),
  }
}

function replyOf(status: number, text: string): SourceReply {
  let body: unknown
  try {
    body = text === '' ? null : JSON.parse(text)
  } catch {
    return refused('unexpected', `status ${status} and no JSON; is it an admin listener?`)
  }
  if (status >= 200 && status < 300) return { ok: true, body }
  const { code, detail = '' } = (body ?? {}) as { readonly code?: string; readonly detail?: string }
  return code !== undefined && Object.hasOwn(PROBLEMS, code)
    ? refused(code as ProblemCode, detail)
    : refused('unexpected', `status ${status}; is it an admin listener of this version?`)
}

function refused(code: SourceRefusal['code'], detail: string): SourceRefusal {
  return { ok: false, code, detail }
}

/** `fetch failed` says nothing; its cause does. */
function whyNot(error: Error): string {
  const { cause } = error
  if (!(cause instanceof Error)) return error.message
  const [first = cause] = cause instanceof AggregateError ? (cause.errors as Error[]) : []
  return first.message
}

/** Without the credentials. */
export function shownUrl(url: string): string {
  return url.replace(/\/\/[^/]*@/, '//***@')
}
