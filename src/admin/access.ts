import type { InForce } from '../config/config.ts'
import { Audit, type AuditSink } from '../observe/audit.ts'
import type { AdminPorts } from './api.ts'

/** Who may use the API, and its ports. The first request creates the application itself. */
export interface AdminAccess {
  /** The tokens in force: several during a rotation. */
  readonly tokens: () => readonly string[]
  /** Names allowed in `Host`, without a port, in lower case. */
  readonly hosts: readonly string[]
  readonly ports: Omit<AdminPorts, 'subjects'>
}

export type AdminOptions = Omit<AdminPorts, 'config' | 'subjects' | 'audit'> & {
  /** Follows `admin.tokenFile`. */
  readonly tokens: { readonly current: readonly string[] } | null
  /** Called with every change. */
  readonly onAudit: AuditSink
}

/**
 * Null: no token or no listener, so no API.
 * @throws {Error} if the audit log cannot be opened.
 */
export async function openAdminAccess(
  inForce: InForce,
  { onAudit, tokens, ...rest }: AdminOptions,
): Promise<(AdminAccess & AsyncDisposable) | null> {
  const { service, admin, audit: log } = inForce.config
  const {
    listen: { address: listen },
    hosts,
  } = admin
  if (listen === null || tokens === null) return null
  const audit = await Audit.open(log.file, service, onAudit).catch((error: unknown) => {
    throw new Error(`audit.file: ${(error as Error).message}`, { cause: error })
  })
  const bracketed = listen.host.includes(':') ? `[${listen.host}]` : listen.host
  const ports = {
    ...rest,
    audit,
    get config() {
      return inForce.config
    },
  }
  return {
    tokens: () => tokens.current,
    hosts: [...hosts, bracketed.toLowerCase()],
    ports,
    [Symbol.asyncDispose]: () => audit.close(),
  }
}
