import type { Browser, Page } from 'playwright-core'
import t, { type Test } from 'tap'
import { adminYaml, ask, linesOf, TOKEN } from '../support/admin.ts'
import { newKey, send, tempDir, until } from '../support/e2e.ts'
import { browser, CHROMIUM, deadLettered, type Operated, operated, visit } from '../support/operators.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'

/*
 * The operators' page in a real Chromium, on records made by real faults. CHROMIUM names the browser if it is not at
 * /usr/bin/chromium.
 */

t.setTimeout(120_000)
const skip = CHROMIUM === null && 'no Chromium here: install it, or set CHROMIUM to one'
const audit = `${tempDir(t)}/audit.log`
const world = skip === false ? await operated(t, 'memory:', `audit: { file: ${audit} }`) : null
const chromium = skip === false ? await browser(t) : null

type Scenario = (t: Test, world: Operated, chromium: Browser) => Promise<void>

function scenario(name: string, run: Scenario): void {
  void t.test(name, { skip }, async (t) => {
    if (world !== null && chromium !== null) await run(t, world, chromium)
  })
}

/** The row of a record in the queue. */
const row = (page: Page, id: string) => page.locator(`#row-${id}`)
const said = (page: Page) => page.locator('.part-said')
const record = (page: Page, id: string) => page.goto(new URL(`#/records/${id}`, page.url()).href)
/** Refreshes at once: what the clock does every five seconds. */
async function refreshed(page: Page): Promise<void> {
  await page.getByRole('button', { name: 'Pause' }).click()
  await page.getByRole('button', { name: 'Resume' }).click()
}

scenario(
  'the page asks for the token once, keeps it in the tab only, and can forget it',
  async (t, { proxy }, chromium) => {
    const { page, complaints } = await visit(t, chromium, proxy, { token: null })
    await page.waitForFunction('document.activeElement.id === "token"')
    for (const wrong of ['wrong', 'naïve ☃ token']) {
      await page.getByLabel('Token').fill(wrong)
      await page.keyboard.press('Enter')
      await page.getByText('The proxy does not accept this token.').waitFor()
      t.equal(await page.evaluate('sessionStorage.length'), 0)
    }
    await page.getByLabel('Token').fill(` ${TOKEN} `)
    await page.keyboard.press('Enter')
    await page.getByText(/^Live/).waitFor()
    await page.reload()
    await page.getByText(/^Live/).waitFor()
    t.same(await page.evaluate('[document.cookie, localStorage.length, sessionStorage.length]'), ['', 0, 1])

    const other = await page.context().newPage()
    await other.goto(proxy.adminUrl)
    await other.getByLabel('Token').waitFor()
    await other.close()

    await page.getByRole('button', { name: 'Forget token' }).click()
    await page.getByLabel('Token').waitFor()
    t.same(
      await page.evaluate('[sessionStorage.length, document.querySelectorAll("#rows tbody tr").length]'),
      [0, 0],
    )

    await page.getByLabel('Token').fill(TOKEN)
    await page.keyboard.press('Enter')
    await page.getByText(/^Live/).waitFor()
    await page.getByRole('tab', { name: 'Unknown' }).press('ArrowRight')
    const tab = page.getByRole('tab', { selected: true })
    t.match(await tab.innerText(), 'Dead-lettered', 'one key press moves one tab, even after a second token')
    await page.evaluate('sessionStorage.setItem("idempotency-proxy-token", "changed")')
    await refreshed(page)
    await page.getByText('The proxy no longer accepts the token.').waitFor()
    t.same(complaints, [])
  },
)

