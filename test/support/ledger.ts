import { writeFileSync } from 'node:fs'
import type { ServerResponse } from 'node:http'
import type { Test } from 'tap'
import { configFile, tempDir, until } from './e2e.ts'
import { type ChildProxy, proxyProcess } from './proxy.ts'
import { upstreamStub } from './upstream.ts'

/** One execution as the upstream filed it: under what it was told, and under nothing else. */
export interface Entry {
  readonly target: string
  readonly key: string | null
  readonly record: string | null
  readonly body: string
}

export interface Ledger {
  readonly url: string
  readonly executed: Entry[]
  /** Targets of the questions, in order; those of the canary are not among them. */
  readonly asked: string[]
  readonly canaries: string[]
  /** What becomes of an execution's answer. */
  answer: (entry: Entry, response: ServerResponse) => void
  /** Instead of the truth; true: it dealt with the question. */
  lie: (target: string, response: ServerResponse) => boolean
}

/** A honest upstream: it finds every operation by what it was told of it (`?key=`, `?record=`), and breaks off every answer. */
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
    const told = (name: string): string | null => {
      const at = seen.headers.findIndex((one, n) => n % 2 === 0 && one.toLowerCase() === name)
      return at < 0 ? null : (seen.headers[at + 1] as string)
    }
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

/** A process on a file that may change, and that may be started anew. */
export interface Served {
  readonly proxy: ChildProxy
  /** By SIGHUP. */
  reload(yaml: string): Promise<void>
  /** Killed, and another one started on what it left. */
  restart(yaml: string): Promise<void>
}

const READ = /^the configuration (?:was|is|needs)/

export async function serve(t: Test, yaml: string): Promise<Served> {
  const dir = tempDir(t)
  let file = configFile(dir, yaml)
  const head = (text: string): string => `listen: 127.0.0.1:0\nadmin: { listen: "127.0.0.1:0" }\n${text}`
  const self = {
    proxy: await proxyProcess(file),
    async reload(next: string) {
      const reads = () => self.proxy.log.filter(({ msg }) => READ.test(String(msg)))
      const before = reads().length
      writeFileSync(file, head(next))
      self.proxy.kill('SIGHUP')
      await until(() => reads().length > before)
      const line = reads().at(before)
      if (!String(line?.msg).includes('was')) throw new Error(JSON.stringify(line))
    },
    async restart(next: string) {
      self.proxy.kill('SIGKILL')
      await self.proxy.exited
      file = configFile(dir, next)
      self.proxy = await proxyProcess(file)
    },
  }
  t.teardown(() => self.proxy[Symbol.asyncDispose]())
  return self
}

/** `key`, `route` and `reconcile`: further properties in flow style. */
export function ledgerRoute(
  upstream: string,
  store: string,
  { key = '', route = '', reconcile = '' }: Readonly<Record<string, string>>,
): string {
  return `upstream: { url: "${upstream}", timeout: 5s }
store: { url: "${store}" }
routes:
  - name: pay
    match: { methods: [POST], path: /pay }
    lease: 1s
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
