import { isIPv4, isIPv6 } from 'node:net'
import { linesOf, type RawHeaders } from '../core/headers.ts'

/**
 * Whose share of the limits a request takes: the peer's address, or what trusted proxies say of their peers (`trustProxy`). Of an
 * IPv6 address its /64, which one client has as a whole.
 */
export function clientOf(headers: RawHeaders, peer: string, isTrusted: (address: string) => boolean): string {
  let client = unmapped(peer)
  if (isTrusted(client)) {
    const forwarded = linesOf(headers, 'x-forwarded-for').join(',').split(',')
    // The nearest proxy wrote the last one; whoever is not trusted may have written what stands before.
    for (let n = forwarded.length - 1; n >= 0; n--) {
      const address = unmapped((forwarded[n] as string).trim())
      if (!isIPv4(address) && !isIPv6(address)) break
      client = address
      if (!isTrusted(client)) break
    }
  }
  return isIPv6(client) ? prefixOf(client) : client
}

/** An IPv4-mapped IPv6 address, as a dual-stack socket reports it, is the IPv4 address. */
export function unmapped(address: string): string {
  return address.startsWith('::ffff:') && isIPv4(address.slice(7)) ? address.slice(7) : address
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