scenario(
  'the queue and the counters are live, and dead letters have a tab of their own',
  async (t, { proxy, broken }, chromium) => {
    const first = await broken()
    const dead = await broken('/v1/transfers/a')
    await deadLettered(proxy, dead)
    const { page, complaints } = await visit(t, chromium, proxy, { token: null })
    await page.clock.install()
    await page.evaluate(`
    shifts = []
    new PerformanceObserver((list) => shifts.push(...list.getEntries().map(({ value }) => value))).observe({ type: 'layout-shift' })`)
    await page.getByLabel('Token').fill(TOKEN)
    await page.keyboard.press('Enter')
    await row(page, first).waitFor()
    t.match(
      await row(page, first).innerText(),
      /POST \/v1\/payments\s+create-payment\s+.*closed the connection.*\s+no reconcile/s,
    )
    t.equal(await row(page, dead).count(), 0)
    const tile = async (id: string) => Number(await page.locator(`#count-${id} .value`).innerText())
    t.same([await tile('unknown'), await tile('dead')], [1, 1])
    const executed = await tile('executed')

    await page.evaluate('shifts.length = 0')
    const second = await broken('/v1/payments?second')
    t.equal((await send(proxy, newKey(), { path: '/v1/orders/1' })).status, 201)
    await page.clock.fastForward(5000)
    await row(page, second).waitFor()
    await page.waitForFunction(
      `document.querySelector('#count-executed .value').textContent === '${executed + 1}'`,
    )
    t.equal(await page.locator('#count-executed .trend').innerText(), '+1 last minute')
    t.equal(await tile('unknown'), 2)
    t.equal(await page.evaluate('shifts.reduce((sum, one) => sum + one, 0)'), 0, 'nothing has moved')

    await page.getByRole('button', { name: 'Pause' }).click()
    const third = await broken('/v1/payments?third')
    await page.clock.fastForward(60_000)
    t.equal(await row(page, third).count(), 0, 'paused')
    await page.getByRole('button', { name: 'Resume' }).click()
    await row(page, third).waitFor()

    await page.getByRole('tab', { name: 'Dead-lettered 1' }).click()
    await row(page, dead).getByText('twice').waitFor()
    t.equal(await page.locator('#rows tbody tr').count(), 1)
    await page.getByLabel('Route', { exact: true }).last().selectOption('create-payment')
    await page.getByText('No dead-lettered requests.').waitFor()
    t.same(complaints, [])
  },
)

scenario(
  'a record is found by its id and by its key, and a miss is explained',
  async (t, { proxy }, chromium) => {
    const { page, complaints } = await visit(t, chromium, proxy)
    const key = 'order "1001" <b>é'.replace('é', 'e')
    const headers = { 'idempotency-key': '"order \\"1001\\" <b>e"', cookie: 'x=1; sid=s-7' }
    const made = await send(proxy, null, { path: '/v1/orders/9', headers })
    t.equal(made.status, 201)
    await page.getByText(/^Live/).waitFor()
    await page.keyboard.press('/')
    await page.keyboard.type(key)
    await page.getByText('Whose key is it?').waitFor()
    const routes = page.getByLabel('Route', { exact: true }).first()
    await routes.selectOption('orders')
    await page.getByLabel('Path').fill('/v1/orders/9')
    await page.getByLabel('Caller’s header authorization').fill('Bearer alice')
    await page.getByLabel('Caller’s cookie sid').fill('s-8')
    await page.keyboard.press('Enter')
    await page.getByText(/^No record: this caller has not used this key/).waitFor()
    await page.getByLabel('Path').fill('no path')
    await page.keyboard.press('Enter')
    await page.getByText(/^The request is invalid: \/path/).waitFor()
    await page.getByLabel('Path').fill('/v1/orders/9')
    await page.getByLabel('Caller’s cookie sid').fill('s-7')
    await page.keyboard.press('Enter')
    await page.getByText(/^The response was 201;/).waitFor()
    t.equal(await page.locator('#callers input').first().inputValue(), '', 'credentials do not stay')
    t.match(await page.locator('#record').innerText(), /set-cookie: \*\*\*/i)
    t.notMatch(await page.content(), /secret|s-7|Bearer alice/)
    const id = await page.locator('.whole code').innerText()

    await page.getByRole('link', { name: '← Unresolved requests' }).click()
    await page.getByLabel('Record id, or').fill(id)
    await page.keyboard.press('Enter')
    await said(page).waitFor()
    t.equal(await page.locator('.whole code').innerText(), id)

    await page.getByLabel('Record id, or').fill('A'.repeat(43))
    await page.keyboard.press('Enter')
    await page.getByText('No record has this id. If it is a key, fill in the fields below.').waitFor()
    await record(page, 'A'.repeat(43))
    await page.getByText('There is no such record').waitFor()
    t.equal(await page.getByRole('button', { name: 'Delete…' }).count(), 0)
    t.same(complaints, [])
  },
)

