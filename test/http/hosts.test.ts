import t from 'tap'
import { linesOf } from '../../src/core/headers.ts'
import { proxyBefore, values } from '../support/exchange.ts'
import { post, rawRequest } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

const TRUST = 'trustProxy: [127.0.0.1]'
const at = (host: string, key: string, lines: string[] = []) =>
  post('/p', key, '{}', ['Authorization: t', ...lines]).replace(/\r\nHost: [^\r]*/i, `\r\nHost: ${host}`)

void t.test('V03 scope.host: blank or conflicting X-Forwarded-Host lines merge no hosts', async (t) => {
  await using upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end())
  await using proxy = await proxyBefore(upstream, {
    routes: '{ name: r, match: { path: /p }, scope: { host: true, caller: "header:authorization" } }',
    more: TRUST,
  })
  const x = (...hosts: string[]) => hosts.map((host) => `X-Forwarded-Host: ${host}`)
  const replayed = async (message: string) =>
    values(await rawRequest(proxy.port, message), 'idempotent-replayed').length > 0
  for (const [n, [one, other, same]] of (
    [
      [
        ['a.test', x('')],
        ['b.test', x('')],
        ['a.test', []],
      ],
      [
        ['a.test', x(' , ')],
        ['b.test', x(' , ')],
        ['a.test', []],
      ],
      [
        ['p.test', x(' ,a.test')],
        ['p.test', x(' ,b.test')],
        ['p.test', x('a.test')],
      ],
      [
        ['p.test', x('a.test', 'b.test')],
        ['p.test', x('a.test', 'c.test')],
        ['p.test', x('a.test', 'b.test')],
      ],
      [
        ['p.test', x('a.test', 'b.test')],
        ['p.test', x('a.test')],
        ['p.test', x('A.test', 'b.test:443')],
      ],
      [
        ['p.test', x('a.test', 'a.test')],
        ['p.test', x('b.test')],
        ['p.test', x('a.test')],
      ],
    ] as [string, string[]][][]
  ).entries()) {
    const send = ([host, lines]: [string, string[]] = ['', []]) => replayed(at(host, `k${n}`, lines))
    t.equal(await send(one), false, `${n}`)
    t.equal(await send(other), false, `${n}: another host`)
    t.equal(await send(same), true, `${n}: the same host`)
  }
})

void t.test('V03 scope.host: permission for a replay on one host does not count on another', async (t) => {
  let revoked = false
  await using upstream = await upstreamStub((seen, response) => {
    const refuses = seen.method === 'GET' && revoked && linesOf(seen.headers, 'host')[0] === 'b.test'
    response.writeHead(refuses ? 403 : 201).end()
  })
  await using proxy = await proxyBefore(upstream, {
    routes:
      '{ name: r, match: { path: /p }, scope: { host: true, caller: "header:authorization" }, authorizeReplay: { path: /me, cache: 60s } }',
  })
  const send = async (host: string) => (await rawRequest(proxy.port, at(host, 'k'))).status
  for (const host of ['a.test', 'b.test', 'a.test']) t.equal(await send(host), 201)
  revoked = true
  t.equal(await send('a.test'), 201, 'granted')
  t.equal(await send('b.test'), 403)
})
