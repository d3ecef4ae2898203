import { isDeepStrictEqual } from 'node:util'
import type { Config } from '../config/config.ts'
import { Findings, formatConfigError } from '../config/errors.ts'
import { FileWatch, listenerFiles, readListenerTls, readTokens, readUpstreamTls } from '../config/files.ts'
import type { Verifier } from '../credentials/callers.ts'
import type { Issuer } from '../credentials/issuer.ts'
import type { Secure } from '../http/connections.ts'
import type { Logger } from '../observe/log.ts'
import { firstExpiry, type ListenerTls, type TlsMaterial } from '../runtime/pem.ts'
import type { Base } from './base.ts'

/** Null: the API is off. */
export function followTokens(
  { admin: { listen, tokenFile } }: Config,
  log: Logger,
  before?: readonly string[],
): Rotating<readonly string[]> | null {
  const path = 'admin.tokenFile'
  if (listen.address === null || tokenFile === null) return null
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

/** TLS of a listener, with the certificates that its files hold at the time; null: it has none. Loaded only if used (docs/adr/0074). */
export async function followListener(
  { log, metrics, closing }: Base,
  listener: string,
  { address, tls }: Config['ops']['listen'],
  protocols: readonly string[] = ['http/1.1'],
): Promise<Secure | null> {
  if (address === null || tls === null) return null
  const { Handshakes } = await import('../http/tls.ts')
  const path = `${listener}.tls`
  const inUse: InstanceType<typeof Handshakes>[] = []
  const use = (material: ListenerTls): void => {
    metrics.set('idempotency_tls_certificate_expires_seconds', { listener }, firstExpiry(material))
    for (const handshakes of inUse) handshakes.use(material)
  }
  const following = new Rotating({
    path,
    files: listenerFiles(tls),
    read: (findings) => readListenerTls(findings, path, tls),
    changed: use,
    onRotation: rotationLog(log),
  })
  closing.use(following)
  use(following.current)
  return (secured) => {
    const settings = { material: following.current, minVersion: tls.minVersion, protocols }
    const handshakes = new Handshakes(settings, secured)
    inUse.push(handshakes)
    return handshakes
  }
}

function rotationLog(log: Logger): OnRotation {
  return (path, problem) =>
    problem === null
      ? log.info({ path }, 'secret files were read again and are in force')
      : log.warn(
          { path, problem },
          'secret files have changed and cannot be used; their previous content stays in force',
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

/** `problem`: why the files cannot be used; null: they were read again and are in force. */
type OnRotation = (path: string, problem: string | null) => void

interface RotatingSource<T> {
  /** The property that names the files, for messages. */
  readonly path: string
  readonly files: readonly string[]
  /** Null: they cannot be used, as the findings say. */
  readonly read: (findings: Findings) => T | null
  readonly changed?: (now: T) => void
  readonly onRotation: OnRotation
}

/** The content of secret files, read again when they change; unusable content is ignored (contract §15). */
export class Rotating<T> implements Disposable {
  readonly #source: RotatingSource<T>
  readonly #watches: readonly FileWatch[]
  #current: T

  /**
   * @param before stays in force if the files cannot be used yet.
   * @throws {Error} if they cannot, and there is nothing before.
   */
  constructor(source: RotatingSource<T>, before?: T) {
    this.#source = source
    // Watches before reading, so that no change is missed.
    this.#watches = source.files.map((file) => new FileWatch(file, () => this.#again()))
    try {
      this.#current = this.#read()
    } catch (error) {
      if (before === undefined) {
        this[Symbol.dispose]()
        throw error
      }
      this.#current = before
      source.onRotation(source.path, (error as Error).message)
    }
  }

  get current(): T {
    return this.#current
  }

  [Symbol.dispose](): void {
    for (const watch of this.#watches) watch[Symbol.dispose]()
  }

  #read(): T {
    const findings = new Findings('')
    const found = this.#source.read(findings)
    if (found === null) throw new Error(findings.sorted().map(formatConfigError).join('; '))
    return found
  }

  #again(): void {
    const { path, changed, onRotation } = this.#source
    try {
      const found = this.#read()
      if (isDeepStrictEqual(found, this.#current)) return
      this.#current = found
      changed?.(found)
      onRotation(path, null)
    } catch (error) {
      onRotation(path, (error as Error).message)
    }
  }
}
