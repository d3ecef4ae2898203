import { hash, randomBytes } from 'node:crypto'
import { BlockList, isIPv4, isIPv6 } from 'node:net'
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
import { type ClientCertificate, frame, normaliseHost } from '../core/identity.ts'
import type { KeyPolicy } from '../core/policy.ts'
import { SELECTING } from '../core/selecting.ts'
import type { SentAttempt } from '../protect/request.ts'
import type { Forward } from '../upstream/port.ts'

/** The other end of the client's connection. */
export interface Peer {
  readonly address: string
  readonly scheme: 'http' | 'https'
  /** Verified; null: it has presented none. */
  readonly certificate: ClientCertificate | null
  /** Listed in `trustProxy`, so its forwarding headers count. */
  readonly isTrusted: boolean
  /**
   * The client whose share of the limits its requests use, unless it is trusted to speak for others: see {@link TrustedProxies.clientOf}.
   */
  readonly client: string
}

const PLAIN = { scheme: 'http', certificate: null } as const

/** The proxies of `trustProxy`: CIDRs; a bare address is one host. */
export class TrustedProxies {
  readonly #list = new BlockList()
  readonly #none: boolean

  constructor(cidrs: readonly string[]) {
    this.#none = cidrs.length === 0
    for (const cidr of cidrs) {
      const [network = '', prefix] = cidr.split('/')
      const family = familyOf(network)
      this.#list.addSubnet(network, Number(prefix ?? (family === 'ipv6' ? 128 : 32)), family)
    }
  }

