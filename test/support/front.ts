import { once } from 'node:events'
import { type AddressInfo, createServer, type Server, type Socket } from 'node:net'
import { connect } from 'node:tls'
import { resetConnection } from '../../src/http/connections.ts'
import { certificate } from './certificates.ts'
import { http2Front } from './http2-front.ts'

const OWN = process.env['TRAFFIC_TLS'] === '1' ? certificate('IP:127.0.0.1') : null
process.once('exit', () => OWN?.[Symbol.dispose]())

/** Set by suites in which the proxy gets every request over HTTP/2. */
export const IS_HTTP2 = process.env['TRAFFIC_HTTP2'] === '1'

/** The listener of suites with `TRAFFIC_TLS=1` or `TRAFFIC_HTTP2=1`, as the configuration names it. */
export const LISTEN =
  OWN !== null
    ? `{ address: "127.0.0.1:0", tls: { cert: ${OWN.certFile}, key: ${OWN.keyFile} } }`
    : IS_HTTP2
      ? '{ address: "127.0.0.1:0", http2: true }'
      : '127.0.0.1:0'

/** A front does not see a reset of what its client does not read. */
export const BEHIND_FRONT =
  OWN === null ? false : 'the front before TLS does not pass on what its client does not read'

/** Header lines as the proxy sends them. */
export function sent(lines: readonly string[]): string[] {
  return lines.map((text, i) => (IS_HTTP2 && i % 2 === 0 ? text.toLowerCase() : text))
}

/** Clients of these suites speak HTTP/1.1 in plain text: a port where what they send is passed on as the suite says. Itself, if unchanged. */
export async function plainPort(port: number): Promise<{ readonly port: number; close(): void }> {
  if (OWN === null && !IS_HTTP2) return { port, close() {} }
  const front: Server = OWN === null ? http2Front(port) : tlsFront(port, OWN.cert)
  front.listen(0, '127.0.0.1').unref()
  await once(front, 'listening')
  return { port: (front.address() as AddressInfo).port, close: () => front.close() }
}

/** Passes each byte on over TLS. */
function tlsFront(port: number, ca: Buffer): Server {
  return createServer({ allowHalfOpen: true, noDelay: true }, (client: Socket) => {
    const onward = connect({
      port,
      host: '127.0.0.1',
      ca,
      ALPNProtocols: ['http/1.1'],
      allowHalfOpen: true,
    } as never)
    onward.setNoDelay()
    // Not `pipeline`: what one side does, the other sees.
    for (const [from, to] of [
      [client, onward],
      [onward, client],
    ] as const) {
      from.on('error', () => resetConnection(to)).on('close', () => to.destroySoon())
      from.pipe(to)
    }
  })
}
