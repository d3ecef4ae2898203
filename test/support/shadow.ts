import type { Test } from 'tap'
import { metricIs } from './exchange.ts'
import { proxyInProcess, type TestProxy } from './proxy.ts'
import { type Respond, type UpstreamStub, upstreamStub } from './upstream.ts'

/** An upstream whose responses differ, except under `/same`. */
export async function counting(t: Test, more: Respond = () => {}): Promise<UpstreamStub> {
  let n = 0
  const upstream = await upstreamStub(async (seen, response, request) => {
    const id = seen.target.startsWith('/same') ? 0 : ++n
    await more(seen, response, request)
    if (!response.writableEnded)
      response.writeHead(201, ['Content-Type', 'text/plain', 'X-Id', String(id)]).end(`execution ${id}`)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  return upstream
}

export async function proxyOf(
  t: Test,
  upstream: { readonly url: string },
  store: string,
  route: string,
  more = '',
): Promise<TestProxy> {
  const proxy = await proxyInProcess(
    [
      `upstream: { url: "${upstream.url}" }`,
      `store: { url: "${store}" }`,
      'drain: { timeout: 5s }',
      `routes: [{ name: pay, match: { methods: [POST, PUT], path: "/*" }, ${route} }]`,
      more,
    ].join('\n'),
  )
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return proxy
}

export const verdict = (proxy: TestProxy, name: string, count = 1): Promise<void> =>
  metricIs(proxy, `idempotency_shadow_total{route="pay",verdict="${name}"}`, count)