scenario(
  'a retry of a request resolved as done gets what the operator wrote, and executes nothing',
  async (t, world, chromium) => {
    const { proxy, upstream, broken } = world
    const key = newKey()
    const id = await broken('/v1/payments?done', key)
    t.equal((await send(proxy, key, { path: '/v1/payments?done' })).code, 'idempotency_outcome_unknown')
    const executions = upstream.seen.length
    const { page, complaints } = await visit(t, chromium, proxy, { hash: `#/records/${id}` })
    await page.getByText(/^It is unknown whether it was executed/).waitFor()
    await page.getByText('It was sent upstream once, so it was done once or not at all.').waitFor()
    await page.getByText('A retry was told that the outcome is unknown').waitFor()
    t.same(await page.locator('.history .event').allInnerTexts(), [
      'Claimed, and sent to the upstream',
      'Recorded as unknown',
      'Sent, but no complete response came, or one that the proxy does not relay',
      'A retry was told that the outcome is unknown',
    ])
    await page.getByRole('button', { name: 'Resolve…' }).click()
    await page.getByRole('radio', { name: /^It was done/ }).check()
    const button = page.getByRole('button', { name: 'Resolve as done' })
    t.ok(await button.isDisabled(), 'not before it is confirmed')
    await page.getByLabel('Headers').fill('Content-Type: application/json\nX-Found: by hand\n')
    await page.getByLabel('Body', { exact: true }).fill('{"id":')
    await page.getByText('The header says JSON, but the body is not JSON.').waitFor()
    await page.getByLabel('Body', { exact: true }).fill('{"id":"pay_1 ☃"}')
    await page.getByLabel('Reason').fill('   ')
    await page.getByLabel('Your name').fill('Ada <i>')
    await page.getByLabel('To confirm').fill('It was done')
    await page.getByLabel('Status').fill('999')
    await page.keyboard.press('Enter')
    t.notOk(await page.evaluate('document.getElementById("status").validity.valid'))
    await page.getByLabel('Status').fill('201')
    await button.click()
    await page.getByText('Give a reason for the audit log.').waitFor()
    const reason = 'seen at the bank: <img src=x onerror="document.title=1">'
    await page.getByLabel('Reason').fill(reason)
    await button.click()
    await page.getByText(/^The response was 201;/).waitFor()
    await page.getByText('Ada <i> decided: it was done').waitFor()
    await page.getByText(`“${reason}”`).waitFor()
    t.equal(await page.locator('img, i:not(.choice i)').count(), 0, 'text stays text')
    t.equal(await page.getByRole('button', { name: 'Resolve…' }).count(), 0)

    const retry = await send(proxy, key, { path: '/v1/payments?done' })
    t.match(retry, { status: 201, replayed: true, body: '{"id":"pay_1 ☃"}' })
    t.equal(retry.headers.get('x-found'), 'by hand')
    t.equal(upstream.seen.length, executions)
    t.match(linesOf(audit).at(-1), {
      what: 'resolve',
      record: id,
      reason,
      who: { by: 'Ada <i>' },
      after: { status: 201 },
    })
    t.same(complaints, [])
  },
)

