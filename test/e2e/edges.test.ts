import { readFileSync } from 'node:fs'
import { brotliCompressSync, deflateRawSync, deflateSync, gzipSync, zstdCompressSync } from 'node:zlib'
import t, { type Test } from 'tap'
import { errorsOf, load, UPSTREAM } from '../config/support.ts'
import { newKey, type Reply, send } from '../support/e2e.ts'
import { metricIs, values } from '../support/exchange.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { post, type RawAnswer, rawRequest } from '../support/raw.ts'
import { type Respond, type UpstreamStub, upstreamStub } from '../support/upstream.ts'

interface World {
  readonly proxy: TestProxy
  readonly upstream: UpstreamStub
  readonly executed: () => number
}

/** A proxy on a memory store before an upstream that answers as the test says; by default 201 with the number of the execution. */
async function before(t: Test, yaml: string, respond?: Respond): Promise<World> {
  const executed = (): number => upstream.seen.length
  const numbered: Respond = (_, response) => void response.writeHead(201).end(`execution ${executed()}`)
  const upstream = await upstreamStub(respond ?? numbered)
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const head = `upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\n`
  const proxy = await proxyInProcess(head + yaml)
  t.teardown(() => proxy.drain())
  return { proxy, upstream, executed }
}

async function ask(
  proxy: TestProxy,
  key: string | null,
  headers: Readonly<Record<string, string>> = {},
  body: string | Buffer<ArrayBuffer> = '{"amount":1,"to":"bob"}',
  path = '/v1/payments',
): Promise<Reply & { readonly retry?: string; readonly detail: string }> {
  const reply = await send(proxy, key, { headers, body, path })
  const { retry, detail = '' } = reply.code === null ? {} : JSON.parse(reply.body)
  return { ...reply, retry, detail }
}

t.test('Y02 a caller that is made anew for each request is refused, whatever else it proves', async (t) => {
  const { proxy, executed } = await before(t, '')
  const anew = [
    'AWS4-HMAC-SHA256 Credential=AKID/20261127/eu/execute-api/aws4_request, Signature=ab',
    'AWS4-ECDSA-P256-SHA256 Credential=AKID, Signature=ab',
    'OAuth realm="x", oauth_consumer_key="k", oauth_nonce="1", oauth_signature="s"',
    'oauth oauth_consumer_key=k,oauth_nonce=1',
    'Digest username="a", nonce="n", response="r"',
    'Hawk id="a", ts="1", nonce="n", mac="m"',
    'Negotiate YIIab',
    'NTLM TlRMTVNTUAAB',
    'Signature keyId="a",signature="s"',
    'HMAC-SHA256 SignedHeaders=host&Signature=ab',
    'HMAC id:ab',
    'AWS AKID:ab',
    'GOOG4-RSA-SHA256 Credential=a, Signature=ab',
    'TC3-HMAC-SHA256 Credential=a, Signature=ab',
    'EG1-HMAC-SHA256 client_token=a;nonce=n;signature=s',
    'SharedKey account:ab',
    'SharedKeyLite account:ab',
    'OSS LTAI:ab=',
    'Qiniu ak:ab=',
    'QBox ak:ab=',
    'UPYUN operator:ab=',
    'MAC id="a", nonce="n", mac="m"',
    'HOBA result="a"',
    'SCRAM-SHA-256 data=ab',
    'PrivateToken token="ab"',
  ]
  for (const authorization of anew) {
    const refused = await ask(proxy, newKey(), { authorization })
    t.match(refused, { status: 400, code: 'idempotency_caller_missing', retry: 'no' }, authorization)
    t.match(refused.detail, new RegExp(`the scheme ${authorization.split(' ')[0]} .*scope\\.caller`))
    t.equal((await ask(proxy, null, { authorization })).status, 201, 'without a key it passes')
  }
  t.equal(executed(), anew.length, 'N=0 for each with a key')
  const schemes = ['Bearer', 'DPoP', 'Token', 'Digestive', 'Macaroon', 'GNAP'].map((scheme) => `${scheme} x`)
  for (const authorization of [
    ...schemes,
    'Basic eDp5',
    'OAuth ya29.x==',
    'vapid t=x, k=y',
    'ApiKey sha-256',
  ]) {
    const key = newKey()
    t.equal((await ask(proxy, key, { authorization })).status, 201, authorization)
    t.equal((await ask(proxy, key, { authorization })).replayed, true)
  }
  const chosen = await before(t, 'defaults: { scope: { caller: "header:x-user" } }')
  const signed = { authorization: anew[0] as string, 'x-user': 'a' }
  t.equal((await ask(chosen.proxy, 'k', signed)).status, 201, 'another caller is configured')
})

