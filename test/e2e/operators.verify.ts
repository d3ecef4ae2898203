import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import { type AdminReply, adminYaml, ask, fullOf, recordOf } from '../support/admin.ts'
import { configFile, newKey, send, tempDir, until } from '../support/e2e.ts'
import { proxyInProcess, proxyProcess, type TestProxy } from '../support/proxy.ts'
import { emptyRedis } from '../support/redis.ts'
import { emptyStore, heldUpstream } from '../support/replicas.ts'
import { SHARED } from '../support/shared.ts'

t.setTimeout(600_000)

const redis = await emptyRedis(t)

const COMPLETED = { outcome: 'completed', response: { status: 200, body: 'by hand' } } as const
const RETRYABLE = { outcome: 'retryable' } as const

/** Resolves a record that reads unknown, whatever its version. */
async function resolved(proxy: TestProxy, id: string, body: object): Promise<AdminReply> {
  for (;;) {
    const shown = await ask(proxy, `/v1/records/${id}`)
    const headers = { 'if-match': shown.headers.get('etag') as string }
    const reply = await ask(proxy, `/v1/records/${id}/resolve`, { method: 'POST', headers, body })
    // The sweeper has written `unknown` meanwhile.
    if (reply.code !== 'version_mismatch') return reply
  }
}

/** A request in flight at an owner that can be paused, and another replica, on one store. */
async function owned(t: Test, defaults = '{ lease: 1s }', ofOwner = '', store = redis.url) {
  const upstream = await heldUpstream(t)
  const yaml = (more: string): string =>
    [
      adminYaml(t),
      `upstream: { url: "${upstream.url}"${more} }`,
      `store: { url: "${store}" }`,
      `defaults: ${defaults}`,
    ].join('\n')
  const owner = await proxyProcess(configFile(tempDir(t), yaml(ofOwner)))
  t.teardown(() => owner[Symbol.asyncDispose]())
  const other = await proxyInProcess(yaml(''))
  t.teardown(() => other.drain())
  const key = newKey()
  const first = send(owner, key)
  await upstream.arrived(1)
  const [{ id = '' } = {}] = (await ask(other, '/v1/records')).json['records'] as { id?: string }[]
  /** Pauses the owner and waits until its record reads unknown. */
  const stopped = async (record = id): Promise<void> => {
    owner.kill('SIGSTOP')
    await until(async () => recordOf(await ask(other, `/v1/records/${record}`)).state === 'unknown')
  }
  return { upstream, owner, other, key, first, id, stopped }
}

for (const [kind, body] of [
  ...SHARED.map((kind) => [kind, COMPLETED] as const),
  ['redis', RETRYABLE] as const,
])
  void t.test(
    `O04 ${kind}: an owner paused past its lease resumes after its record was resolved as ${body.outcome}`,
    async (t) => {
      const url = await emptyStore(t, kind)
      const { upstream, owner, other, key, first, id, stopped } = await owned(t, '{ lease: 1s }', '', url)
      const shown = async () => fullOf(await ask(other, `/v1/records/${id}`))
      t.equal((await shown()).state, 'in_progress')
      t.equal((await resolved(other, id, body)).code, 'not_unknown', 'it is still running')
      await until(async () => (await shown()).history.some(({ event }) => event === 'claimed'))
      t.match((await shown()).history[0], {
        event: 'claimed',
        detail: { replica: new RegExp(`:${owner.child.pid}$`) },
      })

      await stopped()
      t.equal((await send(other, key)).code, 'idempotency_outcome_unknown')
      t.equal((await resolved(other, id, body)).status, 200)
      upstream.finish(1)
      owner.kill('SIGCONT')
      const answer = await first
      t.same(
        [answer.status, answer.body, answer.replayed],
        [201, 'execution 1', false],
        'its own client gets its response',
      )

      const retry = await send(other, key)
      t.ok(retry.replayed)
      t.equal(upstream.seen.length, 1)
      if (body.outcome === 'completed') {
        t.same([retry.status, retry.body], [200, 'by hand'], 'completed is final, for the owner too')
        t.equal(await owner.metric('idempotency_completions_total{route="default",result="stale"}'), 1)
      } else {
        t.same([retry.status, retry.body], [201, 'execution 1'], 'a late proof beats "not executed"')
        t.equal(await owner.metric('idempotency_completions_total{route="default",result="stored"}'), 1)
      }
      await until(async () => (await shown()).history.some(({ event }) => event === 'executed'))
      const { history } = await shown()
      t.ok(history.findIndex(({ event }) => event === 'resolved') > 0)
      t.ok(
        history.some(
          ({ detail }) => detail['result'] === (body.outcome === 'completed' ? 'stale' : 'stored'),
        ),
      )
    },
  )

