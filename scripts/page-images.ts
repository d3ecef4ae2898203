/**
 * Retakes the screenshots in docs/operators-page.md: the real page in a real Chromium, on records made by real faults.
 *
 *   node scripts/page-images.ts
 */
import { fileURLToPath } from 'node:url'
import t, { type Test } from 'tap'
import { newKey, send } from '../test/support/e2e.ts'
import { browser, deadLettered, operated, visit } from '../test/support/operators.ts'

const FOLDER = fileURLToPath(new URL('../docs/images/', import.meta.url))

void t.test('pictures', async (t: Test) => {
  const { proxy, broken } = await operated(t)
  const chromium = await browser(t)
  const sid = { cookie: 'sid=1' }
  const key = newKey()
  const id = await broken('/v1/payments', key)
  for (let n = 0; n < 3; n++) await send(proxy, key, { path: '/v1/payments' })
  const payments = [await broken(), await broken('/v1/payments')]
  const transfers = [await broken('/v1/transfers/eu-7'), await broken('/v1/transfers/eu-9')]
  for (const one of transfers) await deadLettered(proxy, one)
  await broken('/v1/refunds/14')
  for (let n = 0; n < 40; n++) {
    const order = newKey()
    await send(proxy, order, { path: `/v1/orders/${n}`, headers: sid })
    if (n % 4 === 0) await send(proxy, order, { path: `/v1/orders/${n}`, headers: sid })
    if (n % 20 === 0) await send(proxy, order, { path: `/v1/orders/${n}`, headers: sid, body: '{"other":1}' })
  }

  const desktop = { viewport: { width: 1200, height: 760 } }
  const light = await visit(t, chromium, proxy, { ...desktop, colorScheme: 'light' })
  await light.page.locator(`#row-${payments[0]}`).waitFor()
  await light.page.getByText(/asked 1×/).waitFor()
  await light.page.mouse.move(0, 0)
  await light.page.screenshot({ path: `${FOLDER}operators-queue.png` })

  const dark = await visit(t, chromium, proxy, {
    viewport: { width: 1200, height: 960 },
    colorScheme: 'dark',
    hash: `#/records/${id}`,
  })
  await dark.page.getByText('A retry was told that the outcome is unknown').waitFor()
  await dark.page.screenshot({ path: `${FOLDER}operators-record.png` })

  const phone = {
    viewport: { width: 360, height: 740 },
    isMobile: true,
    hasTouch: true,
    deviceScaleFactor: 2,
  }
  const small = await visit(t, chromium, proxy, { ...phone, colorScheme: 'light', hash: `#/records/${id}` })
  await small.page.getByRole('button', { name: 'Resolve…' }).tap()
  await small.page.getByRole('radio', { name: /^It was not done/ }).check()
  await small.page.screenshot({ path: `${FOLDER}operators-phone.png` })
})