t.test('Y04 Y06 another account, tenant or part under one key is refused by its name', async (t) => {
  const { proxy, executed } = await before(t, '')
  const subjects = 'tenant organization org account workspace project company merchant customer user'
  const vendors =
    'stripe-account stripe-context paypal-auth-assertion x-goog-user-project openai-organization'
  for (const name of [
    ...`${vendors} openai-project`.split(' '),
    ...subjects.split(' ').flatMap((subject) => [`x-${subject}`, `x-${subject}-id`]),
  ]) {
    const key = newKey()
    const first = executed()
    t.equal((await ask(proxy, key, { [name]: 'A' })).status, 201, name)
    t.equal((await ask(proxy, key, { [name]: 'A' }, '{"to":"bob", "amount":1}')).replayed, true)
    for (const other of [{ [name]: 'B' }, {}]) {
      const refused = await ask(proxy, key, other)
      t.match(refused, { status: 422, code: 'idempotency_key_reused', retry: 'new-key' })
      t.match(refused.detail, `its ${name} differs`)
    }
    t.equal(executed(), first + 1, 'N=1')
  }
  const key = newKey()
  await ask(proxy, key, {}, undefined, '/p?a=1')
  const differing: [string, Record<string, string>, string | undefined, string][] = [
    ['body', {}, '{"amount":2}', '/p?a=1'],
    ['query', {}, undefined, '/p?a=2'],
    ['query', {}, undefined, '/p'],
    ['media type', { 'content-type': 'text/plain' }, undefined, '/p?a=1'],
    ['query and x-tenant-id', { 'x-tenant-id': '7' }, undefined, '/p'],
  ]
  for (const [name, headers, body, path] of differing)
    t.match((await ask(proxy, key, headers, body, path)).detail, new RegExp(`its ${name} differs?$`), name)
  const off = await before(t, 'defaults: { fingerprint: { headers: none } }')
  await ask(off.proxy, 'k', { 'stripe-account': 'A' })
  const again = await ask(off.proxy, 'k', { 'stripe-account': 'B' })
  t.equal(again.replayed, true, 'headers: none takes them out')
  const more = await before(t, 'defaults: { fingerprint: { headers: [x-shop] } }')
  await ask(more.proxy, 'k', { 'x-shop': 'A', 'x-user': 'A' })
  t.match((await ask(more.proxy, 'k', { 'x-shop': 'B', 'x-user': 'A' })).detail, 'its x-shop differs')
  t.match((await ask(more.proxy, 'k', { 'x-shop': 'A', 'x-user': 'B' })).detail, 'its x-user differs')
})