void t.test('an owner paused before its first byte left does not send it after a decision', async (t) => {
  // One connection, which is busy: the second request is claimed, and waits for its turn.
  const { upstream, owner, other, first, stopped } = await owned(t, '{ lease: 1s }', ', connections: 1')
  const key = newKey()
  const asked = send(owner, key, { path: '/fast' })
  const claimed = async () =>
    (await ask(other, '/v1/records')).json['records'] as { id: string; path: string }[]
  await until(async () => (await claimed()).length === 2)
  const id = (await claimed()).find(({ path }) => path === '/fast')?.id ?? ''

  await stopped(id)
  t.equal((await resolved(other, id, RETRYABLE)).status, 200)
  t.equal((await send(other, key, { path: '/fast' })).body, 'execution 2')
  upstream.finish(1)
  owner.kill('SIGCONT')
  t.match(await asked, { status: 502, code: 'upstream_unreachable' }, 'it was never sent')
  t.equal((await first).body, 'execution 1')
  t.match(await send(owner, key, { path: '/fast' }), { body: 'execution 2', replayed: true })
  t.equal(upstream.seen.length, 2, 'nothing was executed twice')
})

void t.test(
  'a replica still working on a request refuses decisions about it, even after its lease lapsed',
  async (t) => {
    const { upstream, owner, other, key, first, id } = await owned(t)
    owner.kill('SIGSTOP')
    // The owner's next renewal revives the record: `still_running` until then, `not_unknown` from then on.
    const refused = /^(?:still_running|not_unknown)$/
    await other.logged(({ msg }) => msg === 'a lease expired: the outcome is unknown')
    owner.kill('SIGCONT')
    // The pause may have outlasted a command's timeout: then it answers 503 until the store has answered it again.
    await until(async () => (await ask(owner, `/v1/records/${id}`)).status === 200)
    for (const body of [COMPLETED, RETRYABLE]) {
      t.match(await resolved(owner, id, body), { status: 409, code: refused })
      const subject = { key, method: 'POST', path: '/pay', caller: { authorization: 'Bearer alice' } }
      const told = await ask(owner, '/v1/outcomes', { method: 'POST', body: { ...subject, ...body } })
      t.match(told, { status: 409, code: refused })
    }
    // A renewal or the sweeper may come in between.
    await until(async () => {
      const { headers } = await ask(owner, `/v1/records/${id}`)
      const at = { 'if-match': headers.get('etag') as string }
      const { status, code } = await ask(owner, `/v1/records/${id}`, { method: 'DELETE', headers: at })
      if (status === 412) return false
      t.strictSame([status, code], [409, 'still_running'])
      return true
    })
    upstream.finish(1)
    t.equal((await first).body, 'execution 1')
    t.match(await send(other, key), { replayed: true, body: 'execution 1' })
    t.equal((await resolved(owner, id, RETRYABLE)).code, 'not_unknown')
    t.equal(upstream.seen.length, 1)
  },
)

void t.test(
  'a replica that holds an outcome writes it once the store is back, before an operator can decide',
  async (t) => {
    const upstream = await heldUpstream(t)
    await using proxy = await proxyInProcess(
      [
        adminYaml(t),
        `upstream: { url: "${upstream.url}" }`,
        `store: { url: "${redis.url}" }`,
        'defaults: { lease: 1s }',
      ].join('\n'),
    )
    const key = newKey()
    const first = send(proxy, key)
    await upstream.arrived(1)
    await redis.kill()
    upstream.finish(1)
    t.equal((await first).body, 'execution 1')
    // By now the retries are rare, and the lease has lapsed.
    await wait(4000)
    await redis.start()
    const subject = { key, method: 'POST', path: '/pay', caller: { authorization: 'Bearer alice' } }
    const told: (string | null)[] = []
    await until(async () => {
      const reply = await ask(proxy, '/v1/outcomes', { method: 'POST', body: { ...subject, ...RETRYABLE } })
      told.push(reply.code ?? String(reply.status))
      return reply.code !== 'store_unavailable' && reply.code !== 'outcome_held'
    })
    t.equal(told.at(-1), 'not_unknown', [...new Set(told)].join(', '))
    t.match(await send(proxy, key), { replayed: true, body: 'execution 1' })
    t.equal(upstream.seen.length, 1)
  },
)

void t.test("a duplicate waiting on another replica gets an operator's decision, or unknown", async (t) => {
  const waits = '{ inFlight: { mode: wait, wait: 60s }, lease: 2s }'
  const { upstream, owner, other, key, first, id, stopped } = await owned(t, waits)
  const waiting = send(other, key)
  await until(async () => (await other.metric('idempotency_waiters')) === 1)
  await stopped()
  t.equal((await resolved(other, id, COMPLETED)).status, 200)
  const told = await waiting
  // If it looked between the lapse and the decision, it got unknown.
  t.ok(told.body === 'by hand' || told.code === 'idempotency_outcome_unknown', told.body)
  t.equal((await send(other, key)).body, 'by hand')
  owner.kill('SIGCONT')
  upstream.finish(1)
  t.equal((await first).status, 201)
})
