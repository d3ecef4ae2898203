import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { command } from '../support/commands.ts'
import { tempDir } from '../support/e2e.ts'
import { orderApi } from '../support/probed.ts'
import { freePort } from '../support/redis.ts'
import { upstreamStub } from '../support/upstream.ts'

const BODY = ['--body', '{"amount":1,"currency":"eur"}']

t.test('bad input is a usage error in one sentence, and nothing is sent', async (t) => {
  await using api = await orderApi('ietf')
  const url = `${api.url}/orders`
  const file = join(tempDir(t), 'api.json')
  writeFileSync(file, JSON.stringify({ openapi: '3.1.0', paths: { '/a': { post: { operationId: 'a' } } } }))
  const cases: readonly (readonly [words: readonly string[], says: RegExp])[] = [
    [[], /probe needs the URL of the operation/],
    [[url, 'more'], /probe takes one URL, found 2 arguments/],
    [['127.0.0.1:1/x'], /URL: found "127.0.0.1:1\/x"; allowed: http:\/\/host:port\/path/],
    [['http://u:p@h/x'], /URL: found "http:\/\/\*\*\*@h\/x"/],
    [['https://api.example.com/x'], /api.example.com is not on this machine.*add --yes/],
    [
      [url, '--body', 'amount=1'],
      /--body: found no JSON in "amount=1"; allowed: JSON, or any text with --header/,
    ],
    [[url, ...BODY, '--other-body', '{'], /--other-body: found no JSON/],
    [[url, '--body', `@${file}.none`], /--body: found no such file at ".*none"/],
    [[url, '--header', 'no line'], /--header: found no header line; allowed: "Name: value"/],
    [[url, '--other-caller', ': x'], /--other-caller: found no header line/],
    [[url, '--other-path', 'x'], /--other-path: found "x"; allowed: a path that begins with one \//],
    [[url, '--other-path', '//h/x'], /--other-path: found "\/\/h\/x"; allowed: a path/],
    [[url, '--key-header', 'a b'], /--key-header: found "a b"; allowed: the name of a header/],
    [[url, '--method', 'post it'], /--method: found "post it"/],
    [[url, '--profile', 'rfc'], /--profile: found "rfc"; allowed: ietf, stripe, ours/],
    [[url, '--format', 'xml'], /--format: found "xml"; allowed: text, json, junit/],
    [[url, '--case', 'all'], /--case: found "all"; allowed: same-key, other-payload/],
    [[url, '--timeout', '0s'], /--timeout: found 0; allowed: more than 0/],
    [[url, '--timeout', 'soon'], /--timeout: found "soon"/],
    [[url, '--count-url', 'count'], /--count-url: found "count"/],
    [[url, '--count-json', 'total'], /--count-json: found "total"; allowed: a JSON pointer/],
    [[api.url, '--operation', 'a'], /found --openapi or --operation alone; allowed: both or none/],
    [
      [url, '--openapi', file, '--operation', 'a'],
      /URL: found ".*orders" with --openapi; allowed: an origin/,
    ],
    [[api.url, '--openapi', file, '--operation', 'b'], /--operation: found "b"; allowed: a\n/],
  ]
  for (const [words, says] of cases) {
    const { code, out, err } = await command(['probe', ...words])
    t.strictSame([code, out], [2, ''], words.join(' '))
    t.match(err, says)
    t.match(err, /^idempotency-proxy: [^\n]*\nTry --help\.\n$/)
  }
  t.equal(api.seen.length, 0)
})

t.test('an API about which nothing can be said is a finding in one sentence, without a report', async (t) => {
  const port = await freePort()
  const stops = async (url: string, says: RegExp, ...more: string[]): Promise<void> => {
    const { code, out, err } = await command(['probe', url, ...BODY, ...more])
    t.strictSame([code, out], [1, ''], String(says))
    t.match(err, says)
    t.match(err, /^idempotency-proxy: [^\n]*\n$/)
  }
  await stops(`http://127.0.0.1:${port}/x`, /:\d+\/x cannot be reached: connect ECONNREFUSED/)
  let count = 9
  let status = 201
  await using api = await upstreamStub((seen, response) => {
    if (seen.target === '/wild') return void response.end(seen.method === 'GET' ? `${count--}` : 'done')
    if (seen.target === '/still') return void response.end('7')
    if (seen.target === '/page') return void response.end('<html>')
    if (seen.target === '/text') return void response.end('{"total":"7"}')
    if (seen.target === '/hang') return
    response.writeHead(seen.method === 'GET' ? 404 : status, { Location: '/elsewhere' }).end('done')
  })
  const at = (path: string): string => `${api.url}${path}`
  await stops(at('/x'), /two requests with new keys got the same response.*give --count-url or --count-json/)
  await stops(at('/x'), /the counter went back from 9 to 8/, '--count-url', at('/wild'))
  await stops(
    at('/x'),
    /the counter rose by 0 for two requests with new keys; allowed: 2/,
    '--count-url',
    at('/still'),
  )
  await stops(
    at('/x'),
    /the counter at .*\/page has a string; allowed: a whole number/,
    '--count-url',
    at('/page'),
  )
  await stops(at('/x'), /the counter at .*\/y answers 404; allowed: 200/, '--count-url', at('/y'))
  await stops(
    at('/x'),
    /has a string at \/total; allowed: a whole number/,
    '--count-url',
    at('/text'),
    '--count-json',
    '/total',
  )
  await stops(at('/x'), /has nothing at \/n; allowed/, '--count-url', at('/text'), '--count-json', '/n')
  await stops(at('/hang'), /cannot be reached: no complete response within 0.05 s/, '--timeout', '50ms')
  status = 308
  await stops(at('/x'), /redirects to \/elsewhere: probe that URL/)
  status = 401
  await stops(at('/x'), /answers 401 to a request with a new key; allowed: 2xx, 301, 302 or 303/)
  await using orders = await orderApi('ietf')
  const url = `${orders.url}/orders`
  await stops(
    url,
    /answers 201 to --error-body; allowed: a payload that it refuses/,
    '--error-body',
    '{"amount":2}',
  )
  await stops(
    url,
    /answers 201 to --failure-body; allowed: a payload on which it/,
    '--failure-body',
    '{"amount":2}',
  )
})

t.test('an API that goes away ends the probe', async (t) => {
  let n = 0
  await using api = await upstreamStub((_, response) => {
    response.setHeader('Connection', 'close')
    response.end(JSON.stringify({ n: ++n }))
    if (n === 2) api.server.close()
  })
  const said = await command(['probe', `${api.url}/x`, ...BODY])
  t.strictSame([said.code, said.out], [1, ''])
  t.match(said.err, /no longer answers since the case same-key: connect ECONNREFUSED/)
})

t.test('a terminal shows which case runs, and then nothing of it', async (t) => {
  await using api = await orderApi('ietf')
  const words = ['probe', `${api.url}/orders`, ...BODY, '--case', 'same-key']
  t.equal((await command(words, undefined, {}, true)).err, '\rsame-key\x1b[K\r\x1b[K')
})

t.test('--count-json alone counts in what GET of the URL lists', async (t) => {
  await using api = await orderApi('ietf')
  const words = ['probe', `${api.url}/orders`, ...BODY, '--count-json', '/orders', '--case', 'same-key']
  const { code, out } = await command(words)
  t.equal(code, 0)
  t.match(out, /^CASE +VERDICT +STATUSES +EXECUTED +FOUND\nsame-key +passed +201×2 +1 +replayed\n/)
})

t.test('a table for people, JUnit for CI', async (t) => {
  await using api = await orderApi('ietf', 'ignores-payload')
  const words = ['probe', `${api.url}/orders?a=1&b=2`, ...BODY]
  const text = await command(words)
  t.equal(text.code, 1)
  t.match(text.out, /^CASE +VERDICT +STATUSES +FOUND\nsame-key +passed +201×2 +replayed\n/)
  t.match(text.out, /^other-payload +FAILED +201×2 +replayed; wanted 422$/m)
  t.match(text.out, /^other-caller +skipped +needs --other-caller$/m)
  t.match(
    text.out,
    /: 10 passed, 0 noted, 1 failed, 4 skipped; \d+ requests; executions are inferred from responses/,
  )
  const junit = await command([...words, '--format', 'junit'])
  t.equal(junit.code, 1)
  t.match(junit.out, /^<\?xml .*\n<testsuite name="[^"]*a=1&amp;b=2" tests="15" failures="1" skipped="4">\n/)
  t.match(
    junit.out,
    '<testcase classname="probe.ietf" name="other-payload: the same key, another payload"><failure message="replayed; wanted 422 (201×2)"/></testcase>',
  )
  t.match(junit.out, /name="other-caller: [^"]*"><skipped message="needs --other-caller"\/><\/testcase>/)
})

t.test('--dry-run shows the request without secrets, and sends nothing, wherever it would go', async (t) => {
  const words = ['probe', 'https://api.example.com/x', ...BODY, '--header', 'Authorization: Bearer secret']
  const { code, out, err } = await command([...words, '--dry-run', '--count-json', '/total'])
  t.strictSame([code, err], [0, ''])
  t.match(
    out,
    'POST https://api.example.com/x\nContent-Type: application/json\nAuthorization: ***\nIdempotency-Key: …\n\n{"amount":1,"currency":"eur"}\n\n',
  )
  t.match(out, /^other-caller +needs --other-caller$/m)
  t.match(out, /\nbefore and after each the counter: GET https:\/\/api.example.com\/x\n/)
  t.match(out, /\nat most \d+ requests to the API; nothing was sent\n$/)
})

t.test('the request is made of an OpenAPI operation', async (t) => {
  const dir = tempDir(t)
  const file = join(dir, 'api.yaml')
  writeFileSync(
    file,
    `openapi: 3.1.0
info: { title: Orders, version: "1" }
servers: [{ url: https://api.example.com/v1 }]
paths:
  /shops/{shop}/orders:
    parameters: [{ name: shop, in: path, required: true, schema: { type: string, examples: [a b] } }]
    post:
      operationId: order
      parameters:
        - { name: X-Idempotency-Key, in: header, schema: { type: string } }
        - { name: mode, in: query, required: true, schema: { enum: [test, live] } }
        - { name: unused, in: query, schema: { type: string } }
      requestBody: { content: { application/json: { schema: { $ref: "#/components/schemas/Order" } } } }
  /open/{id}:
    parameters: [{ name: id, in: path, required: true, schema: { type: string } }]
    post: { operationId: open }
  /form:
    post:
      requestBody: { content: { multipart/form-data: { schema: { properties: { a: { type: string } } } } } }
components:
  schemas:
    Order:
      allOf:
        - required: [amount, lines, when, code]
          properties:
            id: { type: string, readOnly: true }
            amount: { type: integer, exclusiveMinimum: 10 }
            lines: { type: array, items: { oneOf: [{ type: [string, "null"], format: uuid }] } }
            when: { type: string, format: date }
            code: { type: string, minLength: 7 }
            more: { type: string }
        - properties: { gift: { type: boolean }, self: { $ref: "#/components/schemas/Order" } }
`,
  )
  const { code, out } = await command([
    'probe',
    'http://127.0.0.1:3000',
    '--openapi',
    file,
    '--operation',
    'order',
    '--dry-run',
  ])
  t.equal(code, 0)
  t.match(
    out,
    /^POST http:\/\/127\.0\.0\.1:3000\/v1\/shops\/a%20b\/orders\?mode=test\nContent-Type: application\/json\nX-Idempotency-Key: …\n/,
  )
  t.match(
    out,
    '{"amount":11,"lines":["{uuid}"],"when":"2026-01-01","code":"probexx","gift":true,"self":{"amount"',
  )
  t.match(
    await command(['probe', 'http://127.0.0.1:3000', '--openapi', file, '--operation', 'POST /open/{id}']),
    { code: 2, err: /--operation POST \/open\/\{id\}: no example for id in its path.*give the whole URL/ },
  )
  t.match(await command(['probe', 'http://127.0.0.1:3000', '--openapi', file, '--operation', 'POST /form']), {
    code: 2,
    err: /--operation: no JSON example can be made of its multipart\/form-data; give --body/,
  })
  const words = ['probe', 'http://127.0.0.1:3000', '--openapi', `${file}.none`, '--operation', 'order']
  t.match(await command(words), { code: 1, out: '', err: /api.yaml.none: found no such file/ })
})

t.test('{uuid} in the payload is another one for each key, and the same for its retries', async (t) => {
  const bodies = new Map<string, Set<string>>()
  await using api = await upstreamStub((seen, response) => {
    const key = seen.headers[seen.headers.indexOf('Idempotency-Key') + 1] as string
    const body = seen.body.toString()
    bodies.set(key, (bodies.get(key) ?? new Set()).add(body))
    response.end(body)
  })
  const words = ['probe', `${api.url}/x`, '--body', '{"order":"{uuid}"}', '--case', 'same-key']
  t.match(await command(words), { code: 0, out: /1 noted|1 passed/ })
  t.equal(bodies.size, 3)
  for (const [, of] of bodies) t.equal(of.size, 1)
  t.equal(new Set([...bodies.values()].flatMap((of) => [...of])).size, 3)
})