t.test('Y05 the same JSON in another coding, order or length is the same request', async (t) => {
  const { proxy, executed } = await before(t, 'limits: { request: 256KiB }')
  const one = Buffer.from('{"amount":1,"to":"bob"}')
  const other = Buffer.from('{"to": "bob", "amount": 1.0}')
  const codings: [string, (bytes: Buffer) => Buffer<ArrayBuffer>][] = [
    ['gzip', gzipSync],
    ['x-gzip', gzipSync],
    ['GZIP', gzipSync],
    ['deflate', deflateSync],
    ['deflate', deflateRawSync],
    ['br', brotliCompressSync],
    ['zstd', zstdCompressSync],
    ['deflate, gzip', (bytes) => gzipSync(deflateSync(bytes))],
  ]
  for (const [coding, encode] of codings) {
    const key = newKey()
    t.equal((await ask(proxy, key, { 'content-encoding': coding }, encode(one))).status, 201, coding)
    t.equal((await ask(proxy, key, { 'content-encoding': coding }, encode(other))).replayed, true)
    t.equal((await ask(proxy, key, {}, one)).replayed, true, 'and without the coding')
  }
  const long = 'x'.repeat(200_000)
  await ask(proxy, 'long', {}, JSON.stringify({ long, n: 1 }))
  t.equal((await ask(proxy, 'long', {}, `{"n":1, "long":"${long}"}`)).replayed, true, 'beyond 64 KiB')
  t.equal(executed(), codings.length + 1)
  const longer = 'x'.repeat(300_000)
  for (const [coding, first, second] of [
    ['gzip', gzipSync(JSON.stringify({ long: longer, n: 1 })), gzipSync(`{"n":1,"long":"${longer}"}`)],
    ['unheard-of', one, other],
    ['gzip', one, other],
    ['gzip, gzip, gzip, gzip', one, other],
  ] as const) {
    const key = newKey()
    await ask(proxy, key, { 'content-encoding': coding }, first)
    t.equal((await ask(proxy, key, { 'content-encoding': coding }, first)).replayed, true, 'the same bytes')
    for (const headers of [{ 'content-encoding': coding }, {}] as const) {
      const refused = await ask(proxy, key, headers, second)
      t.match(refused, { status: 422, retry: 'no' }, `${coding}, then ${JSON.stringify(headers)}`)
      t.match(refused.detail, 'bodies could only be compared as bytes')
    }
  }
})

t.test('Y05 key sources in the body read decoded bodies, and skip a byte order mark', async (t) => {
  const yaml = `routes:
  - { name: hook, match: { path: /hook }, key: { from: ["json:/id"], presence: required } }
  - { name: form, match: { path: /form }, key: { from: ["form:id"], presence: required } }
  - { name: maybe, match: { path: /maybe }, key: { from: ["json:/id"] } }`
  const { proxy, executed } = await before(t, yaml)
  const part = '--b\r\nContent-Disposition: form-data; name="id"\r\n\r\ne5\r\n--b--\r\n'
  const bodies: [path: string, type: string, body: string][] = [
    ['/hook', 'application/json', '{"id":"e1"}'],
    ['/hook', 'application/json', '\ufeff{"id":"e2"}'],
    ['/form', 'application/x-www-form-urlencoded', 'id=e3&a=1'],
    ['/form', 'application/x-www-form-urlencoded', '\ufeffid=e4&a=1'],
    ['/form', 'multipart/form-data; boundary=b', `\ufeff${part}`],
  ]
  for (const [path, type, body] of bodies) {
    const headers = { 'content-type': type }
    t.equal((await ask(proxy, null, headers, body, path)).status, 201, body)
    const encoded = { ...headers, 'content-encoding': 'gzip' }
    t.equal((await ask(proxy, null, encoded, gzipSync(body), path)).replayed, true)
  }
  t.equal(executed(), bodies.length)
  for (const [coding, body] of [
    ['compress', '{"id":"e6"}'],
    ['gzip', gzipSync(JSON.stringify({ id: 'e6', long: 'x'.repeat(2 ** 20) }))],
  ] as const)
    t.match(
      await ask(proxy, null, { 'content-encoding': coding }, body, '/maybe'),
      { status: 400, code: 'idempotency_key_invalid', detail: /the content coding of the body/ },
      'a body that cannot be read never passes for one without a key',
    )
  t.equal(executed(), bodies.length)
})

t.test('Y05 Y06 bodies of which only the bytes can be compared never get new-key', async (t) => {
  const { proxy, executed } = await before(t, '')
  const pairs: [type: string, first: string, second: string][] = [
    ['application/xml', '<pay amount="1"  to="bob"/>', '<pay to="bob" amount="1"/>'],
    ['text/csv', 'a,b\r\n', 'a,b\n'],
    ['application/json', '{"a":1,"a":2}', '{"a":1, "a":2}'],
  ]
  for (const [type, first, second] of pairs) {
    const key = newKey()
    await ask(proxy, key, { 'content-type': type }, first)
    const refused = await ask(proxy, key, { 'content-type': type }, second)
    const detail = /body differs; bodies could only be compared as bytes/
    t.match(refused, { status: 422, retry: 'no', detail })
    const elsewhere = await ask(proxy, key, { 'content-type': type }, first, '/v1/payments?b=1')
    t.match(elsewhere, { status: 422, retry: 'new-key', detail: /its query differs$/ })
  }
  t.equal(executed(), pairs.length)
})

