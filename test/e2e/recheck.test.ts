import t from 'tap'
import { Value } from 'typebox/value'
import { type Report, reportSchema } from '../../src/admin/report.ts'
import { adminYaml, ask } from '../support/admin.ts'
import { bank, bankRoute } from '../support/bank.ts'
import { command } from '../support/commands.ts'
import { newKey, redisSnapshot, send, until } from '../support/e2e.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'

t.setTimeout(200_000)

const redis = await RedisServer.start()
t.teardown(() => redis[Symbol.asyncDispose]())

void t.test('O05 the report checks a sample against the upstream, and changes nothing', async (t) => {
  const upstream = await bank(t)
  const { promise: completed, resolve: completes } = Promise.withResolvers<void>()
  upstream.canaryWaits = completed
  const admin = adminYaml(t)
  await using proxy = await proxyInProcess(`${admin}\n${bankRoute(upstream.url, redis.url)}`)
  const keys = { paid: newKey(), gone: newKey(), declined: newKey(), other: newKey(), later: newKey() }
  upstream.fault = (key, response) => {
    const body = key === keys.other ? '{"id":"p-before"}' : `{"id":"p-${key}","state":"paid"}`
    response.writeHead(201, { 'Content-Type': 'application/json' }).end(body)
  }
  for (const key of Object.values(keys)) t.equal((await send(proxy, key)).status, 201)
  // After the canary, the proxy tests the status query by a request that was completed, if there is one.
  completes()
  await until(() => upstream.asked.length === 1)
  // Unknown records are the reconciler's to check.
  const idOf = async (key: string) => {
    const subject = { key, method: 'POST', path: '/pay', caller: { authorization: 'Bearer alice' } }
    return (await ask(proxy, '/v1/records/lookup', { method: 'POST', body: subject })).json['id'] as string
  }
  const ids = {
    gone: await idOf(keys.gone),
    declined: await idOf(keys.declined),
    other: await idOf(keys.other),
  }
  const fates: Record<string, string> = { [keys.gone]: 'unheard', [keys.declined]: 'declined' }
  upstream.fate = (key) => (key === keys.later ? 'pending' : (fates[key] ?? 'paid')) as 'paid'
  const before = await redisSnapshot(redis)

  const { json, status } = await ask(proxy, '/v1/report?sample=100')
  t.equal(status, 200)
  const report = json as unknown as Report
  t.strictSame([...Value.Errors(reportSchema, report)], [], 'it matches its schema')
  t.same(report.asked?.routes, [
    {
      route: 'pay',
      eligible: 5,
      sampled: 5,
      agreed: 1,
      differing: 1,
      disagreed: 2,
      undecided: 1,
      notAsked: 0,
    },
  ])
  t.same(
    new Map(report.asked?.found.map(({ id, verdict, why }) => [id, [verdict, why]])),
    new Map([
      [ids.gone, ['disagrees', 'the upstream does not know of it']],
      [ids.declined, ['disagrees', 'status 402 where 201 is stored']],
      [ids.other, ['differs', 'a different value from the stored one']],
    ]),
  )
  t.equal(report.asked?.found.at(-1)?.verdict, 'differs', 'the worst first')
  t.equal(upstream.asked.length, 1 + 6, 'once each, and once more where it was not found')
  t.same(
    upstream.queries.slice(1).map(({ headers }) => headers.includes('Bearer of-the-proxy')),
    Array.from({ length: 6 }, () => true),
  )
  t.same(await redisSnapshot(redis), before, 'nothing was changed')
  for (const key of Object.values(keys)) t.ok((await send(proxy, key)).replayed)

  await t.test('the command prints it in each format; a disagreement is a finding', async (t) => {
    const token = /tokenFile: "?([^",}\s]+)/.exec(admin)?.[1] as string
    const words = ['report', '--sample', '100', '--admin', proxy.adminUrl, '--token-file', token]
    const said = async (...more: string[]) => {
      const { code, out, err } = await command([...words, ...more])
      t.same([code, err], [1, ''])
      return out
    }
    t.match(JSON.parse(await said('--json')), { asked: { routes: [{ disagreed: 2 }] } })
    const text = await said()
    t.match(text, /checked against the upstream\nROUTE +ELIGIBLE .*\npay +5 +5 +1 +1 +2 +1 +0\n/)
    t.match(text, new RegExp(`\\nVERDICT +ROUTE +RECORD +WHY\\ndisagrees +pay +`))
    t.match(text, new RegExp(`\\ndiffers +pay +${ids.other} +a different value`))
    const csv = await said('--format', 'csv')
    t.match(csv, /\r\nasked,pay,disagreed,2\r\n/)
    t.match(csv, `\r\ndisagrees,pay,${ids.gone.replace(/^-/, "'-")},the upstream does not know of it\r\n`)
    t.match(
      await said('--format', 'markdown'),
      `| disagrees | pay | ${ids.gone} | the upstream does not know of it |\n`,
    )
    upstream.fate = () => 'paid'
    t.match(await command(words), { code: 0, out: /\npay +5 +5 +4 +1 +0 +0 +0\n/ })
    t.match(await command(['report', '--sample', '9', '--store', redis.url, '--service', 'test']), {
      code: 2,
      err: /found --sample without --admin URL: only a running proxy asks the upstream/,
    })
    t.match(await command(words.with(2, '0')), { code: 2, err: /--sample: a whole number, 1 to 1000/ })
  })

  await t.test('with the upstream down, the sample neither agrees nor disagrees', async (t) => {
    await upstream[Symbol.asyncDispose]()
    const gone = (await ask(proxy, '/v1/report?sample=2')).json as unknown as Report
    t.match(gone.asked, { routes: [{ eligible: 5, sampled: 2, agreed: 0, disagreed: 0 }], found: [] })
    t.same(await redisSnapshot(redis), before)
  })

  await t.test('the report checks nothing without sample, and refuses an invalid one', async (t) => {
    t.equal((await ask(proxy, '/v1/report')).json['asked'], null)
    for (const query of ['sample=0', 'sample=1001', 'sample=x', 'sample=', 'sample=1&sample=2', 'samples=1'])
      t.equal((await ask(proxy, `/v1/report?${query}`)).code, 'invalid_request', query)
  })
})
