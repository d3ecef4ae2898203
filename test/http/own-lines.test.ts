import t from 'tap'
import { proxyBefore, values } from '../support/exchange.ts'
import { post, rawRequest } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

void t.test('a header that this proxy sets replaces that of a proxy behind it', async (t) => {
  await using inner = await upstreamStub((seen, response) => {
    const type = seen.target.endsWith('live') ? { 'Content-Type': 'text/event-stream' } : {}
    const expires = new Date(0).toISOString()
    response
      .writeHead(201, { 'Idempotency-Status': 'replayed', 'Idempotency-Expires': expires, ...type })
      .end('ok')
  })
  for (const says of [true, false]) {
    await using proxy = await proxyBefore(inner, {
      routes: `{ name: r, match: { path: "/*" }, statusHeader: ${says} }`,
    })
    for (const [path, key, own] of [
      ['/p', 'k', 'executed'],
      ['/p', 'k', 'replayed'],
      ['/live', 'k', 'executed'],
      ['/p', null, 'ignored'],
    ] as const) {
      const answer = await rawRequest(proxy.port, post(path, key, '{}'))
      t.same(values(answer, 'idempotency-status'), [says ? own : 'replayed'], `${path} ${own}`)
      const expires = values(answer, 'idempotency-expires')
      if (!says) t.same(expires, [new Date(0).toISOString()])
      else t.equal(expires.length, path === '/p' && key !== null ? 1 : 0)
      t.notOk(says && expires.includes(new Date(0).toISOString()))
    }
  }
})
