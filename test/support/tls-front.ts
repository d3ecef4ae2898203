import { once } from 'node:events'
import { type AddressInfo, createServer, type Socket } from 'node:net'
import { connect } from 'node:tls'
import { resetConnection } from '../../src/http/connections.ts'
import { certificate } from './certificates.ts'

const OWN = process.env['TRAFFIC_TLS'] === '1' ? certificate('IP:127.0.0.1') : null
process.once('exit', () => OWN?.[Symbol.dispose]())

/** Suites with `TRAFFIC_TLS=1` run on a listener with TLS: how the configuration names it. */
export const LISTEN =
  OWN === null
    ? '127.0.0.1:0'
    : `{ address: "127.0.0.1:0", tls: { cert: ${OWN.certFile}, key: ${OWN.keyFile} } }`

/** A front does not see a reset of what its client does not read. */
export const BEHIND_FRONT =
  OWN === null ? false : 'the front before TLS does not pass on what its client does not read'

/** Clients of these suites speak plain text: a port where what they send is passed on over TLS, byte by byte. Itself, without TLS. */
export async function plainPort(port: number): Promise<{ readonly port: number; close(): void }> {
  if (OWN === null) return { port, close() {} }
  const front = createServer({ allowHalfOpen: true, noDelay: true }, (client: Socket) => {
    const onward = connect({
      port,
      host: '127.0.0.1',
      ca: OWN.cert,
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
  front.listen(0, '127.0.0.1').unref()
  await once(front, 'listening')
  return { port: (front.address() as AddressInfo).port, close: () => front.close() }
}
