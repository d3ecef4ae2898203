import { createPrivateKey, X509Certificate } from 'node:crypto'

/** PEM files of one end of a TLS connection. */
export interface TlsMaterial {
  readonly ca?: Buffer
  readonly cert?: Buffer
  readonly key?: Buffer
}

const CERTIFICATE = /-----BEGIN ((?:TRUSTED )?CERTIFICATE)-----[^-]*-----END \1-----/g

/**
 * Why these files cannot be used as they are; null: they can. A key that was replaced a moment before its certificate does not belong to
 * it, and OpenSSL silently ignores authorities from the first one that it cannot read.
 */
export function tlsProblem(material: TlsMaterial): string | null {
  for (const [name, pem] of Object.entries(material)) {
    const text = (pem as Buffer).toString('latin1')
    const [begun, ended] = ['-----BEGIN ', '-----END '].map((mark) => text.split(mark).length - 1)
    if (begun === 0 || begun !== ended) return `${name} is not a complete PEM file`
  }
  try {
    for (const [authority] of (material.ca?.toString('latin1') ?? '').matchAll(CERTIFICATE))
      void new X509Certificate(authority)
    // Loaded on demand: it adds 10 ms to the start.
    process.getBuiltinModule('node:tls').createSecureContext(material)
    return null
  } catch (error) {
    return (error as Error).message
  }
}

/** A certificate and its key, as a listener presents them. */
export interface KeyPair {
  readonly cert: Buffer
  readonly key: Buffer
}

/** What a listener needs to serve TLS. */
export interface ListenerTls {
  /** The first is used if no other is valid for the name that a client requests. */
  readonly pairs: readonly KeyPair[]
  /** Authorities of client certificates; null: clients need none. */
  readonly clientCa: Buffer | null
}

/** Why a listener cannot use these files now; null: it can. */
export function pairProblem({ cert, key }: KeyPair): string | null {
  const incomplete = tlsProblem({ cert })
  if (incomplete !== null) return incomplete
  const certificate = new X509Certificate(cert)
  try {
    if (!certificate.checkPrivateKey(createPrivateKey(key)))
      return 'the key does not belong to the certificate'
  } catch (error) {
    return `the key cannot be read (${(error as Error).message})`
  }
  const { validToDate } = certificate
  return validToDate.getTime() < Date.now() ? `the certificate expired at ${validToDate.toISOString()}` : null
}

/** When the first of the certificates expires, in seconds since 1970. */
export function firstExpiry({ pairs }: ListenerTls): number {
  return Math.min(...pairs.map(({ cert }) => new X509Certificate(cert).validToDate.getTime())) / 1000
}
