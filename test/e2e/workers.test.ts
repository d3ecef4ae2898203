import t from 'tap'
import { adminYaml, ask } from '../support/admin.ts'
import { newKey, send, until } from '../support/e2e.ts'
import { emptyServer, heldUpstream, waitersAre } from '../support/replicas.ts'
import { fleet, kill, NO_PROC, workersOf } from '../support/workers.ts'

t.setTimeout(120_000)

const EXECUTED = 'idempotency_requests_total{route="default",outcome="executed"}'

void t.test(
  'workers serve one port, wake each other’s waiters, are replaced, and end together',
  { skip: NO_PROC },
  async (t) => {
    const upstream = await heldUpstream(t)
    const redis = await emptyServer('redis')
    const proxy = await fleet(
      t,
      `workers: 2
upstream: { url: "${upstream.url}" }
store: { url: "${redis.url}" }
defaults: { lease: 1s, inFlight: { mode: wait, wait: 30s } }
${adminYaml(t)}`,
    )
    t.equal(await proxy.metric('idempotency_workers'), 2)

    const waited = newKey()
    const first = send(proxy, waited)
    await upstream.arrived(1)
    const duplicate = send(proxy, waited)
    await waitersAre([proxy], 1)
    upstream.finish(1)
    t.match(await first, { status: 201, body: 'execution 1', replayed: false })
    t.match(await duplicate, { status: 201, body: 'execution 1', replayed: true })
    const by = await Promise.all(
      ['executed', 'waited'].map((outcome) => proxy.logged((line) => line['outcome'] === outcome)),
    )
    t.strictSame(
      by.map(({ worker }) => Number(worker)).toSorted((a, b) => a - b),
      [1, 2],
      'by different workers',
    )
    t.equal(await proxy.metric(EXECUTED), 1, 'one admin listener sums up all')

    const keys = [newKey(), newKey()]
    const running = keys.map((key) => send(proxy, key).catch(() => null))
    await upstream.arrived(3)
    const [victim = 0] = workersOf(proxy)
    kill(victim, 'SIGKILL')
    await until(() => workersOf(proxy).length === 2 && !workersOf(proxy).includes(victim))
    upstream.finish(2)
    upstream.finish(3)
    const answers = await Promise.all(running)
    const lost = keys[answers.indexOf(null)] as string
    t.strictSame(
      answers.filter((answer) => answer !== null).map(({ status }) => status),
      [201],
      'the other answers',
    )
    await until(async () => (await send(proxy, lost)).code === 'idempotency_outcome_unknown')
    t.equal(upstream.seen.length, 3, 'nothing is executed again')
    await until(async () => (await proxy.metric('idempotency_workers')) === 2)
    t.equal(await proxy.metric('idempotency_workers_ended_total'), 1)
    t.equal(await proxy.metric(EXECUTED), 2, 'counts of the worker that was killed are kept')
    const records = await ask(proxy, '/v1/records?state=unknown')
    t.match(records.json, { records: [{ state: 'unknown' }] })

    const last = send(proxy, newKey())
    await upstream.arrived(4)
    proxy.kill('SIGTERM')
    await proxy.logged(({ msg, worker }) => msg === 'draining' && worker === undefined)
    upstream.finish(4)
    t.match(await last, { status: 201, body: 'execution 4' })
    t.equal(await proxy.exited, 0)
  },
)
