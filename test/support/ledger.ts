import type { ServerResponse } from 'node:http'
import type { Test } from 'tap'
import { firstOf } from '../../src/core/headers.ts'
import { proxyInProcess, type TestProxy } from './proxy.ts'
import { upstreamStub } from './upstream.ts'

/** One execution, filed only under the identifiers that the upstream was given. */
export interface Entry {
  readonly target: string
  readonly key: string | null
  readonly record: string | null
  readonly body: string
}

export interface Ledger {
  readonly url: string
  readonly executed: Entry[]
  /** Targets of the status queries, in order, without those of the canary. */
  readonly asked: string[]
  readonly canaries: string[]
  /** What happens to the response of an execution. */
  answer: (entry: Entry, response: ServerResponse) => void
  /** Answers a status query with something else than the truth; returns true if it did. */
  lie: (target: string, response: ServerResponse) => boolean
}

/** An honest upstream: it finds every operation by the identifiers it was given (`?key=`, `?record=`), and breaks off every response. */
export async function ledger(t: Test): Promise<Ledger> {
  const self: Ledger = {
    url: '',
    executed: [],
    asked: [],
    canaries: [],
    answer: (_entry, response) => void response.socket?.destroy(),
    lie: () => false,
  }
  const stub = await upstreamStub((seen, response) => {
    const told = (name: string): string | null => firstOf(seen.headers, name)
    if (seen.method === 'POST') {
      const body = seen.body.toString()
      const entry = {
        target: seen.target,
        key: told('idempotency-key') ?? (/"id":"([^"]*)"/.exec(body)?.[1] || null),
        record: told('idempotency-record'),
        body,
      }
      self.executed.push(entry)
      self.answer(entry, response)
      return
    }
    const { pathname, searchParams } = new URL(seen.target, 'http://ledger')
    if (seen.target.includes('canary')) self.canaries.push(seen.target)
    else self.asked.push(seen.target)
    if (self.lie(seen.target, response)) return
    const [key, record] = [searchParams.get('key'), searchParams.get('record')]
    const found = self.executed.find(
      (entry) =>
        (key !== null || record !== null) &&
        (key === null || entry.key === key) &&
        (record === null || entry.record === record),
    )
    const right = pathname === '/payments' && found !== undefined
    response.writeHead(right ? 200 : 404, { 'Content-Type': 'application/json' })
    response.end(JSON.stringify(right ? { ...found, state: 'paid' } : {}))
  })
  t.teardown(() => stub[Symbol.asyncDispose]())
  return Object.assign(self, { url: stub.url })
}

/** A proxy whose configuration may change and that can be restarted. */
export interface Served {
  readonly proxy: TestProxy
  /** As SIGHUP does. */
  reload(yaml: string): Promise<void>
  /** Ends it and starts another one on the same store. */
  restart(yaml: string): Promise<void>
}

export async function serve(t: Test, yaml: string): Promise<Served> {
  const self = {
    proxy: await proxyInProcess(yaml),
    async reload(next: string) {
      const reads = () =>
        self.proxy.log.filter(({ msg }) => String(msg).startsWith('the configuration was reloaded'))
      const before = reads().length
      await self.proxy.reload(next)
      if (reads().length === before) throw new Error(JSON.stringify(self.proxy.log.at(-1)))
    },
    async restart(next: string) {
      await self.proxy.drain()
      self.proxy = await proxyInProcess(next)
    },
  }
  t.teardown(() => self.proxy[Symbol.asyncDispose]())
  return self
}

/** `key`, `route` and `reconcile` add properties in flow style. */
export function ledgerRoute(
  upstream: string,
  store: string,
  { key = '', route = '', reconcile = '' }: Readonly<Record<string, string>>,
): string {
  return `upstream: { url: "${upstream}", timeout: 5s }
store: { url: "${store}", timeout: 2s }
routes:
  - name: pay
    match: { methods: [POST], path: /pay }
    lease: 4s
    key: { ${key === '' ? 'presence: required' : key} }
${route === '' ? '' : `    ${route}\n`}${
  reconcile === ''
    ? ''
    : `    reconcile: { completed: { status: 200, when: { /state: paid }, response: { status: 201 } }, every: 100ms, after: 1ms, attempts: 4, ${reconcile} }\n`
}`
}

export const BY_KEY =
  'request: { path: "/payments?key={key}" }, identity: { /key: "{key}" }, notFound: { status: 404 }'
export const BY_RECORD =
  'request: { path: "/payments?record={record}" }, identity: { /record: "{record}" }, notFound: { status: 404 }'
