import { X509Certificate } from 'node:crypto'

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
    if (begun === 0 || begun !== ended) return `${name} is no complete PEM file`
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
