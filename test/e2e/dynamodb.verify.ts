import t from 'tap'
import { command } from '../support/commands.ts'
import { DynamoDbServer } from '../support/dynamodb.ts'
import { newKey, send } from '../support/e2e.ts'
import type { TestProxy } from '../support/proxy.ts'
import { heldUpstream, replicas } from '../support/replicas.ts'

t.setTimeout(120_000)

const server = await DynamoDbServer.start()
t.teardown(() => server[Symbol.asyncDispose]())
const yaml = (upstream: string) => `
service: pay
upstream: { url: "${upstream}" }
store: { url: "${server.url}", timeout: 10s }
routes: [{ name: pay, match: { path: "/*" }, key: required }]
`

void t.test('a table that throttles claims gives 503, and is used once it does not', async (t) => {
  const upstream = await heldUpstream(t)
  const [proxy] = (await replicas(t, 1, yaml(upstream.url))) as [TestProxy]
  server.fault = ({ operation }) =>
    operation === 'PutItem' ? { status: 400, error: 'ProvisionedThroughputExceededException' } : null
  t.match(await send(proxy, newKey(), { path: '/fast' }), { status: 503 })
  server.fault = () => null
  t.match(await send(proxy, newKey(), { path: '/fast' }), { status: 201 })
  t.equal(upstream.seen.length, 1)
})

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