scenario(
  'resolving a request as not done warns the operator, and a retry executes',
  async (t, world, chromium) => {
    const { proxy, upstream, broken } = world
    const key = newKey()
    const id = await broken('/v1/payments?not-done', key)
    const { page } = await visit(t, chromium, proxy, { hash: `#/records/${id}` })
    await page.getByRole('button', { name: 'Resolve…' }).click()
    await page.getByRole('radio', { name: /^It was not done/ }).check()
    await page.getByText(/^The next retry executes at once/).waitFor()
    await page.getByLabel('Reason').fill('the bank has never heard of it')
    const button = page.getByRole('button', { name: 'Resolve as not done' })
    await page.getByLabel('To confirm').fill('it was done')
    t.ok(await button.isDisabled(), 'the words of the other choice')
    await page.getByLabel('To confirm').fill('execute again')
    await button.click()
    await page.getByText('Nothing. The client may retry with the same key; the retry is executed.').waitFor()
    const executions = upstream.seen.length
    await send(proxy, key, { path: '/v1/payments?not-done' })
    t.equal(upstream.seen.length, executions + 1)
    await refreshed(page)
    await page.getByText(/^It is unknown whether it was executed/).waitFor()
    await page.getByText(/^Every earlier attempt counted as not executed/).waitFor()
  },
)

scenario(
  'a record that changed meanwhile is shown, and a decision has to be confirmed again',
  async (t, world, chromium) => {
    const { proxy, broken, tell } = world
    const id = await broken('/v1/refunds/1')
    await until(async () => {
      const { json } = await ask(proxy, `/v1/records/${id}`)
      return (json['reconciliation'] as { asked: number } | null)?.asked === 1
    })
    const { page, complaints } = await visit(t, chromium, proxy, { hash: `#/records/${id}` })
    await page.getByText(/^The upstream was asked once/).waitFor()
    await page.getByText(/^The proxy asks the upstream again at/).waitFor()
    await page.getByRole('button', { name: 'Resolve…' }).click()
    await page.getByRole('radio', { name: /^It was done/ }).check()
    await page.getByLabel('Status').fill('200')
    await page.getByLabel('Reason').fill('seen')
    await page.getByLabel('To confirm').fill('it was done')
    tell()
    await deadLettered(proxy, id)
    const button = page.getByRole('button', { name: 'Resolve as done' })
    await button.click()
    await page.getByText('The record changed while you were deciding, so nothing was done.').waitFor()
    await page.getByText('it is still unknown').waitFor()
    await page.getByText(/^the proxy has asked the upstream again/).waitFor()
    t.match((await ask(proxy, `/v1/records/${id}`)).json, { state: 'unknown' })
    t.ok(await button.isDisabled(), 'has to be confirmed again')
    t.equal(await page.getByLabel('Reason').inputValue(), 'seen', 'what was written is still there')
    t.match(await page.locator('.part-next').innerText(), /An operator has to decide/)
    await page.getByLabel('To confirm').fill('it was done')
    await button.click()
    await page.getByText(/^The response was 200;/).waitFor()

    const other = await broken('/v1/payments?other')
    await record(page, other)
    await page.getByText(/^It is unknown whether it was executed/).waitFor()
    await page.getByRole('button', { name: 'Resolve…' }).click()
    await page.getByRole('radio', { name: /^It was not done/ }).check()
    await page.getByLabel('Reason').fill('not seen')
    await page.getByLabel('To confirm').fill('execute again')
    const version = String((await ask(proxy, `/v1/records/${other}`)).json['version'])
    const body = { outcome: 'completed', response: { status: 200 } }
    await ask(proxy, `/v1/records/${other}/resolve`, {
      method: 'POST',
      body,
      headers: { 'if-match': `"${version}"` },
    })
    await page.getByRole('button', { name: 'Resolve as not done' }).click()
    await page
      .getByText(/^The record changed while you were deciding: .*it was unknown and is now done/)
      .waitFor()
    t.notOk(await page.locator('dialog').isVisible())
    await page.getByText(/^The response was 200;/).waitFor()
    t.same(complaints, [])
  },
)