  peerOf(remoteAddress = 'unknown', over: Pick<Peer, 'scheme' | 'certificate'> = PLAIN): Peer {
    const own = unmapped(remoteAddress)
    return { address: remoteAddress, ...over, isTrusted: this.#has(own), client: sharing(own) }
  }

  /** The client whose share of the limits a request uses: an IPv4 address, or the /64 of an IPv6 one. */
  clientOf(headers: RawHeaders, { address, isTrusted, client: own }: Peer): string {
    if (!isTrusted) return own
    let client = unmapped(address)
    const forwarded = linesOf(headers, 'x-forwarded-for').join(',').split(',')
    // The nearest proxy wrote the last entry; an untrusted peer may have written those before its own.
    for (const entry of forwarded.reverse()) {
      const before = unmapped(entry.trim())
      if (!isIPv4(before) && !isIPv6(before)) break
      client = before
      if (!this.#has(client)) break
    }
    return sharing(client)
  }

  #has(address: string): boolean {
    return !this.#none && this.#list.check(address, familyOf(address))
  }
}

/** An IPv4-mapped IPv6 address, as a dual-stack socket reports it, is the IPv4 address. */
export function unmapped(address: string): string {
  return address.startsWith('::ffff:') && isIPv4(address.slice(7)) ? address.slice(7) : address
}

function sharing(address: string): string {
  return familyOf(address) === 'ipv6' ? prefixOf(address) : address
}

/** Expects a valid address: to check that, Node compiles an expression for 5 to 10 ms. */
function familyOf(address: string): 'ipv4' | 'ipv6' {
  return address.includes(':') ? 'ipv6' : 'ipv4'
}

function prefixOf(address: string): string {
  const [head = '', tail] = (address.split('%')[0] as string).split('::')
  const groups = head === '' ? [] : head.split(':')
  if (tail !== undefined) {
    const after = tail === '' ? [] : tail.split(':')
    // The last 32 bits may be written as an IPv4 address: two groups in one.
    const missing = 8 - groups.length - after.length - (after.at(-1)?.includes('.') ? 1 : 0)
    groups.push(...Array.from({ length: missing }, () => '0'), ...after)
  }
  return groups
    .slice(0, 4)
    .map((group) => Number.parseInt(group, 16).toString(16))
    .join(':')
}

/**
 * The host that the client requested (docs/adr/0035): a trusted proxy may have replaced `Host`. Conflicting lines count together, since it
 * is unknown which one the upstream believes.
 */
export function hostOf(headers: RawHeaders, { isTrusted }: Peer): string | null {
  const named = isTrusted ? linesOf(headers, 'x-forwarded-host').map(firstHost) : []
  const hosts = new Set(named.filter((host) => host !== null))
  return hosts.size > 0 ? [...hosts].join() : normaliseHost(firstOf(headers, 'host'))
}

function firstHost(line: string): string | null {
  for (const host of line.split(',')) {
    const named = normaliseHost(host)
    if (named !== null) return named
  }
  return null
}

/** This proxy's entry in `CDN-Loop` (RFC 8586), to recognise a request that comes back (docs/adr/0037). */
export interface LoopMark {
  readonly id: string
  readonly entry: string
}

/**
 * Replicas share the mark, as they share service and store, so that any of them detects a loop through a load balancer. An embedded store's
 * URL does not distinguish proxies, so there each process has its own mark.
 */
export function loopMarkOf({ service, store }: Pick<Config, 'service' | 'store'>): LoopMark {
  const url = /^(?:memory|sqlite):/.test(store.url) ? null : URL.parse(store.url)
  const name = url === null ? randomBytes(32) : frame(['loop/1', service, url.host, url.pathname])
  const id = hash('sha256', name).slice(0, 20)
  return { id, entry: `idempotency-proxy; id=${id}` }
}

/** Whether the request has been here before, even if proxies on the way reformatted the line. */
export function isLoop(headers: RawHeaders, { id }: LoopMark): boolean {
  return linesOf(headers, 'cdn-loop').some((line) => line.toLowerCase().includes(id))
}

/** Adds the mark to requests that the proxy itself makes. */
export function marking(forward: Forward, { entry }: LoopMark): Forward {
  return (request) => forward({ ...request, headers: [...request.headers, 'CDN-Loop', entry] })
}

/** How requests are forwarded. */
export interface Forwarding {
  /** `Host` for the upstream; null keeps the client's. */
  readonly host: string | null
  /** `TE: trailers` concerns the upstream too: over HTTP/2 it is the one line about a connection that is allowed (RFC 9113 §8.2.2). */
  readonly takesTrailers: boolean
  readonly loop: LoopMark
  readonly counted: IdentifyingHeaders
}

/** Headers that identify a record on some route; the upstream must get them unchanged (docs/adr/0038). */
export interface IdentifyingHeaders {
  readonly names: ReadonlySet<string>
  /** The same names, folded by {@link foldedName}. */
  readonly folded: ReadonlySet<string>
  /** Cached by name as sent, since most names recur: see {@link fateOf}. */
  readonly fates: Map<string, Fate>
}

/** Includes the headers in which a route forwards the key. */
export function identifyingHeaders({
  routes,
  defaults,
}: Pick<Config, 'routes' | 'defaults'>): IdentifyingHeaders {
  const names = new Set<string>()
  for (const { key, scope, fingerprint } of [...routes, defaults]) {
    for (const source of [...key.from, ...scope.caller]) if (source.kind === 'header') names.add(source.name)
    const counted = fingerprint.headers === null ? [] : [...SELECTING, ...fingerprint.headers]
    for (const name of [...counted, ...(key.derive?.headers ?? [])]) names.add(name)
    if (typeof key.forward === 'object') names.add(key.forward.header.toLowerCase())
  }
  return { names, folded: new Set([...names].map(foldedName)), fates: new Map() }
}

/** Pseudonym in `Via` (RFC 9110 §7.6.3). */
const VIA = '1.1 idempotency-proxy'

const TRAILERS = /(?:^|,)[\t ]*trailers[\t ]*(?:,|$)/i

/** Removed: framing is rebuilt, `Expect` is answered here, and the fence is this proxy's to send (contract §3). */
const NOT_FORWARDED: ReadonlySet<string> = new Set([
  'host',
  'content-length',
  'expect',
  ...Object.values(REQUEST_HEADER).map((name) => name.toLowerCase()),
])
const EXTENDED: ReadonlySet<string> = new Set(['x-forwarded-for', 'x-forwarded-proto', 'x-forwarded-host'])

/** The treatment of a request line, by name: `trusted` ones pass if the peer is trusted, `orders` unless the request is protected. */
type Fate = 'kept' | 'dropped' | 'trusted' | 'orders'

/** Number of names cached, none of them long: more names cost only time. */
const MAX_FATES = 500
const LONGEST_NAME = 64

function fateOf(name: string, counted: IdentifyingHeaders): Fate {
  const { fates } = counted
  const known = fates.get(name)
  if (known !== undefined) return known
  const fate = fateOfName(name.toLowerCase(), counted)
  if (fates.size >= MAX_FATES) fates.clear()
  if (name.length <= LONGEST_NAME) fates.set(name, fate)
  return fate
}

function fateOfName(name: string, counted: IdentifyingHeaders): Fate {
  if (HOP_BY_HOP.has(name) || NOT_FORWARDED.has(name) || EXTENDED.has(name) || impersonates(name, counted))
    return 'dropped'
  if (name.startsWith('x-forwarded-') || name === 'forwarded') return 'trusted'
  return RETRY_ORDERS.has(name) ? 'orders' : 'kept'
}

/**
 * The request's lines for the upstream: end-to-end lines as received, without framing; `X-Forwarded-*` extended if the peer is trusted and
 * replaced otherwise (contract §10); `Via` and `CDN-Loop` appended. Protected requests lose lines that ask a proxy to retry them.
 */
export function requestLines(
  headers: RawHeaders,
  { address, isTrusted, scheme }: Peer,
  { host, takesTrailers, loop, counted }: Forwarding,
  isProtected = false,
): string[] {
  const hop = hopByHop(headers, counted.names)
  const lines: string[] = []
  for (let i = 0; i + 1 < headers.length; i += 2) {
    const name = headers[i] as string
    const fate = fateOf(name, counted)
    if (fate === 'dropped' || (fate === 'trusted' && !isTrusted) || (fate === 'orders' && isProtected))
      continue
    if (hop === HOP_BY_HOP || !hop.has(name.toLowerCase())) lines.push(name, headers[i + 1] as string)
  }
  if (takesTrailers && linesOf(headers, 'te').some((line) => TRAILERS.test(line)))
    lines.push('TE', 'trailers')
  const clientHost = firstOf(headers, 'host')
  const before = isTrusted ? linesOf(headers, 'x-forwarded-for').join(', ') : ''
  const forwarded = (name: string): string | null => (isTrusted ? firstOf(headers, name) : null)
  lines.push('X-Forwarded-For', before === '' ? address : `${before}, ${address}`)
  lines.push('X-Forwarded-Proto', forwarded('x-forwarded-proto') ?? scheme)
  const forwardedHost = forwarded('x-forwarded-host') ?? clientHost
  if (forwardedHost !== null) lines.push('X-Forwarded-Host', forwardedHost)
  lines.push('Via', VIA, 'CDN-Loop', loop.entry)
  const sentHost = host ?? clientHost
  if (sentHost !== null) lines.push('Host', sentHost)
  return lines
}

/** Headers that the proxy itself reads or writes, apart from the {@link IdentifyingHeaders}. */
const READ_HERE: ReadonlySet<string> = new Set([
  'cdn-loop',
  'ce-source',
  'content-encoding',
  'content-type',
  'forwarded',
  'repeatability-first-sent',
  'via',
])

/**
 * Whether an application may mistake the line for one that this proxy reads, sets or removes: behind CGI, WSGI or PHP,
 * `Idempotency_Key` is `HTTP_IDEMPOTENCY_KEY` too.
 */
function impersonates(name: string, { names, folded }: IdentifyingHeaders): boolean {
  if (names.has(name)) return false
  const other = foldedName(name)
  if (folded.has(other)) return true
  if (other === name) return false
  return (
    [READ_HERE, HOP_BY_HOP, NOT_FORWARDED].some((set) => set.has(other)) || other.startsWith('x-forwarded-')
  )
}

/** With these, a client can make an Envoy behind this proxy retry its request, if that Envoy considers it internal. */
const RETRY_ORDERS: ReadonlySet<string> = new Set([
  'x-envoy-retry-on',
  'x-envoy-retry-grpc-on',
  'x-envoy-max-retries',
  'x-envoy-hedge-on-per-try-timeout',
])

/** Adds the key and the fence to a protected request's lines, as the route forwards them. */
export function protectedLines(
  lines: string[],
  { from, forward, forwardFence }: KeyPolicy,
  { id, key, fence }: SentAttempt,
): string[] {
  let sent = lines
  if (forward !== 'same') {
    const taken = new Set(from.flatMap((source) => (source.kind === 'header' ? [source.name] : [])))
    // A client's line with that name would be read first.
    if (typeof forward === 'object') taken.add(forward.header.toLowerCase())
    sent = filterLines(lines, (name) => !taken.has(name))
    if (typeof forward === 'object') sent.push(forward.header, key)
  }
  if (forwardFence) {
    // Without a claim (bypass) there is no fence.
    if (fence > 0) sent.push(REQUEST_HEADER.fence, String(fence))
    sent.push(REQUEST_HEADER.record, id)
  }
  return sent
}
