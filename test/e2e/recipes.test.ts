import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { newKey, type Reply, send, tempDir } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { emptyStore, heldUpstream, KINDS, recordsIn, refusalOf, replicas } from '../support/replicas.ts'

t.setTimeout(200_000)

function yamlOf(upstream: { readonly url: string }, store: string, fingerprint = '{}'): string {
  return `upstream: { url: "${upstream.url}" }
store: { url: "${store}" }
drain: { timeout: 3s }
defaults: { fingerprint: ${fingerprint} }`
}

interface Part {
  readonly name: string
  readonly filename?: string
  readonly type?: string
  readonly content: string
}

const PARTS: readonly Part[] = [
  { name: 'amount', content: '10' },
  { name: 'note', content: 'line one\r\n--not-the-boundary\r\nline two' },
  { name: 'receipt', filename: 'r.pdf', type: 'application/pdf', content: '%PDF-1.7\x01\x02' },
]

function multipart(boundary: string, parts: readonly Part[]) {
  const lines = parts.map(({ name, filename, type, content }) => {
    const file = filename === undefined ? '' : `; filename="${filename}"`
    const media = type === undefined ? '' : `\r\nContent-Type: ${type}`
    return `--${boundary}\r\nContent-Disposition: form-data; name="${name}"${file}${media}\r\n\r\n${content}\r\n`
  })
  return {
    path: '/fast',
    body: `${lines.join('')}--${boundary}--\r\n`,
    headers: { 'content-type': `multipart/form-data; boundary=${boundary}` },
  }
}

function reused(t: Test, reply: Reply, what: string): void {
  t.strictSame(refusalOf(reply), [422, 'idempotency_key_reused'], what)
}

for (const kind of KINDS)
  void t.test(`F14 multipart: the boundary does not count, the parts do: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    await using proxy = await proxyInProcess(yamlOf(upstream, await emptyStore(t, kind)))
    const key = newKey()
    const first = await send(proxy, key, multipart('boundary-1', PARTS))
    t.equal(first.status, 201)
    for (const boundary of ['boundary-2', 'XYZ', '----WebKitFormBoundaryAbC123'])
      t.match(await send(proxy, key, multipart(boundary, PARTS)), { body: first.body, replayed: true })
    const [amount, note, receipt] = PARTS as [Part, Part, Part]
    for (const [what, parts] of Object.entries({
      content: [{ ...amount, content: '11' }, note, receipt],
      'a name': [{ ...amount, name: 'sum' }, note, receipt],
      'a filename': [amount, note, { ...receipt, filename: 'other.pdf' }],
      'a type': [amount, note, { ...receipt, type: 'text/plain' }],
      order: [note, amount, receipt],
      'one more': [...PARTS, amount],
      'one less': [amount, note],
      // The same text if the parts were concatenated.
      'where a part ends': [{ ...amount, content: '1' }, { ...note, content: `0${note.content}` }, receipt],
    }))
      reused(t, await send(proxy, key, multipart('boundary-3', parts)), what)
    t.equal(upstream.seen.length, 1)

    // A client that makes a new boundary each time.
    const another = newKey()
    const boundaries = new Set<string | null>()
    const post = async (amount: string): Promise<Response> => {
      const form = new FormData()
      form.set('amount', amount)
      form.set('receipt', new Blob(['%PDF-1.7'], { type: 'application/pdf' }), 'r.pdf')
      const request = new Request(`${proxy.url}/fast`, { method: 'POST', body: form })
      boundaries.add(request.headers.get('content-type'))
      request.headers.set('authorization', 'Bearer alice')
      request.headers.set('idempotency-key', another)
      const response = await fetch(request)
      await response.text()
      return response
    }
    t.equal((await post('10')).status, 201)
    t.equal((await post('10')).headers.get('idempotent-replayed'), 'true')
    t.equal((await post('11')).status, 422)
    t.equal(boundaries.size, 3)
    t.equal(upstream.seen.length, 2)
  })

for (const kind of KINDS)
  void t.test(`F15 forms: the encoding does not count, pairs and their order do: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    await using proxy = await proxyInProcess(yamlOf(upstream, await emptyStore(t, kind)))
    const key = newKey()
    const ask = (body: string, type = 'application/x-www-form-urlencoded') =>
      send(proxy, key, { path: '/fast', body, headers: { 'content-type': type } })
    const first = await ask('to=b%C3%B6b&note=x+y&n=1%262&n=2')
    t.equal(first.status, 201)
    for (const same of [
      'to=b%C3%B6b&note=x%20y&n=1%262&n=2',
      '%74o=b%c3%b6b&note=%78+%79&n=%31%262&n=2',
      'to=b%C3%B6b&note=x+y&n=1%262&n=2',
    ])
      t.match(await ask(same), { body: first.body, replayed: true }, same)
    t.ok(
      (await ask('to=b%C3%B6b&note=x+y&n=1%262&n=2', 'Application/X-WWW-Form-Urlencoded; charset=utf-8'))
        .replayed,
    )
    for (const other of [
      'note=x+y&to=b%C3%B6b&n=1%262&n=2',
      'to=b%C3%B6b&note=x+y&n=2&n=1%262',
      'to=b%C3%B6b&note=x%2By&n=1%262&n=2',
      'to=b%C3%B6b&note=x+y&n=1&2&n=2',
      'to=b%C3%B6b&note=x+y&n=1%262',
      'to=bob&note=x+y&n=1%262&n=2',
      'to=b%C3%B6b&note=X+y&n=1%262&n=2',
    ])
      reused(t, await ask(other), other)
    t.equal(upstream.seen.length, 1)
  })