scenario('deleting a record warns the operator, and its key executes again', async (t, world, chromium) => {
  const { proxy, upstream } = world
  const key = newKey()
  await send(proxy, key, { path: '/v1/orders/del' })
  const body = {
    key,
    route: 'orders',
    path: '/v1/orders/del',
    method: 'POST',
    caller: { authorization: 'Bearer alice' },
  }
  const { json } = await ask(proxy, '/v1/records/lookup', { method: 'POST', body })
  const { page } = await visit(t, chromium, proxy, { hash: `#/records/${String(json['id'])}` })
  await page.getByRole('button', { name: 'Delete…' }).click()
  await page.getByText(/^It was done. After deletion the proxy forgets it/).waitFor()
  await page.getByLabel('Reason').fill('a test order')
  await page.getByLabel('To confirm').fill('delete')
  await page.getByRole('button', { name: 'Delete the record' }).click()
  await page.getByText('Deleted: the next request with its key is executed.').waitFor()
  await page.getByRole('heading', { name: 'Unresolved requests' }).waitFor()
  t.match(linesOf(audit).at(-1), { what: 'delete', record: json['id'], reason: 'a test order' })
  const executions = upstream.seen.length
  t.notOk((await send(proxy, key, { path: '/v1/orders/del' })).replayed)
  t.equal(upstream.seen.length, executions + 1)

  const running = send(proxy, newKey(), { path: '/v1/reports' })
  await upstream.arrived(executions + 2)
  await page.getByRole('tab', { name: 'Running' }).click()
  await page.locator('#rows tbody a').click()
  await page.getByText(/^It is being executed now/).waitFor()
  t.equal(await page.locator('.part-actions button:visible').count(), 0, 'nothing to decide while it runs')
  world.finish()
  await running
  await refreshed(page)
  await page.getByText(/^The response was 201;/).waitFor()
  await page.getByRole('button', { name: 'Delete…' }).waitFor()
})

scenario(
  'the queue, a record and its dialog can be used with the keyboard',
  async (t, { proxy, broken }, chromium) => {
    const id = await broken('/v1/payments?keyboard')
    const { page } = await visit(t, chromium, proxy)
    await row(page, id).waitFor()
    const active = () =>
      page.evaluate<string>('document.activeElement.id || document.activeElement.closest("[id]").id')
    await page.keyboard.press('/')
    t.equal(await active(), 'find')
    await page.keyboard.type('/')
    t.equal(await page.getByLabel('Record id, or').inputValue(), '/', 'in a field it is a character')
    await page.keyboard.press('Backspace')
    const seen = new Set<string>()
    for (let n = 0; n < 60 && !(await active()).startsWith(`row-${id}`); n++) {
      await page.keyboard.press('Tab')
      seen.add(await active())
      const outline = await page.evaluate<string>('getComputedStyle(document.activeElement).outlineStyle')
      t.not(outline, 'none', `${await active()}: the focus is visible`)
    }
    t.ok(seen.has('queue-route') && seen.has('tab-unknown'), [...seen].join(' '))
    await page.keyboard.press('Enter')
    await said(page).waitFor()
    t.equal(await active(), 'record-title')
    await page.getByRole('button', { name: 'Resolve…' }).focus()
    await page.keyboard.press('Enter')
    t.ok(await page.locator('dialog').isVisible())
    await page.keyboard.press('ArrowDown')
    t.ok(await page.getByRole('radio', { name: /^It was not done/ }).isChecked())
    for (let n = 0; n < 20; n++) {
      await page.keyboard.press('Tab')
      // The body: the browser's own bar, which a modal dialog leaves reachable.
      t.ok(
        await page.evaluate(
          'document.activeElement === document.body || document.activeElement.closest("dialog") !== null',
        ),
      )
    }
    await page.keyboard.press('Escape')
    t.notOk(await page.locator('dialog').isVisible())
    t.equal(await active(), 'resolve')
    await page.keyboard.press('Escape')
    await row(page, id).waitFor()
    t.equal(await active(), `row-${id}`, 'the focus is back where it was')
    await page.locator('#tab-unknown').focus()
    await page.keyboard.press('ArrowRight')
    t.equal(await active(), 'tab-dead')
    t.equal(await page.locator('#tab-dead').getAttribute('aria-selected'), 'true')
  },
)