t.test('Y07 paths fold where asked, and a near miss is counted where not', async (t) => {
  const yaml = `routes:
  - { name: pay, match: { path: /v1/payments }, key: required }
  - { name: folded, match: { path: "/V2/:id/Pay", case: insensitive, parameters: strip }, key: required }`
  const { proxy, executed } = await before(t, yaml)
  const spellings = ['/v2/a/pay', '/V2/A/PAY', '/v2/a;v=1/pay;x', '/v2/;y/a/pay', '/v2/%61/Pay']
  const missing = { status: 400, code: 'idempotency_key_missing' }
  for (const path of spellings) t.match(await ask(proxy, null, {}, undefined, path), missing, path)
  for (const path of spellings) await ask(proxy, 'k', {}, undefined, path)
  t.equal(executed(), 1, 'one record for all of them')
  for (const path of ['/v1/Payments', '/v1/payments;v=1', '/v1/payments.json', '/v1/PAYMENTS'])
    t.equal((await ask(proxy, null, {}, undefined, path)).status, 201, `${path} matches no route`)
  t.equal((await ask(proxy, null, {}, undefined, '/v1/other.json')).status, 201)
  t.equal(await proxy.metric('idempotency_route_near_miss_total{route="pay"}'), 4)
  const warned = proxy.log.filter(({ msg }) => /matches no route, but would match/.test(String(msg)))
  t.equal(warned.length, 1, 'warned once')
})

t.test('Y08 a wider route before a narrower one is named for each pair and method', async (t) => {
  const file = (...routes: string[]) =>
    `${UPSTREAM}store: { url: "memory:" }\nroutes:\n  - ${routes.join('\n  - ')}`
  const said = errorsOf(
    file(
      '{ name: all, match: { methods: [POST], path: "/*" } }',
      '{ name: some, match: { methods: [PATCH], path: "/a/*" } }',
      '{ name: orders, match: { path: /a/orders }, key: required }',
      '{ name: lost, match: { methods: [POST], path: /lost } }',
    ),
  )
  t.strictSame(
    said.map((line) => /: ([A-Z]+ of .*);/.exec(line)?.[1]),
    [
      'POST of orders is answered by all (line 4), PATCH of orders is answered by some (line 5)',
      'POST of lost is answered by all (line 4)',
    ],
  )
  const warnings = (...routes: string[]) => load(file(...routes)).warnings.join('\n')
  const all = '{ name: all, match: { methods: [POST], path: "/*" } }'
  const refunds = '{ name: refunds, match: { path: /refunds } }'
  t.match(warnings(all, refunds), 'POST of refunds is answered by all (line 4)')
  const narrow = '{ name: narrow, match: { path: /a/b }, key: required }'
  t.notMatch(warnings(narrow, '{ name: wide, match: { path: "/a/*" }, key: required }'), 'answered by')
  for (const [before, later] of [
    ['path: /*, exact: true', 'path: /orders'],
    ['path: /a/*', 'path: /a/orders, case: insensitive'],
    ['path: "/a/:x"', 'path: /a/orders, parameters: strip'],
    ['path: /A/Orders, case: insensitive', 'path: /a/orders, exact: true'],
    ['path: /a/orders, exact: true', 'path: /a/orders'],
  ]) {
    const wide = `{ name: all, match: { methods: [POST], ${before} } }`
    const [why] = errorsOf(file(wide, `{ name: orders, match: { ${later} }, key: required }`))
    t.match(why, /POST of orders is answered by all \(line 4\)/, `${later} after ${before}`)
  }
  const crossing = (keys: string) =>
    warnings(
      `{ name: verb, match: { methods: [POST], path: "/:of/pay" }, ${keys} }`,
      '{ name: cart, match: { path: "/cart/:verb" }, key: required }',
    )
  const some = /some POST requests of cart are answered by verb \(line 4\)/
  t.match(crossing('key: optional'), some, 'it never sees POST /cart/pay')
  t.notMatch(crossing('key: required'), some, 'both are as strict')
})

