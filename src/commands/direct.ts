import { hostname } from 'node:os'
import { AdminApi } from '../admin/api.ts'
import { RecordLookup } from '../admin/lookup.ts'
import type { Config } from '../config/config.ts'
import { Audit } from '../observe/audit.ts'
import { History } from '../observe/history.ts'
import { openStore } from '../store/open.ts'
import { Records } from '../store/records.ts'
import { VERSION } from '../version.ts'
import type { Io } from './command.ts'
import type { RecordSource, SourceReply, SourceRequest } from './record-source.ts'

/**
 * The admin API in this process, on the store itself. Changes are written down as a proxy does (`audit.file`; without one on
 * standard error), so `changes` opens that file.
 * `isConfigured`: `config` is a file's, so what it says of routes holds.
 * @throws where the store cannot be opened, or the audit log not be gone on with.
 */
export async function openDirect(
  config: Config,
  isConfigured: boolean,
  changes: boolean,
  io: Io,
): Promise<RecordSource> {
  const { file } = config.audit
  const audit = await Audit.open(changes ? file : null, config.service, (line) => {
    if (file === null) io.err(`${JSON.stringify({ audit: line })}\n`)
  })
  let store: Awaited<ReturnType<typeof openStore>>
  try {
    store = await openStore(config, { onEvent: () => {}, onBreaker: () => {} })
  } catch (error) {
    await audit.close()
    throw error
  }
  const records = new Records(store)
  const history = new History({
    note: (id, notes) => store.history.append(id, notes),
    replica: `${hostname()}:${process.pid}`,
    onDropped: () => {},
  })
  const ports = {
    config,
    isConfigured,
    records,
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
  const api = new AdminApi(ports, VERSION, (error) => {
    bug = error
  })
  return {
    name: `the store ${shownUrl(config.store.url)}`,
    async ask(call) {
      const reply = await ask(api, call)
      if (bug !== null) throw bug
      return reply
    },
    async [Symbol.asyncDispose]() {
      await history.close()
      await store.close()
      await audit.close()
    },
  }
}

async function ask(
  api: AdminApi,
  { method, path, query, body, version }: SourceRequest,
): Promise<SourceReply> {
  const found = api.find(method, path)
  const answer =
    found.kind === 'refused'
      ? found.answer
      : await api.run(found.endpoint, {
          id: found.id,
          query: new URLSearchParams(query),
          ifMatch: version === undefined ? null : `"${version}"`,
          body,
          address: `${hostname()} (command line)`,
        })
  if (answer.status < 300) return { ok: true, body: answer.body }
  const { code, detail } = answer.body as Pick<Extract<SourceReply, { ok: false }>, 'code' | 'detail'>
  return { ok: false, code, detail }
}

/** Without the credentials. */
export function shownUrl(url: string): string {
  return url.replace(/\/\/[^/]*@/, '//***@')
}
