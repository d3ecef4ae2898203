import t from 'tap'
import { proxyBefore, values } from '../support/exchange.ts'
import { post, rawRequest } from '../support/raw.ts'
import { type Respond, upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

interface Refused {
  readonly status: number
  readonly retry?: string
  readonly problem?: object
  readonly lines?: Readonly<Record<string, string>>
}

/** Answers like a proxy that refuses, and like the upstream a request that has X-Later. */
const refusing =
  ({ status, retry = 'same-key', problem = {}, lines = {} }: Refused): Respond =>
  (seen, response) => {
    if (seen.headers.includes('X-Later')) return void response.writeHead(201).end('done')
    response
      .writeHead(status, { 'Content-Type': 'application/problem+json', 'Idempotency-Retry': retry, ...lines })
      .end(JSON.stringify(problem))
  }

const keyed = { code: 'upstream_failed', instance: 'r' }

void t.test('V04 same-key from the inner proxy frees the key, and nothing is kept', async (t) => {
  for (const profile of ['standard', 'lenient', 'stripe'])
    for (const refused of [
      { status: 409, problem: { code: 'idempotency_key_in_progress', instance: 'r' } },
      { status: 409, problem: { code: 'idempotency_outcome_unknown', instance: 'r' } },
      { status: 202, problem: { code: 'idempotency_key_in_progress', instance: 'r' } },
      { status: 423 },
      { status: 425 },
      { status: 429 },
      { status: 408 },
      { status: 503 },
      { status: 502, problem: { code: 'upstream_unreachable' } },
      { status: 502, problem: keyed },
      { status: 504, problem: { code: 'upstream_slow', instance: 'r' } },
    ]) {
      await using inner = await upstreamStub(refusing(refused))
      await using proxy = await proxyBefore(inner, {
        routes: `{ name: r, match: { path: /p }, profile: ${profile} }`,
      })
      const what = `${profile} ${JSON.stringify(refused)}`
      for (let i = 1; i <= 2; i++) {
        const answer = await rawRequest(proxy.port, post('/p', 'k', '{}'))
        t.equal(answer.status, refused.status, what)
        t.same(
          values(answer, 'idempotency-retry'),
          ['same-key'],
          'the client gets the advice of the inner proxy',
        )
        t.equal(inner.seen.length, i, 'the inner proxy decides')
      }
      const other = await rawRequest(proxy.port, post('/p', 'k', '{"other":1}', ['X-Later: 1']))
      t.equal(other.status, profile === 'stripe' ? 400 : 422, 'the key still belongs to its request')
      t.equal((await rawRequest(proxy.port, post('/p', 'k', '{}', ['X-Later: 1']))).status, 201)
      const replay = await rawRequest(proxy.port, post('/p', 'k', '{}'))
      t.same([replay.status, ...values(replay, 'idempotent-replayed')], [201, 'true'])
      t.equal(inner.seen.length, 3)
      t.equal(await proxy.metric('idempotency_completions_total{route="r",result="released"}'), 2)
    }
})

void t.test('V04 a refusal that is streamed, or too large to keep, is not kept either', async (t) => {
  for (const [limits, lines] of [
    ['limits: { response: 10B }', {}],
    ['', { 'Content-Type': 'text/event-stream' }],
  ] as const) {
    const problem = { code: 'idempotency_key_in_progress', instance: 'r' }
    await using inner = await upstreamStub(refusing({ status: 409, problem, lines }))
    await using proxy = await proxyBefore(inner, { more: limits })
    t.equal((await rawRequest(proxy.port, post('/p', 'k', '{}'))).status, 409)
    const released = 'idempotency_completions_total{route="r",result="released"}'
    while ((await proxy.metric(released)) === 0);
    t.equal((await rawRequest(proxy.port, post('/p', 'k', '{}', ['X-Later: 1']))).status, 201)
    t.equal(inner.seen.length, 2)
  }
})

void t.test('V04 a retry that the inner proxy may not recognise is not sent to it', async (t) => {
  for (const [key, refused] of [
    ['{ forward: none }', { status: 504, problem: keyed }],
    ['{ forward: none }', { status: 502 }],
    ['{ derive: { json: [/a] } }', { status: 502, problem: keyed }],
    ['{}', { status: 502, problem: { code: 'upstream_failed' } }],
    ['{}', { status: 502 }],
    ['{}', { status: 502, problem: keyed, lines: { 'Content-Encoding': 'gzip' } }],
    ['{}', { status: 504, problem: keyed, lines: { 'Idempotency-Key-Derived': 'true' } }],
  ] as const)
    for (const profile of ['standard', 'stripe']) {
      await using inner = await upstreamStub(refusing(refused))
      await using proxy = await proxyBefore(inner, {
        routes: `{ name: r, match: { path: /p }, profile: ${profile}, key: ${key} }`,
      })
      const send = () => rawRequest(proxy.port, post('/p', key.includes('derive') ? null : 'k', '{"a":1}'))
      t.equal((await send()).status, refused.status)
      const retry = await send()
      t.match(JSON.parse(retry.body.toString()), { code: 'idempotency_outcome_unknown' }, `${profile} ${key}`)
      t.equal(inner.seen.length, 1)
    }
})

void t.test('V04 an answer with new-key or no is stored like any other', async (t) => {
  for (const [status, retry] of [
    [422, 'new-key'],
    [409, 'no'],
    [404, 'no'],
  ] as const) {
    await using inner = await upstreamStub(refusing({ status, retry }))
    await using proxy = await proxyBefore(inner)
    const live = await rawRequest(proxy.port, post('/p', 'k', '{}'))
    const replay = await rawRequest(proxy.port, post('/p', 'k', '{}'))
    t.same(values(replay, 'idempotent-replayed'), ['true'])
    t.same(values(replay, 'idempotency-retry'), [retry])
    t.equal(replay.body.toString(), live.body.toString())
    t.equal(inner.seen.length, 1)
  }
})

t.test('V04 a success with the header, or a reported outcome, is believed as usual', async (t) => {
  for (const refused of [
    { status: 200 },
    { status: 202, problem: { code: 'accepted' } },
    { status: 503, lines: { 'Idempotency-Outcome': 'applied' } },
  ]) {
    await using inner = await upstreamStub(refusing(refused))
    await using proxy = await proxyBefore(inner)
    for (let i = 0; i < 2; i++)
      t.equal((await rawRequest(proxy.port, post('/p', 'k', '{}'))).status, refused.status)
    t.equal(inner.seen.length, 1, 'N=1')
  }
})
