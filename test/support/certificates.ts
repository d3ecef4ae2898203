import { execFileSync } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

export interface Certificate extends Disposable {
  /** PEM file paths. */
  readonly certFile: string
  readonly keyFile: string
  readonly cert: Buffer
  readonly key: Buffer
}

/** A self-signed certificate for these names (`DNS:localhost`, `IP:127.0.0.1`), made by openssl. */
export function certificate(names: string): Certificate {
  const dir = mkdtempSync(join(tmpdir(), 'cert-'))
  const certFile = join(dir, 'cert.pem')
  const keyFile = join(dir, 'key.pem')
  makeCertificate(names, keyFile, certFile)
  return {
    certFile,
    keyFile,
    cert: readFileSync(certFile),
    key: readFileSync(keyFile),
    [Symbol.dispose]: () => rmSync(dir, { recursive: true, force: true }),
  }
}

export function makeCertificate(names: string, keyFile: string, certFile: string): void {
  execFileSync(
    'openssl',
    'req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test'
      .split(' ')
      .concat('-addext', `subjectAltName=${names}`, '-keyout', keyFile, '-out', certFile),
    { stdio: 'ignore' },
  )
}
