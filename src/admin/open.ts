import type { InForce } from '../config/config.ts'
import { Audit, type AuditSink } from '../observe/audit.ts'
import { AdminApi } from './api.ts'
import { RecordLookup } from './lookup.ts'
import type { AdminPorts } from './ports.ts'

/** The admin API with what it is entered by. */
export interface Admin extends AsyncDisposable {
  readonly token: string
  readonly hosts: readonly string[]
  readonly api: AdminApi
}

export interface AdminOptions
  extends Pick<
    AdminPorts,
    'records' | 'store' | 'waiters' | 'own' | 'history' | 'announceDrain' | 'counters' | 'recheck'
  > {
  readonly version: string
  /** Hears of every change. */
  readonly onAudit: AuditSink
  readonly onBug: (error: unknown) => void
}

/**
 * Null: there is none, for want of a token or of a listener.
 * @throws where the audit log cannot be opened.
 */
export async function openAdmin(inForce: InForce, options: AdminOptions): Promise<Admin | null> {
  const { service, admin, audit: log } = inForce.config
  const { listen, token, hosts } = admin
  if (listen === null || token === null) return null
  const { version, onAudit, onBug, ...rest } = options
  const audit = await Audit.open(log.file, service, onAudit).catch((error: unknown) => {
    throw new Error(`audit.file: ${(error as Error).message}`, { cause: error })
  })
  const bracketed = listen.host.includes(':') ? `[${listen.host}]` : listen.host
  let subjects = new RecordLookup(inForce.config)
  const ports: AdminPorts = {
    ...rest,
    audit,
    get config() {
      return inForce.config
    },
    get subjects() {
      if (!subjects.isOf(inForce.config)) subjects = new RecordLookup(inForce.config)
      return subjects
    },
  }
  return {
    token,
    hosts: [...hosts, bracketed.toLowerCase()],
    api: new AdminApi(ports, version, onBug),
    [Symbol.asyncDispose]: () => audit.close(),
  }
}
