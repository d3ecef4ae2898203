import t from 'tap'
import { TrustedProxies } from '../../src/http/headers.ts'

function told(peer: string, forwarded: readonly string[], trusted: readonly string[] = []): string {
  const proxies = new TrustedProxies(trusted)
  return proxies.clientOf(
    forwarded.flatMap((value) => ['X-Forwarded-For', value]),
    proxies.peerOf(peer),
  )
}

void t.test('X02 a client is identified by its peer address, or by what trusted proxies say', async (t) => {
  const proxies = ['10.0.0.0/8', 'fd00::/8']
  t.equal(told('203.0.113.7', ['198.51.100.1']), '203.0.113.7', 'nobody is trusted')
  t.equal(told('203.0.113.7', ['198.51.100.1'], proxies), '203.0.113.7', 'this peer is not trusted')
  t.equal(told('10.0.0.1', ['198.51.100.1'], proxies), '198.51.100.1')
  t.equal(told('::ffff:10.0.0.1', ['198.51.100.1'], proxies), '198.51.100.1')
  t.equal(told('10.0.0.1', ['6.6.6.6, 198.51.100.1, 10.0.0.2'], proxies), '198.51.100.1')
  t.equal(told('10.0.0.1', ['6.6.6.6', '198.51.100.1', '10.0.0.2'], proxies), '198.51.100.1')
  t.equal(told('10.0.0.1', ['10.0.0.3'], proxies), '10.0.0.3', 'a client among the proxies')
  t.equal(told('10.0.0.1', [], proxies), '10.0.0.1')
  t.equal(told('10.0.0.1', ['unknown'], proxies), '10.0.0.1')
})

void t.test('X02 an IPv6 client is identified by its /64', async (t) => {
  const same = ['2001:db8:1:2:3:4:5:6', '2001:DB8:1:2::1', '2001:0db8:0001:0002::', '2001:db8:1:2::1.2.3.4']
  for (const address of same) t.equal(told(address, []), '2001:db8:1:2', address)
  t.equal(told('fe80::1%eth0', []), 'fe80:0:0:0')
  t.equal(told('::1', []), '0:0:0:0')
  t.equal(told('fd00::9', ['2001:db8:9::7'], ['fd00::/8']), '2001:db8:9:0')
})