scenario(
  'the page fits a phone, is legible in light and dark, and names its controls',
  async (t, world, chromium) => {
    const { proxy, broken } = world
    const id = await broken(
      '/v1/payments/a-path-that-is-much-longer-than-any-phone-is-wide/so-it-has-to-break',
    )
    for (const colorScheme of ['light', 'dark'] as const) {
      const viewport = { width: 360, height: 740 }
      const { page, complaints } = await visit(t, chromium, proxy, {
        colorScheme,
        viewport,
        isMobile: true,
        hasTouch: true,
      })
      await page.getByText(/^Live/).waitFor()
      const fits = async (what: string) => {
        t.equal(
          await page.evaluate('Math.max(document.documentElement.scrollWidth, innerWidth)'),
          360,
          `${what} is as wide as the phone`,
        )
        t.same(await page.evaluate(ILLEGIBLE), [], `${what}: contrast, ${colorScheme}`)
        t.same(await page.evaluate(NAMELESS), [], `${what}: names`)
      }
      await fits('the queue')
      await page.getByLabel('Record id, or').fill('some key')
      await fits('the search')
      await record(page, id)
      await said(page).waitFor()
      await fits('a record')
      await page.getByRole('button', { name: 'Resolve…' }).tap()
      await page.getByRole('radio', { name: /^It was done/ }).check()
      await fits('a decision')
      t.equal(
        await page.evaluate('Math.round(document.querySelector("dialog").getBoundingClientRect().width)'),
        360,
      )
      t.same(complaints, [])
    }
  },
)

scenario(
  'the content security policy blocks inline scripts and foreign images',
  async (t, { proxy }, chromium) => {
    const { page, complaints } = await visit(t, chromium, proxy, { token: null })
    const asked: string[] = []
    page.on('request', (request) => asked.push(new URL(request.url()).origin))
    await page.getByLabel('Token').fill(TOKEN)
    await page.keyboard.press('Enter')
    await page.getByText(/^Live/).waitFor()
    t.same([...new Set(asked)], [proxy.adminUrl])
    t.same(complaints, [])
    await page.evaluate(`
    const script = document.createElement('script')
    script.textContent = 'document.title = "taken"'
    document.body.append(script)
    const image = document.createElement('img')
    image.src = 'http://127.0.0.1:9/x.png'
    document.body.append(image)`)
    await until(() => complaints.length >= 2)
    t.match(complaints.join(), /script-src.*img-src/s)
    t.not(await page.title(), 'taken')
  },
)

scenario('the page says when the proxy is gone or does not accept the host', async (t, _world, chromium) => {
  const { proxy } = await operated(t)
  const { page } = await visit(t, chromium, proxy)
  await page.getByText(/^Live/).waitFor()
  const other = await visit(t, chromium, {
    adminUrl: proxy.adminUrl.replace('127.0.0.1', 'proxy.localhost'),
  })
  await other.page.getByText(/does not accept the host “proxy.localhost:/).waitFor()
  await proxy.drain()
  await refreshed(page)
  await page.getByText(/^The proxy does not answer. Data as of/).waitFor()
})

scenario('the page says when the store is down, and keeps the decision', async (t, _world, chromium) => {
  await using redis = await RedisServer.start()
  const { proxy, broken } = await operated(t, redis.url)
  const id = await broken()
  const { page, complaints } = await visit(t, chromium, proxy, { hash: `#/records/${id}` })
  await page.getByRole('button', { name: 'Resolve…' }).click()
  await page.getByRole('radio', { name: /^It was done/ }).check()
  await page.getByLabel('Status').fill('200')
  await page.getByLabel('Reason').fill('seen')
  await page.getByLabel('To confirm').fill('it was done')
  redis.pause()
  const button = page.getByRole('button', { name: 'Resolve as done' })
  await button.click()
  await page.getByText(/^The store is unavailable: .* The reloaded record shows/).waitFor()
  await page.locator('#decide-do:enabled').waitFor()
  redis.resume()
  await until(async () => (await ask(proxy, `/v1/records/${id}`)).status === 200)
  await button.click()
  await page.getByText(/^The response was 200;/).waitFor()
  redis.pause()
  await refreshed(page)
  await page.getByText(/^The store is unavailable: .* Data as of/).waitFor()
  await page.getByText(/^The response was 200;/).waitFor()
  redis.resume()
  await until(async () => (await ask(proxy, `/v1/records/${id}`)).status === 200)
  await refreshed(page)
  await page.getByText(/^Live/).waitFor()
  t.equal(await page.locator('#problem').innerText(), '')
  t.same(complaints, [])
})

