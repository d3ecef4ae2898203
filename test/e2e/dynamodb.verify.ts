import t from 'tap'
import { command } from '../support/commands.ts'
import { DynamoDbServer } from '../support/dynamodb.ts'
import { newKey, send } from '../support/e2e.ts'
import { essenceOf, heldUpstream, replicas } from '../support/replicas.ts'

t.setTimeout(120_000)

const server = await DynamoDbServer.start()
t.teardown(() => server[Symbol.asyncDispose]())
const yaml = (upstream: string) => `
service: pay
upstream: { url: "${upstream}" }
store: { url: "${server.url}", timeout: 10s }
routes: [{ name: pay, match: { path: "/*" }, key: required, inFlight: { mode: wait, wait: 30s } }]
`

void t.test(
  'two replicas race for one key on DynamoDB: one execution, one response; throttling gives 503',
  async (t) => {
    const body = 'a long answer, '.repeat(40_000)
    const upstream = await heldUpstream(t, (n) => ({ body: `${n} ${body}` }))
    const proxies = await replicas(t, 2, yaml(upstream.url))
    const key = newKey()
    const asked = Array.from({ length: 10 }, (_, n) =>
      send(proxies[n % 2] as (typeof proxies)[0], key, { path: '/slow' }),
    )
    await upstream.arrived(1)
    upstream.finish(1)
    const replies = await Promise.all(asked)
    t.equal(new Set(replies.map((reply) => JSON.stringify(essenceOf(reply)))).size, 1)
    t.match(replies[0], { status: 201, body: `1 ${body}` })
    t.equal(upstream.seen.length, 1, 'executions at the upstream')

    server.fault = ({ operation }) =>
      operation === 'PutItem' ? { status: 400, error: 'ProvisionedThroughputExceededException' } : null
    t.match(await send(proxies[0] as (typeof proxies)[0], newKey(), { path: '/fast' }), { status: 503 })
    server.fault = () => null
    t.match(await send(proxies[0] as (typeof proxies)[0], newKey(), { path: '/fast' }), { status: 201 })
    t.equal(upstream.seen.length, 2)
  },
)

void t.test('doctor reports a table whose time to live is off', async (t) => {
  server.fault = ({ operation }) =>
    operation === 'DescribeTimeToLive'
      ? { answer: { TimeToLiveDescription: { TimeToLiveStatus: 'ENABLED', AttributeName: 'e' } } }
      : null
  const doctor = () => command(['doctor', '--store', server.url, '--service', 'pay'])
  // The exit code does not count: a slow round trip may be a finding.
  t.match((await doctor()).out, /fine +grade +strict, 3 of 3/)
  server.fault = () => null
  const { code, out } = await doctor()
  t.equal(code, 1)
  t.match(out, /FINDING +promises +Time to live is off for the attribute e/)
})
