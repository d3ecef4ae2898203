import { X509Certificate } from 'node:crypto'
import type { Socket } from 'node:net'
import type { SecureContext, TLSSocket, Server as TlsServer } from 'node:tls'
import type { Config } from '../config/config.ts'
import type { Millis } from '../core/record.ts'
import type { KeyPair, ListenerTls } from '../runtime/pem.ts'

export interface TlsSettings extends Pick<NonNullable<Config['ops']['listen']['tls']>, 'minVersion'> {
  readonly material: ListenerTls
  /** ALPN (RFC 7301), in the order of preference. */
  readonly protocols: readonly string[]
}

/** Time limit of a handshake. */
const HANDSHAKE: Millis = 30_000

/** The TLS handshakes of a listener. They use the current certificates; connections keep those that they began with. */
export class Handshakes {
  readonly #minVersion: TlsSettings['minVersion']
  readonly #server: TlsServer
  readonly #connections = new Set<Socket>()
  #open = 0
  #others: { readonly certificate: X509Certificate; readonly context: SecureContext }[] = []

  constructor({ material, minVersion, protocols }: TlsSettings, secured: (connection: TLSSocket) => void) {
    this.#minVersion = minVersion
    // It never listens: it gets the connections of another server.
    this.#server = process.getBuiltinModule('node:tls').createServer({
      ALPNProtocols: [...protocols],
      handshakeTimeout: HANDSHAKE,
      requestCert: material.clientCa !== null,
      rejectUnauthorized: true,
      SNICallback: (name, done) =>
        done(
          null,
          this.#others.find(({ certificate }) => certificate.checkHost(name) !== undefined)?.context,
        ),
    })
    this.#server.on('secureConnection', (connection) => {
      this.#open--
      // TLS adds listeners, too: with a tunnel, Node would report more than ten as a leak.
      connection.setMaxListeners(20)
      secured(connection)
    })
    this.#server.on('tlsClientError', () => this.#open--)
    this.use(material)
  }

  use(material: ListenerTls): void {
    const { createSecureContext } = process.getBuiltinModule('node:tls')
    const [first, ...others] = material.pairs as [KeyPair, ...KeyPair[]]
    this.#server.setSecureContext(this.#optionsOf(first, material))
    this.#others = others.map((pair) => ({
      certificate: new X509Certificate(pair.cert),
      context: createSecureContext(this.#optionsOf(pair, material)),
    }))
  }

  /** Number of handshakes in progress. */
  get open(): number {
    return this.#open
  }

  begin(connection: Socket): void {
    this.#open++
    this.#connections.add(connection)
    connection.once('close', () => this.#connections.delete(connection))
    // Nothing else listens for errors of the TCP connection.
    connection.on('error', () => connection.destroy())
    this.#server.emit('connection', connection)
  }

  /** Ends all connections that it was given. */
  destroy(): void {
    for (const connection of this.#connections) connection.destroy()
  }

  #optionsOf({ cert, key }: KeyPair, { clientCa }: ListenerTls) {
    return { cert, key, minVersion: this.#minVersion, ...(clientCa === null ? {} : { ca: clientCa }) }
  }
}
