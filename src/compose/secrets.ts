import type { Config } from '../config/config.ts'
import type { Findings } from '../config/errors.ts'
import { readTokens, readUpstreamTls } from '../config/files.ts'
import { type OnRotation, Rotating } from '../config/rotating.ts'
import type { Verifier } from '../credentials/callers.ts'
import type { Issuer } from '../credentials/issuer.ts'
import type { Logger } from '../observe/log.ts'
import type { TlsMaterial } from '../runtime/pem.ts'

/** Null: the API is off. */
export function followTokens(
  { admin: { listen, tokenFile } }: Config,
  log: Logger,
  before?: readonly string[],
): Rotating<readonly string[]> | null {
  const path = 'admin.tokenFile'
  if (listen === null || tokenFile === null) return null
  const read = (findings: Findings) => readTokens(findings, path, tokenFile)
  return new Rotating({ path, files: [tokenFile], read, onRotation: rotationLog(log) }, before)
}

/** Null: no file is named. */
export function followCertificates(
  { upstream: { tls } }: Config,
  log: Logger,
  changed: (now: TlsMaterial) => void,
): Rotating<TlsMaterial> | null {
  const files = [tls.ca, tls.cert, tls.key].filter((file) => file !== null)
  if (files.length === 0) return null
  const read = (findings: Findings) => readUpstreamTls(findings, tls)
  return new Rotating({ path: 'upstream.tls', files, read, changed, onRotation: rotationLog(log) })
}

function rotationLog(log: Logger): OnRotation {
  return (path, problem) =>
    problem === null
      ? log.info({ path }, 'secret files were read again, and are in force')
      : log.warn(
          { path, problem },
          'secret files have changed and cannot be used; what they held before stays in force',
        )
}

/** Null: no issuer is configured. Signing code is loaded only if used (docs/adr/0074), as for {@link openVerifier}. */
export async function openIssuer({ issuer }: Config): Promise<Issuer | null> {
  if (issuer === null) return null
  const { Issuer } = await import('../credentials/issuer.ts')
  return new Issuer(issuer.secret, issuer.ttl)
}

/** Null: no policy reads tokens, which a reload cannot change. */
export async function openVerifier({ routes, defaults }: Config): Promise<Verifier | null> {
  const policies = [...routes, defaults].map(({ scope }) => scope.jwt).filter((policy) => policy !== null)
  if (policies.length === 0) return null
  const { verifier } = await import('../credentials/callers.ts')
  return verifier(policies)
}