t.test('U09 Y09 Y10 a status of what was not done frees the key; other 4xx are kept', async (t) => {
  const profiles = ['standard', 'strict', 'lenient', 'stripe']
  const routes = profiles.map(
    (name) =>
      `{ name: ${name}, match: { path: "/${name}/*" }, profile: ${name}, scope: { caller: "header:authorization" } }`,
  )
  const { proxy, upstream } = await before(t, `routes: [${routes.join(', ')}]`, ({ target }, response) => {
    const [, status = '', after] = /\/(\d+)(\+)?$/.exec(target) ?? []
    response.writeHead(Number(status), after === undefined ? {} : { 'Retry-After': '1' }).end()
  })
  const frees = [307, 308, 407, 412, 417, 421, 425, 426, 428, 431, '409+', '423+']
  const keeps = [301, 302, 303, 404, 423]
  for (const profile of profiles)
    for (const [statuses, replayed] of [
      [[...frees, ...(profile === 'standard' ? [401, 403, 429] : [])], false],
      [[...keeps, ...(profile === 'standard' ? [400, 402, 409, 410, 422, 451] : [])], true],
    ] as const)
      for (const status of statuses) {
        // Not by fetch, which repeats a 421 and hides a 407.
        const request = post(`/${profile}/${status}`, newKey(), '{}', ['Authorization: Bearer a'])
        const executed = upstream.seen.length
        const answers = [await rawRequest(proxy.port, request), await rawRequest(proxy.port, request)]
        const marks = answers.map((one) => values(one, 'idempotent-replayed').length)
        t.strictSame(marks, [0, replayed ? 1 : 0], `${profile} ${status}`)
        const [first, retry] = answers as [RawAnswer, RawAnswer]
        t.strictSame([first.status, retry.status], [Number.parseInt(`${status}`, 10), first.status])
        t.equal(upstream.seen.length - executed, replayed ? 1 : 2, `${profile} ${status}: executions`)
      }
})

t.test('Y11 each kind of stream arrives while it is made; keep: stream replays it', async (t) => {
  const types = [
    'text/event-stream',
    'application/x-ndjson',
    'application/ndjson; charset=utf-8',
    'application/jsonl',
    'application/x-jsonlines',
    'application/json-seq',
    'application/stream+json',
    'multipart/x-mixed-replace; boundary=x',
    'application/grpc',
    'application/grpc-web+proto',
    'application/connect+json',
    'text/x-ndjson',
    'application/x-ldjson',
    'application/jsonlines',
    'application/x-json-stream',
    'application/geo+json-seq',
    'application/vnd.amazon.eventstream',
    'multipart/mixed; boundary="-"; deferSpec=20220824',
  ]
  const waiting = new Map<string, () => void>()
  const yaml = `routes:
  - { name: kept, match: { path: /kept }, keep: stream }
  - { name: always, match: { path: /always }, stream: always }`
  const { proxy, executed } = await before(t, yaml, (seen, response) => {
    const type = decodeURIComponent(seen.target.split('=')[1] ?? '')
    response.writeHead(200, type === 'accel' ? { 'X-Accel-Buffering': 'no' } : { 'Content-Type': type })
    response.write('first')
    waiting.set(seen.target, () => response.end('last'))
  })
  const stream = async (path: string, type: string, key: string): Promise<[first: string, rest: string]> => {
    const target = `${path}?type=${encodeURIComponent(type)}`
    const response = await fetch(`${proxy.url}${target}`, {
      method: 'POST',
      headers: { authorization: 'Bearer alice', 'idempotency-key': key, 'content-type': 'application/json' },
      body: '1',
    })
    const reader = (response.body as ReadableStream<Uint8Array>).getReader()
    const text = (chunk: { value?: Uint8Array | undefined }): string =>
      Buffer.from(chunk.value ?? []).toString()
    const first = text(await reader.read())
    // The upstream ends its answer only now.
    waiting.get(target)?.()
    waiting.delete(target)
    let rest = ''
    for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) rest += text(chunk)
    return [first, rest]
  }
  for (const type of [...types, 'accel'])
    t.strictSame(await stream('/pay', type, type), ['first', 'last'], type)
  t.strictSame(await stream('/always', 'text/plain', 'k'), ['first', 'last'], 'stream: always')
  const earlier = executed()
  t.strictSame(await stream('/kept', 'application/x-ndjson', 'k'), ['first', 'last'])
  await metricIs(proxy, 'idempotency_completions_total{route="kept",result="stored"}', 1)
  const replay = await ask(proxy, 'k', {}, '1', '/kept?type=application%2Fx-ndjson')
  t.match(replay, { status: 200, replayed: true, body: 'firstlast' })
  t.equal(executed(), earlier + 1, 'N=1')
  const gone = await ask(proxy, 'application/x-ndjson', {}, '1', '/pay?type=application%2Fx-ndjson')
  t.match(gone, { status: 409, code: 'idempotency_response_unavailable' }, 'by default a stream is not kept')
})

