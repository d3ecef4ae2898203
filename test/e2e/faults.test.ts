import t, { type Test } from 'tap'
import { adminYaml, ask, fullOf, recordOf } from '../support/admin.ts'
import { type Bank, bank, bankRoute } from '../support/bank.ts'
import { newKey, type Reply, send, until } from '../support/e2e.ts'
import type { TestProxy } from '../support/proxy.ts'
import { emptyStore, KINDS, replicas } from '../support/replicas.ts'

t.setTimeout(120_000)

type Fault = Bank['fault']
const HEAD = { 'Content-Type': 'text/plain' }

/** Every row of contract §7 with an uncertain outcome, and what its client sees: a code, or a cut. */
const UNCERTAIN: Readonly<Record<string, readonly [code: string | number, Fault]>> = {
  reset: ['upstream_failed', (_, response) => void response.socket?.resetAndDestroy()],
  closed: ['upstream_failed', (_, response) => void response.socket?.end()],
  malformed: ['upstream_failed', (_, response) => void response.socket?.end('HTTP/1.1 twohundred\r\n\r\n')],
  'cut body': [
    'upstream_failed',
    (_, response) => void response.socket?.end('HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf'),
  ],
  'no answer in time': ['upstream_timeout', () => {}],
  'status 502': [502, (_, response) => void response.writeHead(502, HEAD).end('bad gateway')],
  'status 503': [503, (_, response) => void response.writeHead(503, HEAD).end('who knows')],
  'cut stream': [
    'cut',
    (_, response) => {
      response.writeHead(200, { 'Content-Type': 'text/event-stream' }).write('data: 1\n\n')
      setTimeout(() => response.socket?.resetAndDestroy(), 50)
    },
  ],
  'cut when it was too large to keep': [
    'cut',
    (_, response) => {
      response.writeHead(200, { ...HEAD, 'Content-Length': '90000' }).write('x'.repeat(60_000))
      setTimeout(() => response.socket?.resetAndDestroy(), 50)
    },
  ],
}

/** A proxy in front of the bank. `asks`: `reconcile` decides; otherwise only an operator does. */
async function world(t: Test, store: string, asks: boolean): Promise<{ upstream: Bank; proxy: TestProxy }> {
  const upstream = await bank(t)
  const route = bankRoute(upstream.url, store).replace('timeout: 5s', 'timeout: 2s')
  const yaml = asks ? route : `${route.slice(0, route.indexOf('    reconcile:'))}\n`
  const [proxy] = await replicas(t, 1, `${adminYaml(t)}\nlimits: { response: 16KiB }\n${yaml}`)
  if (proxy === undefined) throw new Error('no proxy')
  // Loads the admin API before the clock of the first request runs.
  await ask(proxy, '/v1/records')
  return { upstream, proxy }
}

/** What the first client sees: `cut` where its connection is aborted. */
async function first(proxy: TestProxy, key: string): Promise<Reply | 'cut'> {
  return send(proxy, key).catch(() => 'cut' as const)
}

async function shown(proxy: TestProxy, key: string) {
  const body = { key, route: 'pay', method: 'POST', caller: { authorization: 'Bearer alice' } }
  return fullOf(await ask(proxy, '/v1/records/lookup', { method: 'POST', body }))
}

/** The events in the record's history, once all of these are there. */
async function path(proxy: TestProxy, key: string, ...events: string[]): Promise<string[]> {
  let seen: string[] = []
  await until(async () => {
    seen = (await shown(proxy, key)).history.map(({ event }) => event)
    return events.every((event) => seen.includes(event))
  })
  return seen
}

for (const kind of KINDS)
  void t.test(`${kind}: the reconciler settles each uncertain outcome of §7`, async (t) => {
    const { upstream, proxy } = await world(t, await emptyStore(t, kind), true)
    await Promise.all(
      Object.entries(UNCERTAIN).map(async ([name, [code, fault]]) => {
        const key = newKey()
        const other = upstream.fault
        upstream.fault = (one, ...rest) => (one === key ? fault(one, ...rest) : other(one, ...rest))
        const seen = await first(proxy, key)
        t.equal(seen === 'cut' ? 'cut' : (seen.code ?? seen.status), code, `${name}: its own client`)
        await until(async () => (await shown(proxy, key)).state === 'completed')
        const retry = await send(proxy, key)
        t.match(
          retry,
          { status: 201, replayed: true, body: `{"id":"p-${key}","state":"paid"}` },
          `${name}: the later retry`,
        )
        const events = await path(proxy, key, 'reconciled', 'replayed')
        t.ok(events.indexOf('reconciled') < events.indexOf('replayed'), `${name}: ${events.join(', ')}`)
        t.equal(upstream.executed.filter((one) => one === key).length, 1, `${name}: N=1`)
      }),
    )
  })

