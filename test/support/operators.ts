import { existsSync } from 'node:fs'
import { type Browser, type BrowserContextOptions, chromium, type Page } from 'playwright-core'
import type { Test } from 'tap'
import { adminYaml, ask, TOKEN } from './admin.ts'
import { gate, newKey, send, until } from './e2e.ts'
import { proxyInProcess, type TestProxy } from './proxy.ts'
import { type UpstreamStub, upstreamStub } from './upstream.ts'

/** Path of a browser, or null if there is none. */
export const CHROMIUM =
  [process.env['CHROMIUM'] ?? '/usr/bin/chromium'].find((path) => existsSync(path)) ?? null

export async function browser(t: Test): Promise<Browser> {
  const started = await chromium.launch({
    executablePath: CHROMIUM as string,
    // Chromium needs these to start as root, or with a small /dev/shm.
    args: ['--no-sandbox', '--disable-dev-shm-usage', '--disable-gpu'],
  })
  t.teardown(() => started.close())
  return started
}

export interface Operated {
  readonly proxy: TestProxy
  readonly upstream: UpstreamStub
  /** Lets the request at `/v1/reports` finish. */
  readonly finish: () => void
  /** Makes payments succeed from now on. */
  readonly mend: () => void
  /** Lets the upstream answer status queries about refunds. */
  readonly tell: () => void
  /** Makes a request with an unknown outcome; returns the record id. */
  readonly broken: (path?: string, key?: string) => Promise<string>
}

/**
 * A real proxy in front of an upstream that breaks off at `/v1/payments` (no status query), at `/v1/transfers` (two status queries, both
 * undecided) and at `/v1/refunds` (status query unanswered until `tell`), keeps working on `/v1/reports`, and executes the rest.
 */
export async function operated(t: Test, store = 'memory:', more = ''): Promise<Operated> {
  const [reports, queries] = [gate(), gate()]
  let broken = true
  const upstream = await upstreamStub(async (seen, response) => {
    if (seen.method === 'GET' && seen.target.startsWith('/v1/refunds')) await queries.opened
    if (seen.method === 'GET') return void response.writeHead(202).end('{"state":"processing"}')
    if (seen.target.startsWith('/v1/payments') && broken) return void response.destroy()
    if (/^\/v1\/(?:transfers|refunds)/.test(seen.target)) return void response.destroy()
    if (seen.target.startsWith('/v1/reports')) await reports.opened
    response
      .writeHead(201, { 'Content-Type': 'application/json', 'Set-Cookie': 'sid=secret' })
      .end('{"id":"ord_7"}')
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyInProcess(`${adminYaml(t)}
upstream: { url: "${upstream.url}" }
store: { url: "${store}" }
routes:
  - { name: create-payment, match: { methods: [POST], path: /v1/payments } }
${['transfers', 'refunds']
  .map(
    (name) => `  - name: ${name}
    match: { methods: [POST], path: "/v1/${name}/*" }
    reconcile:
      request: { path: "/v1/${name}?key={key}" }
      identity: none
      completed: { status: 200 }
      notFound: { status: 404 }
      after: 1ms
      every: 50ms
      attempts: 2`,
  )
  .join('\n')}
  - { name: orders, match: { methods: [POST, PUT], path: "/v1/orders/:id" }, scope: { caller: ["header:authorization", "cookie:sid"] } }
  - { name: reports, match: { path: /v1/reports } }
${more}`)
  t.teardown(() => proxy.drain())
  t.teardown(() => {
    reports.open()
    queries.open()
  })
  return {
    proxy,
    upstream,
    finish: reports.open,
    mend: () => {
      broken = false
    },
    tell: queries.open,
    broken: async (path = '/v1/payments', key = newKey()) => {
      const { body } = await send(proxy, key, { path })
      return (JSON.parse(body) as { instance: string }).instance
    },
  }
}

/** Resolves when the upstream has received all status queries about the record. */
export async function deadLettered(proxy: TestProxy, id: string): Promise<void> {
  await until(async () => {
    const { json } = await ask(proxy, `/v1/records/${id}`)
    return (json['reconciliation'] as { deadLettered: boolean } | null)?.deadLettered === true
  })
}

export interface Visit {
  readonly page: Page
  /** Complaints of the browser: policy violations and script errors. */
  readonly complaints: string[]
}

/** Opens the page in a new tab and, given a `token`, signs in. */
export async function visit(
  t: Test,
  started: Browser,
  proxy: { readonly adminUrl: string },
  {
    token = TOKEN,
    hash = '',
    ...options
  }: BrowserContextOptions & { token?: string | null; hash?: string } = {},
): Promise<Visit> {
  const context = await started.newContext({
    locale: 'en-GB',
    viewport: { width: 1280, height: 900 },
    ...options,
  })
  t.teardown(() => context.close())
  const page = await context.newPage()
  page.setDefaultTimeout(30_000)
  const complaints: string[] = []
  page.on('pageerror', (error) => complaints.push(String(error)))
  page.on('console', (message) => {
    // A refusal that the page reports to the operator.
    if (message.type() === 'error' && !message.text().startsWith('Failed to load resource'))
      complaints.push(message.text())
  })
  await page.goto(`${proxy.adminUrl}/${hash}`)
  if (token !== null) {
    await page.getByLabel('Token').fill(token)
    await page.getByRole('button', { name: 'Open' }).click()
  }
  return { page, complaints }
}