t.test('Y12 outcomes look into a JSON answer in any coding; the unreadable meets no condition', async (t) => {
  const throttled = '{"errors":[{"extensions":{"code":"THROTTLED"}}]}'
  const padded = (length: number) => `{"data":"${'x'.repeat(length)}",${throttled.slice(1)}`
  const coded = {
    gzip: gzipSync(throttled),
    deflate: deflateRawSync(throttled),
    br: brotliCompressSync(throttled),
    zstd: zstdCompressSync(throttled),
    'gzip, br': brotliCompressSync(gzipSync(throttled)),
    'x-own': throttled,
    'x-gzip': throttled,
  }
  const bodies: Readonly<Record<string, string | Buffer>> = {
    ...coded,
    plain: throttled,
    mark: `\ufeff${throttled}`,
    long: padded(90_000),
    other: throttled.replace('THROTTLED', 'OTHER'),
    invalid: throttled.slice(0, -1),
    bomb: gzipSync(padded(200_000)),
    large: padded(200_000),
    stream: throttled,
    fine: '{"data":{}}',
  }
  const rule = '{ status: 200, when: { "/errors/0/extensions/code": "THROTTLED" }, outcome: release }'
  const yaml = `limits: { response: 100KiB }
defaults: { outcomes: [${rule}], statusHeader: true }
routes: [{ name: kept, match: { path: "/kept/*" }, keep: stream }, { name: shadow, match: { path: "/shadow/*" }, mode: shadow }]`
  const { proxy, executed } = await before(t, yaml, ({ target }, response) => {
    const name = decodeURIComponent(target.split('/').at(-1) ?? '')
    const type = name === 'stream' ? 'application/x-ndjson' : 'application/json'
    const coding = name === 'bomb' ? 'gzip' : name
    const headers = coding in coded ? { 'Content-Encoding': coding } : {}
    response.writeHead(200, { 'Content-Type': type, ...headers }).end(bodies[name])
  })
  const waiver = /release 200 where \/errors\/0\/extensions\/code is THROTTLED/
  t.ok(
    proxy.log.some(({ msg }) => waiver.test(String(msg))),
    'the waiver is warned of',
  )
  const send = async (path: string): Promise<string> => {
    const answer = await rawRequest(proxy.port, post(path, 'k', '{}', ['Authorization: Bearer a']))
    return `${answer.status} ${values(answer, 'idempotency-status').join()}`
  }
  for (const [names, retry] of [
    [['plain', 'mark', 'gzip', 'deflate', 'br', 'zstd', 'gzip, br', 'long'], '200 executed'],
    [['other', 'invalid', 'x-own', 'x-gzip', 'bomb', 'fine'], '200 replayed'],
    // Over `limits.response`, or streamed: done without a body.
    [['large', 'stream'], '409 '],
  ] as const)
    for (const name of names) {
      const earlier = executed()
      const path = `/p/${encodeURIComponent(name)}`
      t.strictSame([await send(path), await send(path)], ['200 executed', retry], name)
      t.equal(executed() - earlier, retry === '200 executed' ? 2 : 1, `${name}: executions`)
    }
  t.match(await send('/kept/stream'), '200 executed')
  await metricIs(proxy, 'idempotency_completions_total{route="kept",result="released"}', 1)
  t.match(await send('/kept/stream'), '200 executed', 'a kept stream is read at its end')
  await send('/shadow/gzip')
  await metricIs(proxy, 'idempotency_completions_total{route="shadow",result="released"}', 1)
  t.pass('shadow mode reads it, too')
})

