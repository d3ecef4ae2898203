import type { Address, Config } from './config.ts'
import type { Findings } from './errors.ts'

type Listeners = Pick<Config, 'listen' | 'admin' | 'ops' | 'upstream'>

/** An upstream at one of the proxy's own listeners would get every request back, without end. */
export function checkUpstreamAddress(findings: Findings, { upstream, listen, admin, ops }: Listeners): void {
  const url = upstream.url.startsWith('unix:') ? null : URL.parse(upstream.url)
  if (url === null) return
  const port = Number(url.port || (url.protocol === 'https:' ? 443 : 80))
  for (const [path, own] of [
    ['listen', listen],
    ['admin.listen', admin.listen],
    ['ops.listen', ops.listen],
  ] as const) {
    if (own === null || own.port !== port || !reaches(url.hostname, own)) continue
    findings.conflict(
      ['upstream.url', path],
      `found ${upstream.url}, the address that \`${path}\` says this proxy listens on itself; allowed: the address of the server behind it`,
    )
    return
  }
}

/** Whether who connects to `host` on this machine gets to the listener, as far as the names alone say it. */
function reaches(host: string, own: Address): boolean {
  const listening = canonical(own.host.includes(':') ? `[${own.host}]` : own.host)
  const called = canonical(host)
  if (called === listening) return true
  const covered = LOOPBACKS[listening]
  return (
    covered !== undefined &&
    (covered.includes(called) || (called.startsWith('127.') && covered.includes('127')))
  )
}

/** What of this machine's own names a listener covers, besides its own. `127`: all of 127.0.0.0/8. */
const LOOPBACKS: Readonly<Record<string, readonly string[]>> = {
  '0.0.0.0': ['localhost', '127'],
  '[::]': ['localhost', '127', '[::1]', '0.0.0.0'],
  localhost: ['127.0.0.1', '[::1]', '0.0.0.0', '[::]'],
  '127.0.0.1': ['localhost', '0.0.0.0'],
  '[::1]': ['localhost', '[::]'],
}

/** As WHATWG's URL writes a host; IPv4 within IPv6 as IPv4, names without the root's dot. */
function canonical(host: string): string {
  const name = (URL.parse(`http://${host}`)?.hostname ?? host).replace(/\.$/, '')
  const [, high = '', low = ''] = /^\[::ffff:([0-9a-f]{1,4}):([0-9a-f]{1,4})\]$/.exec(name) ?? []
  if (high === '') return name.endsWith('.localhost') ? 'localhost' : name
  const bits = [Number.parseInt(high, 16), Number.parseInt(low, 16)]
  return bits.flatMap((part) => [part >> 8, part & 255]).join('.')
}
