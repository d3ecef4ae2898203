import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { jwksServer, pair, token } from '../credentials/support.ts'
import { adminYaml, ask, fullOf } from '../support/admin.ts'
import { send, tempDir } from '../support/e2e.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { upstreamStub, valueOf } from '../support/upstream.ts'

/** What a client sends, and what an operator knows about it. */
interface Case {
  readonly route: string
  readonly send: {
    readonly key: string | null
    readonly path: string
    readonly method?: string
    readonly body?: string
    readonly headers?: Record<string, string>
  }
  readonly lookup: Record<string, unknown>
}

void t.test('a lookup finds the record of every kind of key and caller, and nobody else’s', async (t) => {
  await using upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end())
  const own = await pair('ES256')
  await using jwks = await jwksServer(own)
  const secret = join(tempDir(t), 'secret')
  writeFileSync(secret, 'sixteen bytes or more')
  await using proxy = await proxyInProcess(
    `${adminYaml(t)}
upstream: { url: "${upstream.url}" }
store: { url: "memory:", secretFile: ${secret} }
routes:
  - { name: header, match: { path: /header } }
  - { name: strict, match: { path: /strict }, key: { syntax: strict } }
  - { name: tenants, match: { path: "/tenants/:id" }, scope: { caller: ["header:X-Tenant", "cookie:sid"], path: route } }
  - { name: tokens, match: { path: /tokens }, scope: { caller: ["jwt:sub", "jwt:level"], jwt: { jwks: "${jwks.url}" } } }
  - { name: events, match: { path: /events }, key: { from: ["header:ce-id", "json:/id"] }, scope: { caller: none } }
  - { name: pointed, match: { path: /pointed, methods: [PUT] }, key: { from: ["json:/id"] }, scope: { caller: none } }
  - { name: structured, match: { path: /structured }, key: { from: ["json:/id"] }, scope: { caller: none } }
  - { name: fields, match: { path: /fields }, key: { from: ["form:k", "query:k"] }, scope: { caller: none } }
  - { name: exact, match: { path: "/exact/", exact: true }, scope: { caller: none } }
  - { name: derived, match: { path: /derived }, key: { derive: { json: [/a] }, forward: X-Key }, scope: { caller: none } }
  - { name: watched, match: { path: /watched }, mode: shadow, scope: { caller: none } }
  - { name: open, match: { path: /open }, key: ignored }`,
  )
  const bearer = await token(own, { sub: 'ann', level: 3, exp: Math.floor(Date.now() / 1000) + 3600 })
  const json = { 'content-type': 'application/json' }
  const awkward = 'a\\"b, {c}:d/*'
  const quoted = `"${awkward.replace(/[\\"]/g, '\\$&')}"`
  const cloud = { 'content-type': 'application/cloudevents+json' }
  const cases: Case[] = [
    {
      route: 'header',
      send: { key: 'plain-key', path: '/header?x=1' },
      lookup: {
        key: 'plain-key',
        method: 'POST',
        path: '/header',
        caller: { Authorization: 'Bearer alice' },
      },
    },
    {
      route: 'header',
      send: { key: quoted, path: '/header' },
      lookup: {
        key: awkward,
        method: 'POST',
        path: '//header/.',
        caller: { authorization: ['Bearer alice'] },
      },
    },
    {
      route: 'strict',
      send: { key: '"in quotes"', path: '/strict' },
      lookup: {
        key: 'in quotes',
        method: 'POST',
        path: '/strict',
        caller: { authorization: 'Bearer alice' },
      },
    },
    {
      route: 'tenants',
      send: { key: 'k', path: '/tenants/7', headers: { 'x-tenant': 't1', cookie: 'a=b; sid=s1' } },
      lookup: {
        key: 'k',
        method: 'POST',
        path: '/tenants/8',
        caller: { 'X-Tenant': 't1', Cookie: 'sid=s1' },
      },
    },
    {
      route: 'tokens',
      send: { key: 'k', path: '/tokens', headers: { authorization: `Bearer ${bearer}` } },
      lookup: { key: 'k', method: 'POST', path: '/tokens', caller: { sub: 'ann', level: 3 } },
    },
    {
      route: 'events',
      send: { key: null, path: '/events', headers: { 'ce-id': 'e1', 'ce-source': '/bank' } },
      lookup: { key: 'e1', method: 'POST', path: '/events', caller: { 'ce-source': '/bank' } },
    },
    {
      route: 'events',
      send: { key: null, path: '/events', headers: { 'ce-id': 'e2' } },
      lookup: { key: 'e2', route: 'events', method: 'POST' },
    },
    {
      route: 'events',
      send: { key: null, path: '/events', body: '{"id":"e3"}', headers: json },
      lookup: { key: 'e3', route: 'events', method: 'POST' },
    },
    {
      route: 'events',
      send: { key: null, path: '/events', body: '{"id":"e4","source":"/bank"}', headers: cloud },
      lookup: { key: 'e4', route: 'events', method: 'POST', caller: { 'ce-source': '/bank' } },
    },
    {
      route: 'structured',
      send: { key: null, path: '/structured', body: '{"id":"e5","source":"/bank"}', headers: cloud },
      lookup: { key: 'e5', route: 'structured', method: 'POST', caller: { 'ce-source': '/bank' } },
    },
    {
      route: 'structured',
      send: { key: null, path: '/structured', body: '{"id":"e6"}', headers: cloud },
      lookup: { key: 'e6', route: 'structured', method: 'POST' },
    },
    {
      route: 'fields',
      send: { key: null, path: '/fields?k=q1' },
      lookup: { key: 'q1', route: 'fields', method: 'POST' },
    },
    {
      route: 'fields',
      send: {
        key: null,
        path: '/fields',
        body: 'k=f1',
        headers: { 'content-type': 'application/x-www-form-urlencoded' },
      },
      lookup: { key: 'f1', route: 'fields', method: 'POST' },
    },
    {
      route: 'pointed',
      send: { key: null, path: '/pointed', method: 'PUT', body: '{"id":42}', headers: json },
      lookup: { key: '42', route: 'pointed' },
    },
    {
      route: 'exact',
      send: { key: 'k', path: '/exact/' },
      lookup: { key: 'k', route: 'exact', method: 'POST' },
    },
    {
      route: 'default',
      send: { key: 'k', path: '/elsewhere', method: 'PATCH' },
      lookup: {
        key: 'k',
        route: 'default',
        method: 'PATCH',
        path: '/elsewhere',
        caller: { authorization: 'Bearer alice' },
      },
    },
  ]
  const look = (body: object) => ask(proxy, '/v1/records/lookup', { method: 'POST', body })
  const known = new Set<string>()
  for (const { route, send: sent, lookup } of cases) {
    const title = JSON.stringify(lookup)
    t.equal((await look(lookup)).code, 'record_not_found', `${title}: not yet`)
    t.equal((await send(proxy, sent.key, sent)).status, 201, title)
    const { json: page } = await ask(proxy, `/v1/records?route=${route}`)
    const fresh = (page['records'] as { id: string }[]).filter(({ id }) => !known.has(id))
    t.equal(fresh.length, 1, title)
    const found = fullOf(await look(lookup))
    t.equal(found.id, fresh[0]?.id, title)
    t.equal(found.route, route)
    known.add(found.id)
    t.equal((await look({ ...lookup, key: `${String(lookup['key'])}x` })).status, 404)
    const other = {
      ...(lookup['caller'] as object),
      authorization: 'Bearer eve',
      'x-tenant': 't2',
      sub: 'eve',
    }
    if (lookup['caller'] !== undefined && !['events', 'structured'].includes(route))
      t.equal((await look({ ...lookup, caller: other })).status, 404, `${title}: another caller`)
  }
  // The derived key is the one that the upstream got.
  await send(proxy, null, { path: '/derived', body: '{"a":1}', headers: json })
  const key = valueOf(upstream.seen.at(-1) ?? { headers: [] }, 'x-key')
  t.match((await look({ key, route: 'derived', method: 'POST' })).json, {
    route: 'derived',
    state: 'completed',
  })
  for (const wrong of [
    { key: 'k', method: 'POST', path: '/open' },
    { key: 'k', method: 'GET', path: '/header' },
    { key: 'k', route: 'tenants', method: 'POST' },
    { key: 'k', route: 'header', path: '/strict', method: 'POST' },
    { key: 'k', route: 'tokens', method: 'POST', caller: { sub: 'ann', level: [] } },
    { key: 'k"', method: 'POST', path: '/header', caller: { authorization: 'a\nb' } },
    { key: '"k', method: 'POST', path: '/header' },
  ])
    t.equal((await look(wrong)).code, 'invalid_request', JSON.stringify(wrong))
})