t.test('Y12 the GraphQL and JSON-RPC recipes free the key where nothing was done', async (t) => {
  let answer = ''
  const recipe = (name: string): Promise<World> => {
    const text = readFileSync(new URL(`../../examples/recipes/${name}.yaml`, import.meta.url), 'utf8')
    const own = /^(?:listen|admin|upstream|store|service):.*$/gm
    return before(t, text.replaceAll(own, ''), (_, response) => {
      response.writeHead(200, { 'Content-Type': 'application/json' }).end(answer)
    })
  }
  const graphql = await recipe('graphql')
  const rpc = await recipe('json-rpc')
  const error = (code: string): string => `{"errors":[{"message":"m","extensions":{"code":"${code}"}}]}`
  const failed = (code: number): string => `{"jsonrpc":"2.0","id":1,"error":{"code":${code},"message":"m"}}`
  const rows: [api: World, path: string, body: string, again: string][] = [
    [graphql, '/graphql', error('THROTTLED'), 'executed'],
    [graphql, '/graphql', error('UNAUTHENTICATED'), 'replayed'],
    [graphql, '/graphql', error('INTERNAL_SERVER_ERROR'), 'unknown'],
    [graphql, '/graphql', error('BAD_USER_INPUT'), 'replayed'],
    [graphql, '/graphql', '{"data":{"pay":{"id":1}}}', 'replayed'],
    [rpc, '/rpc', failed(-32005), 'executed'],
    [rpc, '/rpc', failed(-32603), 'unknown'],
    [rpc, '/rpc', failed(-32602), 'replayed'],
    [rpc, '/rpc', '{"jsonrpc":"2.0","id":1,"result":7}', 'replayed'],
    [rpc, '/rpc', `[${failed(-32005)},{"jsonrpc":"2.0","id":2,"result":7}]`, 'replayed'],
  ]
  for (const [{ proxy, executed }, path, body, again] of rows) {
    answer = body
    const key = newKey()
    t.match(await ask(proxy, key, {}, '{"id":1}', path), { status: 200, replayed: false, body })
    const earlier = executed()
    const retry = await ask(proxy, key, {}, '{"id":1}', path)
    const became =
      retry.code === 'idempotency_outcome_unknown' ? 'unknown' : retry.replayed ? 'replayed' : 'executed'
    t.equal(became, again, body)
    t.equal(executed() - earlier, again === 'executed' ? 1 : 0, body)
  }
})

t.test('Y16 false means off or none, as Helm and YAML 1.1 write them', async (t) => {
  const text = `${UPSTREAM}store: { url: "memory:", compression: false, spool: false, wait: false, migrate: false }
admin: { listen: false }
audit: { file: false }
status: { path: false }
cors: false
limits: { newKeys: false }
routes:
  - name: pay
    match: { path: /p }
    mode: false
    tombstone: false
    respondWithin: false
    reconcile: false
    authorizeReplay: false
    key: { derive: false, forward: false }
    scope: { caller: false }
    fingerprint: { headers: false }`
  for (const written of ['false', '"false"', '"${NO}"']) {
    const { admin, cors, routes, status } = load(text.replaceAll('false', written), { env: { NO: 'false' } })
    t.match([admin.listen.address, status.path, cors], [null, null, null])
    t.match(routes[0], {
      mode: 'off',
      tombstone: 0,
      respondWithin: null,
      reconcile: null,
      key: { derive: null, forward: 'none' },
      scope: { caller: [] },
      fingerprint: { headers: null },
    })
  }
  const refused = errorsOf(`${UPSTREAM}log: { level: false }\ndefaults: { keep: false }`)
  t.equal(refused.length, 2, 'where neither word is allowed it stays an error')
})
