import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { linesOf } from '../../src/core/headers.ts'
import { until } from '../support/e2e.ts'
import { browser, CHROMIUM } from '../support/operators.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(600_000)

/** The guide's page, whose script makes the key, as the shop would serve it. */
const [, PAGE = ''] =
  /```html\n(<!-- checkout.html -->.*?)```/s.exec(
    readFileSync(join(import.meta.dirname, '../../docs/guides/browsers.md'), 'utf8'),
  ) ?? []

const skip = CHROMIUM === null && 'no Chromium here: install it, or set CHROMIUM to one'

t.test("§4 §6 the guide's form in a browser: reloads replay, two clicks order once", { skip }, async (t) => {
  let orders = 0
  let release = (): void => {}
  const upstream = await upstreamStub(async ({ method, headers }, response) => {
    if (method === 'GET') {
      response.writeHead(200, { 'Content-Type': 'text/html; charset=utf-8' }).end(PAGE)
      return
    }
    const n = ++orders
    if (linesOf(headers, 'cookie').includes('session=slow')) await new Promise<void>((go) => (release = go))
    response.writeHead(201, { 'Content-Type': 'text/html' }).end(`<h1>Order ${n}</h1>`)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const yaml = `upstream: { url: "${upstream.url}" }
store: { url: "memory:" }
routes:
  - name: checkout
    match: { path: /checkout }
    key: { from: ["form:idempotency_key"], presence: required }
    scope: { caller: "cookie:session" }
    inFlight: { mode: wait, wait: 10s }`
  const proxy = await proxyInProcess(yaml)
  t.teardown(() => proxy[Symbol.asyncDispose]())
  const chromium = await browser(t)
  const context = await chromium.newContext()
  const page = await context.newPage()
  const heading = () => page.locator('h1').innerText()
  await context.addCookies([{ name: 'session', value: 'a', url: proxy.url }])

  await page.goto(`${proxy.url}/checkout`)
  await page.getByLabel('Amount').fill('5')
  await page.getByRole('button').click()
  await page.getByRole('heading', { name: 'Order 1' }).waitFor()
  await page.reload()
  t.equal(await heading(), 'Order 1', 'a resubmitted form gets the same response')
  t.equal(orders, 1)

  await page.goto(`${proxy.url}/checkout`)
  await page.getByLabel('Amount').fill('5')
  await page.getByRole('button').click()
  await page.getByRole('heading', { name: 'Order 2' }).waitFor()

  // Two clicks: the browser cancels the first request and sends another.
  await context.addCookies([{ name: 'session', value: 'slow', url: proxy.url }])
  await page.goto(`${proxy.url}/checkout`)
  await page.getByLabel('Amount').fill('7')
  const { x = 0, y = 0 } = (await page.getByRole('button').boundingBox()) ?? {}
  await page.mouse.click(x + 5, y + 5)
  await until(() => orders === 3)
  await page.mouse.click(x + 5, y + 5)
  release()
  await page.getByRole('heading', { name: 'Order 3' }).waitFor()
  t.equal(orders, 3)

  // Without its key the form is refused, in plain words.
  await page.goto(`${proxy.url}/checkout`)
  await page.getByLabel('Amount').fill('8')
  await page.evaluate('document.querySelector("[name=idempotency_key]").remove()')
  await page.getByRole('button').click()
  await page.getByRole('heading', { name: 'This form cannot be sent' }).waitFor()
  t.equal(
    await page.evaluate('getComputedStyle(document.body).maxWidth'),
    '576px',
    'the Content-Security-Policy allows its style',
  )
  t.equal(orders, 3)
})
