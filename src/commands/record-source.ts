import { hostname } from 'node:os'
import { type AdminPorts, adminApi } from '../admin/api.ts'
import { adminApp } from '../admin/app.ts'
import { RecordLookup } from '../admin/lookup.ts'
import { AdminProblem, PROBLEMS, type ProblemCode } from '../admin/problems.ts'
import type { PageView, RecordView } from '../admin/schemas.ts'
import type { Config } from '../config/config.ts'
import { quote } from '../config/units.ts'
import type { Millis } from '../core/record.ts'
import { Audit } from '../observe/audit.ts'
import { History } from '../observe/history.ts'
import { openStore } from '../store/open.ts'
import { Records } from '../store/records.ts'
import { VERSION } from '../version.ts'
import { Exit, finding, type Io, usage } from './command.ts'
import { plain } from './terminal.ts'

export interface SourceRequest {
  readonly method: 'GET' | 'POST' | 'DELETE'
  readonly path: string
  readonly query?: Readonly<Record<string, string>>
  readonly body?: object
  /** Version of the record that the decision is about. */
  readonly version?: number
}

/** A refusal of a source: an invalid request is a usage error, everything else a finding. */
export class SourceRefusal extends Exit {
  readonly problem: ProblemCode | 'unreachable' | 'unexpected'
  readonly detail: string
  /** The version of a record that cannot be read. */
  readonly version: number | null

  constructor(
    source: string,
    problem: SourceRefusal['problem'],
    detail: string,
    version: number | null = null,
  ) {
    const { code, message } =
      problem === 'invalid_request'
        ? usage(plain(optionFor(detail)))
        : finding(`${source}: ${problem}: ${plain(detail)}`)
    super(code, message)
    this.problem = problem
    this.detail = detail
    this.version = version
  }
}

/** An option stands for each member and parameter of a request. */
function optionFor(detail: string): string {
  return detail.replace(/^[/?](\w+): /, (_, name: string) => (name === 'key' ? 'KEY: ' : `--${name}: `))
}

/** Source of the record commands: a running proxy, or the store itself. */
export interface RecordSource extends AsyncDisposable {
  /** For people, without secrets: `the proxy at …`, `the store …`. */
  readonly name: string
  /**
   * The endpoint's reply, typed by its schema.
   * @throws {SourceRefusal}
   */
  ask(call: SourceRequest): Promise<unknown>
}

/** A listing reads up to 5,000 records; a report more. */
const TIMEOUT: Millis = 60_000

/** An admin listener's answers to a request without a token: with a token file, and without. */
const WITHOUT_TOKEN: readonly unknown[] = (['unauthorized', 'not_found'] as const).map(
  (code) => new AdminProblem(code, '').body.type,
)

/** A running proxy, through its admin listener. `origin` has no slash at the end; `tokenFile` is for messages. */
export function openRemote(origin: string, token: string, tokenFile: string): RecordSource {
  const name = `the proxy at ${origin}`
  // Redirects are refused: the token is for this address and no other.
  const request = (url: string, init: RequestInit = {}) =>
    fetch(origin + url, { redirect: 'error', signal: AbortSignal.timeout(TIMEOUT), ...init })
  let isIdentified = false
  /** The traffic listener forwards requests, and an API may accept anything: neither may get the token. */
  async function identify(): Promise<void> {
    const response = await request('/v1/config')
    const { type } = ((await response.json().catch(() => null)) ?? {}) as Partial<AdminProblem['body']>
    if (!WITHOUT_TOKEN.includes(type))
      throw new SourceRefusal(
        name,
        'unexpected',
        'not an admin listener of idempotency-proxy; allowed: the address in admin.listen',
      )
    isIdentified = true
  }
  return {
    name,
    async ask(call) {
      const { method, url, headers, payload = null } = messageOf(call)
      try {
        if (!isIdentified) await identify()
        const response = await request(url, {
          method,
          headers: { authorization: `Bearer ${token}`, ...headers },
          body: payload,
        })
        return bodyOf(name, response.status, await response.text())
      } catch (error) {
        if (!(error instanceof SourceRefusal))
          throw new SourceRefusal(name, 'unreachable', whyNot(error as Error))
        if (error.problem !== 'unauthorized') throw error
        const detail = `the token in ${quote(tokenFile)} is not this proxy's admin token (admin.tokenFile)`
        throw new SourceRefusal(name, error.problem, detail)
      }
    },
    [Symbol.asyncDispose]: async () => {},
  }
}

/**
 * The admin API in this process, on the store itself. `changes`: opens `audit.file`, where changes are written as a proxy writes
 * them (without one, to standard error). `isConfigured`: `config` comes from a file, so its routes are known.
 * @throws if the store cannot be opened, or the audit log cannot be continued.
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
    // Nobody waits here; the store notifies other processes.
    waiters: { tell: () => {} },
    // This process executes nothing and holds no outcome; only a proxy knows its own.
    own: { isRunning: () => false, tell: async () => true },
    audit,
    history,
    announceDrain: (draining) => draining,
  }
  let bug: unknown = null
  const app = adminApp({
    onBug: (error) => {
      bug = error
    },
  })
  await app.register(adminApi, { ports })
  const closing = opened.move()
  const name = `the store ${shownUrl(config.store.url)}`
  return {
    name,
    async ask(call) {
      const remoteAddress = `${hostname()} (command line)`
      const { statusCode, body } = await app.inject({ ...messageOf(call), remoteAddress })
      if (bug !== null) throw bug
      return bodyOf(name, statusCode, body)
    },
    [Symbol.asyncDispose]: () => closing.disposeAsync(),
  }
}

/** The API's page limit. */
const MAX_PAGE = 1000

/** Records page by page, until there are `limit` of them. */
export async function listRecords(
  source: RecordSource,
  query: Readonly<Record<string, string>>,
  limit: number,
): Promise<PageView> {
  const records = new Map<string, RecordView>()
  const unreadable = new Set<string>()
  let cursor = query['cursor']
  for (;;) {
    const rest = String(Math.min(MAX_PAGE, limit - records.size))
    const more = { ...query, limit: rest, ...(cursor === undefined ? {} : { cursor }) }
    const page = (await source.ask({ method: 'GET', path: '/v1/records', query: more })) as PageView
    for (const record of page.records) records.set(record.id, record)
    for (const id of page.unreadable) unreadable.add(id)
    if (page.next !== null && records.size < limit) cursor = page.next
    else return { ...page, records: [...records.values()], unreadable: [...unreadable] }
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

/** @throws {SourceRefusal} */
function bodyOf(source: string, status: number, text: string): unknown {
  let body: unknown
  try {
    body = text === '' ? null : JSON.parse(text)
  } catch {
    throw new SourceRefusal(source, 'unexpected', `status ${status} without JSON`)
  }
  if (status >= 200 && status < 300) return body
  const { code, detail = '', version } = (body ?? {}) as Partial<AdminProblem['body']>
  if (code !== undefined && Object.hasOwn(PROBLEMS, code))
    throw new SourceRefusal(source, code, detail, version)
  throw new SourceRefusal(source, 'unexpected', `status ${status}; is it another version?`)
}

/** `fetch failed` says nothing; its cause does. */
function whyNot(error: Error): string {
  const { cause } = error
  if (!(cause instanceof Error)) return error.message
  const [first = cause] = cause instanceof AggregateError ? (cause.errors as Error[]) : []
  return first.message
}

/** A URL without its credentials. */
export function shownUrl(url: string): string {
  return url.replace(/\/\/[^/]*@/, '//***@').replace(/(password=)[^&]*/gi, '$1***')
}