const BODY = '{"amount":10, "sentAt":"12:00"}'
const CHANGES: readonly (readonly [what: string, before: string, after: string])[] = [
  ['ignore added', '{}', '{ ignore: [/sentAt] }'],
  ['ignore to only', '{ ignore: [/sentAt] }', '{ only: [/amount] }'],
  ['another body mode', '{ body: json }', '{ body: raw }'],
  ['the body no longer counts', '{}', '{ body: none }'],
  ['a header counts', '{}', '{ headers: [x-version] }'],
  ['another header counts', '{ headers: [x-version] }', '{ headers: [x-tenant] }'],
  ['the order of the query does not count', '{}', '{ query: sorted }'],
  ['all at once', '{}', '{ body: json, ignore: [/sentAt], headers: [x-version], query: ignore }'],
]

for (const kind of KINDS)
  void t.test(`F20 a retry replays across recipes, in flight and afterwards: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    const store = await emptyStore(t, kind)
    const routes = (recipes: readonly string[]) =>
      recipes.map((recipe, n) => `  - { name: r${n}, match: { path: /slow${n} }, fingerprint: ${recipe} }`)
    const yaml = (recipes: readonly string[]) =>
      `${yamlOf(upstream, store)}\nroutes:\n${routes(recipes).join('\n')}`
    const [one] = (await replicas(t, 1, yaml(CHANGES.map(([, before]) => before)))) as [TestProxy]
    const [two] = (await replicas(t, 1, yaml(CHANGES.map(([, , after]) => after)))) as [TestProxy]
    for (const [n, [what]] of CHANGES.entries())
      for (const [old, fresh] of [
        [one, two],
        [two, one],
      ] as const) {
        const key = newKey()
        const ask = (proxy: TestProxy, more: { body?: string; query?: string; headers?: object } = {}) =>
          send(proxy, key, {
            path: `/slow${n}?${more.query ?? 'a=1&b=2'}`,
            body: more.body ?? BODY,
            headers: { 'x-version': '1', 'x-tenant': 'acme', ...more.headers },
          })
        const executed = upstream.seen.length
        const first = ask(old)
        await upstream.arrived(executed + 1)
        t.strictSame(refusalOf(await ask(fresh)), [409, 'idempotency_key_in_progress'], what)
        upstream.finish(executed + 1)
        const { body } = await first
        t.match(await ask(fresh), { status: 201, body, replayed: true }, what)
        const snapshot = await recordsIn(store)
        // Different requests under either recipe.
        reused(t, await ask(fresh, { body: '{"amount":11, "sentAt":"12:00"}' }), `${what}: the amount`)
        reused(t, await ask(fresh, { query: 'a=1&b=3' }), `${what}: the query`)
        reused(t, await ask(fresh, { headers: { 'content-type': 'text/plain' } }), `${what}: the media type`)
        t.strictSame(await recordsIn(store), snapshot, 'refused requests change nothing')
        for (const proxy of [old, fresh]) t.match(await ask(proxy), { body, replayed: true }, what)
        t.equal(upstream.seen.length, executed + 1)
      }
  })

void t.test(
  '§5 store.secretFile keys the digests in the store; an equal body replays, another amount does not',
  async (t) => {
    const upstream = await heldUpstream(t)
    const file = join(tempDir(t), 'secret')
    writeFileSync(file, 'a secret of sixteen bytes')
    const store = await emptyStore(t, 'sqlite')
    const yaml = yamlOf(upstream, store).replace('store: {', `store: { secretFile: "${file}",`)
    await using proxy = await proxyInProcess(yaml)
    await using plain = await proxyInProcess(yamlOf(upstream, store))
    const [key, body] = [newKey(), '{"amount":1,"to":"a"}']
    const first = await send(proxy, key, { path: '/fast', body })
    t.match(await send(proxy, key, { path: '/fast', body: '{"to":"a","amount":1.0}' }), {
      body: first.body,
      replayed: true,
    })
    reused(t, await send(proxy, key, { path: '/fast', body: '{"amount":2,"to":"a"}' }), 'another amount')
    const keyed = (await recordsIn(store)) as string[]
    await send(plain, key, { path: '/fast', body })
    const all = (await recordsIn(store)) as string[]
    t.strictSame([keyed.length, all.length], [1, 2])
    const digestsOf = (record = '') => [
      record.split(' ')[1]?.slice(126, 190),
      record.split(' ')[1]?.slice(190, 254),
    ]
    const [mine] = keyed.map(digestsOf)
    const [theirs] = all.filter((record) => !keyed.includes(record)).map(digestsOf)
    for (const [n, digest] of (mine ?? []).entries()) {
      t.equal(digest?.length, 64)
      t.not(digest, theirs?.[n])
    }
    t.equal(upstream.seen.length, 2)
  },
)