for (const kind of KINDS)
  void t.test(`${kind}: each uncertain outcome of §7 stays unknown until an operator decides`, async (t) => {
    const { upstream, proxy } = await world(t, await emptyStore(t, kind), false)
    await Promise.all(
      Object.entries(UNCERTAIN).flatMap(([name, [code, fault]]) =>
        (['completed', 'retryable'] as const).map(async (outcome) => {
          const key = newKey()
          const says = `${name}, ${outcome}`
          const other = upstream.fault
          let attempt = 0
          upstream.fault = (one, response, request) => {
            if (one !== key) return other(one, response, request)
            return ++attempt === 1
              ? fault(one, response, request)
              : void response.writeHead(201, HEAD).end('second')
          }
          const seen = await first(proxy, key)
          t.equal(seen === 'cut' ? 'cut' : (seen.code ?? seen.status), code, says)
          await until(async () => (await shown(proxy, key)).state === 'unknown')
          const record = await shown(proxy, key)
          t.match(record, { attempts: 1, response: null, lastError: /./ }, says)
          for (let n = 0; n < 3; n++)
            t.match(await send(proxy, key), { status: 409, code: 'idempotency_outcome_unknown' }, says)
          t.equal(attempt, 1, `${says}: no retry executes`)
          const response = outcome === 'completed' ? { response: { status: 201, body: 'by hand' } } : {}
          // The sweeper may raise the version meanwhile.
          let resolved = await ask(proxy, '/v1/records')
          await until(async () => {
            const headers = { 'if-match': `"${(await shown(proxy, key)).version}"` }
            const body = { outcome, reason: 'seen at the bank', ...response }
            resolved = await ask(proxy, `/v1/records/${record.id}/resolve`, {
              method: 'POST',
              headers,
              body,
            })
            return resolved.code !== 'version_mismatch'
          })
          t.match(
            recordOf(resolved),
            { state: outcome === 'completed' ? 'completed' : 'failed_retryable' },
            says,
          )
          const later = [await send(proxy, key), await send(proxy, key)]
          t.match(
            later,
            outcome === 'completed'
              ? [
                  { status: 201, replayed: true, body: 'by hand' },
                  { replayed: true, body: 'by hand' },
                ]
              : [
                  { status: 201, replayed: false, body: 'second' },
                  { replayed: true, body: 'second' },
                ],
            `${says}: the later retries`,
          )
          const events = await path(proxy, key, 'unknown', 'resolved', 'replayed')
          t.ok(events.indexOf('unknown') < events.indexOf('resolved'), `${says}: ${events.join(', ')}`)
          t.ok(events.indexOf('resolved') < events.lastIndexOf('replayed'), `${says}: ${events.join(', ')}`)
          t.equal(
            attempt,
            outcome === 'completed' ? 1 : 2,
            `${says}: one execution, or a second that an operator allowed`,
          )
        }),
      ),
    )
  })

void t.test('an outcome that §7 calls certain settles without a reconciler or an operator', async (t) => {
  const { upstream, proxy } = await world(t, 'memory:', false)
  const words: Readonly<Record<string, readonly [Fault, state: string, executions: number]>> = {
    'not applied': [
      (_, response) => void response.writeHead(502, { 'Idempotency-Outcome': 'not-applied' }).end(),
      'failed_retryable',
      2,
    ],
    applied: [
      (_, response) => void response.writeHead(502, { 'Idempotency-Outcome': 'applied' }).end(),
      'completed',
      1,
    ],
    'too large to keep': [
      (_, response) => void response.writeHead(200, HEAD).end('x'.repeat(60_000)),
      'completed',
      1,
    ],
  }
  for (const [name, [fault, state, executions]] of Object.entries(words)) {
    const key = newKey()
    upstream.fault = fault
    await send(proxy, key)
    await until(async () => (await shown(proxy, key)).state === state)
    upstream.fault = (_, response) => void response.writeHead(201, HEAD).end('second')
    const retry = await send(proxy, key)
    t.equal(upstream.executed.filter((one) => one === key).length, executions, `${name}: ${retry.status}`)
    if (name === 'too large to keep') t.equal(retry.code, 'idempotency_response_unavailable')
  }
  const key = newKey()
  await upstream[Symbol.asyncDispose]()
  t.equal((await send(proxy, key)).code, 'upstream_unreachable')
  t.equal((await shown(proxy, key)).state, 'failed_retryable')
})
