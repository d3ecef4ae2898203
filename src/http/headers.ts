import { BlockList, isIPv6 } from 'node:net'
import type { Config } from '../config/config.ts'
import {
  filterLines,
  firstOf,
  foldedName,
  HOP_BY_HOP,
  hopByHop,
  linesOf,
  type RawHeaders,
  REQUEST_HEADER,
} from '../core/headers.ts'
import type { KeyPolicy } from '../core/policy.ts'
import type { SentAttempt } from '../protect/request.ts'
import { unmapped } from './client.ts'
import type { LoopMark } from './loop.ts'

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
    const plain = unmapped(address)
    return list.check(plain, isIPv6(plain) ? 'ipv6' : 'ipv4')
  }
}

/** How requests are forwarded. */
export interface Forwarding {
  /** `Host` for the upstream; null keeps the client's. */
  readonly host: string | null
  readonly loop: LoopMark
  readonly counted: Counted
}

/** Headers that some route counts on: what the record is made of, the upstream must hear as it is. */
export interface Counted {
  readonly names: ReadonlySet<string>
  /** The same as {@link foldedName} gives them. */
  readonly folded: ReadonlySet<string>
}

/** Every header that decides about a record on some route, or that the proxy sends by its key. */
export function countedHeaders({ routes, defaults }: Pick<Config, 'routes' | 'defaults'>): Counted {
  const names = new Set<string>()
  for (const { key, scope, fingerprint } of [...routes, defaults]) {
    for (const source of key.from) if (source.kind === 'header') names.add(source.name)
    for (const source of scope.caller) if (source.kind === 'header') names.add(source.name)
    for (const name of [...fingerprint.headers, ...(key.derive?.headers ?? [])]) names.add(name)
    if (typeof key.forward === 'object') names.add(key.forward.header.toLowerCase())
  }
  return { names, folded: new Set([...names].map(foldedName)) }
}

/**
 * The request's lines for the upstream: end-to-end ones as received, without framing (undici makes it), `X-Forwarded-*`
 * extended where the peer is trusted and replaced where it is not (contract §10), `Via` and `CDN-Loop` appended.
 */
export function requestLines(headers: RawHeaders, peer: Peer, { host, loop, counted }: Forwarding): string[] {
  const hop = hopByHop(headers, counted.names)
  const lines = filterLines(headers, (name) => {
    if (hop.has(name) || NOT_FORWARDED.has(name) || impersonates(name, counted)) return false
    return peer.trusted ? !EXTENDED.has(name) : !name.startsWith('x-forwarded-') && name !== 'forwarded'
  })
  const clientHost = firstOf(headers, 'host')
  const before = peer.trusted ? linesOf(headers, 'x-forwarded-for').join(', ') : ''
  const said = (name: string): string | null => (peer.trusted ? firstOf(headers, name) : null)
  lines.push('X-Forwarded-For', before === '' ? peer.address : `${before}, ${peer.address}`)
  lines.push('X-Forwarded-Proto', said('x-forwarded-proto') ?? 'http')
  const forwardedHost = said('x-forwarded-host') ?? clientHost
  if (forwardedHost !== null) lines.push('X-Forwarded-Host', forwardedHost)
  lines.push('Via', VIA, 'CDN-Loop', loop.entry)
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

/**
 * Whether an application may take the line for one that this proxy counts on, sets or takes away: `Idempotency_Key` and
 * `X.Forwarded.For` are `HTTP_IDEMPOTENCY_KEY` and `HTTP_X_FORWARDED_FOR` behind CGI, WSGI or PHP.
 */
function impersonates(name: string, { names, folded }: Counted): boolean {
  if (names.has(name)) return false
  const other = foldedName(name)
  if (folded.has(other)) return true
  if (other === name) return false
  return (
    OWN.has(other) || other.startsWith('x-forwarded-') || HOP_BY_HOP.has(other) || NOT_FORWARDED.has(other)
  )
}

/** What the proxy reads of a request, or says in it, besides what routes count on. */
const OWN: ReadonlySet<string> = new Set([
  'cdn-loop',
  'ce-source',
  'content-encoding',
  'content-type',
  'forwarded',
  'repeatability-first-sent',
  'via',
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
export function protectedLines(
  lines: string[],
  policy: KeyPolicy,
  { id, key, fence }: SentAttempt,
): string[] {
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
    if (fence > 0) sent.push(REQUEST_HEADER.fence, String(fence))
    sent.push(REQUEST_HEADER.record, id)
  }
  return sent
}
