import { BlockList, isIPv4, isIPv6 } from 'node:net'
import { filterLines, firstOf, hopByHop, linesOf, type RawHeaders } from '../core/headers.ts'
import type { KeyPolicy } from '../core/policy.ts'
import type { Sent } from '../guard/call.ts'

/** Who is on the other side of the client's connection. */
export interface Peer {
  readonly address: string
  readonly trusted: boolean
}

/** Pseudonym in `Via` (RFC 9110 §7.6.3). */
const VIA = '1.1 idempotency-proxy'

/** A test for addresses in the CIDRs of `trustProxy`. Bare addresses count as one host. */
export function trustTester(cidrs: readonly string[]): (address: string) => boolean {
  const list = new BlockList()
  for (const cidr of cidrs) {
    const [network = '', prefix] = cidr.split('/')
    const family = isIPv6(network) ? 'ipv6' : 'ipv4'
    list.addSubnet(network, prefix === undefined ? (family === 'ipv6' ? 128 : 32) : Number(prefix), family)
  }
  if (cidrs.length === 0) return () => false
  return (address) => {
    const plain = address.startsWith('::ffff:') && isIPv4(address.slice(7)) ? address.slice(7) : address
    return list.check(plain, isIPv6(plain) ? 'ipv6' : 'ipv4')
  }
}

/**
 * The request's lines for the upstream: end-to-end ones as received, without framing (undici makes it), `X-Forwarded-*`
 * extended where the peer is trusted and replaced where it is not (contract §10), `Via` appended.
 */
export function requestLines(headers: RawHeaders, peer: Peer, host: string | null): string[] {
  const hop = hopByHop(headers)
  const lines = filterLines(headers, (name) => {
    if (hop.has(name) || NOT_FORWARDED.has(name)) return false
    return peer.trusted ? !EXTENDED.has(name) : !name.startsWith('x-forwarded-') && name !== 'forwarded'
  })
  const clientHost = firstOf(headers, 'host')
  const before = peer.trusted ? linesOf(headers, 'x-forwarded-for').join(', ') : ''
  const said = (name: string): string | null => (peer.trusted ? firstOf(headers, name) : null)
  lines.push('X-Forwarded-For', before === '' ? peer.address : `${before}, ${peer.address}`)
  lines.push('X-Forwarded-Proto', said('x-forwarded-proto') ?? 'http')
  const forwardedHost = said('x-forwarded-host') ?? clientHost
  if (forwardedHost !== null) lines.push('X-Forwarded-Host', forwardedHost)
  lines.push('Via', VIA)
  const sent = host ?? clientHost
  if (sent !== null) lines.push('Host', sent)
  return lines
}

/** Framing is made anew; `Expect` is answered here; the fence is this proxy's to say (contract §3). */
const NOT_FORWARDED: ReadonlySet<string> = new Set([
  'host',
  'content-length',
  'expect',
  'idempotency-fence',
  'idempotency-record',
])
const EXTENDED: ReadonlySet<string> = new Set(['x-forwarded-for', 'x-forwarded-proto', 'x-forwarded-host'])

/** By these a client has an Envoy behind this proxy send its request more than once, where Envoy takes it for internal. */
const RETRY_ORDERS: ReadonlySet<string> = new Set([
  'x-envoy-retry-on',
  'x-envoy-retry-grpc-on',
  'x-envoy-max-retries',
  'x-envoy-hedge-on-per-try-timeout',
])

/**
 * The lines of a protected request: with the key as the route forwards it, and the fence where it asks for it; without orders to
 * proxies on the way to send it more than once.
 */
export function protectedLines(lines: string[], policy: KeyPolicy, { id, key, fence }: Sent): string[] {
  const orders = lines.some((name, n) => n % 2 === 0 && RETRY_ORDERS.has(name.toLowerCase()))
  let sent = orders ? filterLines(lines, (name) => !RETRY_ORDERS.has(name)) : lines
  const { forward } = policy
  // A line of the other name is the proxy's to send: the client's own would be read first.
  const renamed = typeof forward === 'object' ? forward.header.toLowerCase() : null
  if (forward !== 'same')
    sent = filterLines(
      sent,
      (name) =>
        !policy.from.some((source) => source.kind === 'header' && source.name === name) && name !== renamed,
    )
  if (typeof forward === 'object') sent.push(forward.header, key)
  if (policy.forwardFence) {
    // Without a claim (bypass) there is no attempt to number.
    if (fence > 0) sent.push('Idempotency-Fence', String(fence))
    sent.push('Idempotency-Record', id)
  }
  return sent
}