scenario(
  'a record of shadow mode says that it may have been executed more than once',
  async (t, { upstream }, chromium) => {
    const proxy = await proxyInProcess(`${adminYaml(t)}
upstream: { url: "${upstream.url}" }
store: { url: "memory:" }
routes: [{ name: orders, match: { path: "/v1/orders/*" }, mode: shadow }]`)
    t.teardown(() => proxy.drain())
    const key = newKey()
    for (let n = 0; n < 3; n++) t.equal((await send(proxy, key, { path: '/v1/orders/1' })).status, 201)
    let id = ''
    await until(async () => {
      const { json } = await ask(proxy, '/v1/records')
      id = (json['records'] as { id: string }[])[0]?.id ?? ''
      const full = id === '' ? null : (await ask(proxy, `/v1/records/${id}`)).json['shadowed']
      return (full as { duplicates: number } | null)?.duplicates === 2
    })
    const { page, complaints } = await visit(t, chromium, proxy, { hash: `#/records/${id}` })
    await page.getByText('The response was 201; 14 bytes are stored.').waitFor()
    const words = await page.locator('#record').innerText()
    t.match(
      words,
      /The route orders is in mode shadow: retries are executed again[^]*route is in mode shadow, so a retry/,
    )
    t.match(words, /The response is stored until/)
    t.match(
      words,
      /sent upstream at least 3 times\.[^]*2 duplicates were forwarded in shadow mode and may also have been executed/,
    )
    t.match(words, /2×, the last at [^]*Forwarded in shadow mode: replay same/)
    t.notMatch(words, /not executed|once at most/)
    t.same(complaints, [])
  },
)

/** Texts whose contrast with their background is under 4.5 (WCAG 2.2, 1.4.3). */
const ILLEGIBLE = `(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true })
  const parse = (colour) => {
    canvas.clearRect(0, 0, 1, 1)
    canvas.fillStyle = colour
    canvas.fillRect(0, 0, 1, 1)
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data
    return { rgb: [r, g, b], a: a / 255 }
  }
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((one) => one / 255).map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const behind = (element) => {
    for (let at = element; at !== null; at = at.parentElement) {
      const { rgb, a } = parse(getComputedStyle(at).backgroundColor)
      if (a === 1) return rgb
    }
    return [255, 255, 255]
  }
  const found = []
  const root = document.querySelector('dialog[open]') ?? document.body
  for (const element of root.querySelectorAll('*')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim() !== '')
    if (!own || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true }) || element.closest(':disabled, .unseen')) continue
    const [one, two] = [luminance(parse(getComputedStyle(element).color).rgb), luminance(behind(element))].sort((a, b) => b - a)
    const ratio = (one + 0.05) / (two + 0.05)
    if (ratio < 4.5) found.push(element.textContent.trim().slice(0, 40) + ' ' + ratio.toFixed(2))
  }
  return found
})()`

/** Fields and buttons that a screen reader has no name for. */
const NAMELESS = `[...document.querySelectorAll('button, input, select, textarea, a')]
  .filter((one) => one.checkVisibility())
  .filter((one) => !(one.labels?.length > 0) && !one.getAttribute('aria-label') && one.textContent.trim() === '')
  .map((one) => one.outerHTML)`
