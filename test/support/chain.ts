import type { Test } from 'tap'
import { proxyInProcess, type TestProxy } from './proxy.ts'

export type Link = readonly [service: string, url: string, more?: string, caller?: string]

/** A link of a chain of proxies. */
export async function proxyOn(
  t: Test,
  store: { readonly url: string },
  ...[service, url, more = '', caller = 'header:authorization']: Link
): Promise<TestProxy> {
  const proxy = await proxyInProcess(
    `service: ${service}
upstream: { url: "${url}", timeout: 5s }
store: { url: "${store.url}" }
drain: { timeout: 1s }
routes:
  - { name: pay, match: { path: "/*" }, scope: { caller: "${caller}" }${more} }`,
  )
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return proxy
}
