import { readdirSync, readFileSync } from 'node:fs'
import t from 'tap'
import { PAGE_FILES } from '../../src/http/admin-app.ts'
import { adminYaml } from '../support/admin.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { upstreamStub } from '../support/upstream.ts'

const FOLDER = new URL('../../src/admin/page/', import.meta.url)

void t.test('S10 the page is served without a token, with strict security headers', async (t) => {
  await using upstream = await upstreamStub((seen, response) => void response.writeHead(418).end(seen.target))
  await using proxy = await proxyInProcess(
    `${adminYaml(t)}\nupstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }`,
  )
  const types = { '/': 'text/html', '/page.css': 'text/css', '/page.js': 'text/javascript' }
  for (const [path, type] of Object.entries(types)) {
    const answer = await fetch(proxy.adminUrl + path)
    t.equal(answer.status, 200)
    t.equal(answer.headers.get('content-type'), `${type}; charset=utf-8`)
    t.equal(
      answer.headers.get('content-security-policy'),
      "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    )
    t.equal(answer.headers.get('x-content-type-options'), 'nosniff')
    t.equal(answer.headers.get('referrer-policy'), 'no-referrer')
    t.equal(answer.headers.get('cache-control'), 'no-cache')
    const text = await answer.text()
    t.equal(answer.headers.get('content-length'), String(Buffer.byteLength(text)))

    const etag = answer.headers.get('etag') as string
    t.match(etag, /^"[\w-]{22}"$/)
    for (const [held, status] of [
      [etag, 304],
      [`"other", W/${etag}`, 304],
      ['"other"', 200],
    ] as const) {
      const again = await fetch(proxy.adminUrl + path, { headers: { 'if-none-match': held } })
      t.equal(again.status, status, held)
      t.equal(await again.text(), status === 304 ? '' : text)
      t.equal(again.headers.get('etag'), etag)
    }
    const head = await fetch(proxy.adminUrl + path, { method: 'HEAD' })
    t.same([head.status, await head.text()], [200, ''])
    const post = await fetch(proxy.adminUrl + path, { method: 'POST' })
    t.same([post.status, post.headers.get('allow')], [405, 'GET, HEAD'])

    const passed = await fetch(proxy.url + path)
    t.same([passed.status, await passed.text()], [418, path], 'on the traffic port it is the upstream’s path')
  }
  for (const path of ['/index.html', '/page', '/v1/../page.js/', '/%70age.js', '/tsconfig.json'])
    t.equal((await fetch(proxy.adminUrl + path)).status, 401, path)
})

void t.test('S10 without a configured token there is no page', async (t) => {
  await using proxy = await proxyInProcess(
    'upstream: { url: "http://127.0.0.1:9" }\nstore: { url: "memory:" }',
  )
  for (const path of ['/', '/page.js', '/page.css']) t.equal((await fetch(proxy.adminUrl + path)).status, 404)
})

void t.test('every file of the page is served, and refers to no other', async (t) => {
  const served = new Map(Object.entries(PAGE_FILES))
  t.same(
    [...served.keys()].map((path) => (path === '/' ? 'index.html' : path.slice(1))).sort(),
    readdirSync(FOLDER).sort(),
  )
  for (const name of readdirSync(FOLDER)) {
    const text = readFileSync(new URL(name, FOLDER), 'utf8')
    const named = [
      ...text.matchAll(/^import[^'"]*['"]([^'"]+)['"]/gm),
      ...text.matchAll(/(?:src|href)="(?!data:|#)([^"]+)"/g),
      ...text.matchAll(/url\(([^)]*)\)/g),
    ].map(([, target = '']) => target.replace(/^\.\//, '/').replace(/^(?!\/)/, '/'))
    for (const target of named) t.ok(served.has(target), `${name}: ${target}`)
    t.notMatch(
      text,
      /innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser/,
      name,
    )
    t.notMatch(text, /localStorage|document\.cookie|indexedDB/, `${name}: the token stays in the tab`)
    if (name.endsWith('.html'))
      t.notMatch(text, /\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)/, `${name}: the policy forbids it`)
  }
})
