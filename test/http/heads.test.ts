import { writeFileSync } from 'node:fs'
import { connect, type Socket } from 'node:net'
import t from 'tap'
import { loadConfig } from '../../src/config/load.ts'
import { fingerprintOf } from '../../src/core/fingerprint.ts'
import { linesOf } from '../../src/core/headers.ts'
import { readCaller, recordId } from '../../src/core/identity.ts'
import { readKey } from '../../src/core/key.ts'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { parseTarget } from '../../src/core/route.ts'
import { keyBody } from '../core/fixtures.ts'
import { tempDir } from '../support/e2e.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { mulberry32 } from '../support/random.ts'
import { tcpStub } from '../support/upstream.ts'

t.setTimeout(300_000)

/** Generated heads (HEADS=5000 SEED=…). */
const RUNS = Number(process.env['HEADS'] ?? 200)
const SEED = Number(process.env['SEED'] ?? 20_261_122)

const random = mulberry32(SEED)
const upTo = (n: number): number => Math.floor(random() * n)
const pick = <T>(from: readonly T[]): T => from[upTo(from.length)] as T
const chance = (p: number): boolean => random() < p

// biome-ignore format: a list
const NAMES = [
  'Idempotency-Key', 'X-Alias', 'X-User', 'X-Tenant', 'Content-Type', 'Content-Length', 'Transfer-Encoding', 'Host',
  'Expect', 'Connection', 'Idempotency-Fence', 'Idempotency-Record', 'X-Forwarded-For', 'X-Forwarded-Proto',
  'CDN-Loop', 'Via', 'TE', 'Trailer', 'Upgrade', 'Keep-Alive', 'X-Mine',
]
// biome-ignore format: a list
const VALUES = [
  'k-1', '"k-1"', 'k-2', 'a, b', '', ' ', '"k', 'chunked', 'gzip, chunked', 'close', '2', '+2', '100-continue',
  'application/json', 'text/plain;x=1', 'websocket', 'trailers', 'caf\xe9', 'a\tb', 'x\ry', 'z\0z',
]

function spelt(name: string): string {
  const how = upTo(9)
  if (how === 0) return name.replaceAll('-', '_')
  if (how === 1) return name.replaceAll('-', '.')
  if (how === 2) return name.toUpperCase()
  if (how === 3) return name.toLowerCase()
  if (how === 4 && chance(0.2)) return `${name} `
  return name
}

function line(): string {
  const name = pick(NAMES)
  if (name === 'Connection')
    return `${spelt(name)}: ${Array.from({ length: 1 + upTo(4) }, () => spelt(pick(NAMES))).join(pick([', ', ',', ' ,, ']))}`
  const value = chance(0.4) ? pick(['k-1', 'u', 'application/json']) : pick(VALUES)
  const fold = chance(0.03) ? '\r\n ' : ''
  return `${spelt(name)}:${pick(['', ' ', '  ', '\t'])}${fold}${value}`
}

/** An odd request; more than one may be in it. */
function request(): string {
  const method = pick(['POST', 'POST', 'POST', 'PATCH', 'PUT', 'GET'])
  const target = pick(['/p', '/p?a=1', '//p/', '/./p', '/%70', 'http://other.test/p', '/q', 'p', '/p#x'])
  const version = chance(0.9) ? 'HTTP/1.1' : pick(['HTTP/1.0', 'HTTP/2.0', 'HTTP/0.9', 'HTTP/1.2', ''])
  const lines = Array.from({ length: upTo(6) }, line)
  if (chance(0.95)) lines.unshift('Host: a')
  if (chance(0.8)) lines.splice(upTo(lines.length + 1), 0, `Idempotency-Key: k-${upTo(RUNS / 2)}`)
  if (chance(0.7)) lines.push(`X-User: ${pick(['u', 'v'])}`)
  const body = pick(['{}', '{"a":1}', '{ "a": 1 }', 'x'])
  const chunked = chance(0.3)
  const trailer = chance(0.3) ? 'Idempotency-Key: t\r\nX_User: t\r\n' : ''
  const framed = chunked
    ? `${body.length.toString(16)}${pick(['', ';a=b'])}\r\n${body}\r\n0\r\n${trailer}\r\n`
    : body
  lines.splice(
    upTo(lines.length + 1),
    0,
    chunked ? 'Transfer-Encoding: chunked' : `Content-Length: ${body.length}`,
  )
  const end = chance(0.97) ? '\r\n' : '\n'
  return `${method} ${target} ${version}${end}${lines.map((one) => `${one}\r\n`).join('')}\r\n${framed}`
}

interface Heard {
  readonly method: string
  readonly target: string
  readonly headers: readonly string[]
  readonly body: Buffer
}

/** Reads what arrives strictly: the proxy may send nothing that could be read in another way. */
function hearFrom(socket: Socket, heard: Heard[], broken: string[]): void {
  let bytes = Buffer.alloc(0)
  socket.on('data', (chunk: Buffer) => {
    bytes = Buffer.concat([bytes, chunk])
    for (;;) {
      const end = bytes.indexOf('\r\n\r\n')
      if (end < 0) return
      const [start = '', ...lines] = bytes.toString('latin1', 0, end).split('\r\n')
      const [, method = '', target = ''] = /^([A-Z]+) (\S+) HTTP\/1\.1$/.exec(start) ?? []
      const headers = lines.flatMap((text) => {
        const [, name = '', value = ''] =
          /^([\w!#$%&'*+.^`|~-]+): ?([\t\x20-\x7e\x80-\xff]*)$/.exec(text) ?? []
        if (name === '') broken.push(text)
        return [name, value]
      })
      const lengths = linesOf(headers, 'content-length')
      const codings = linesOf(headers, 'transfer-encoding')
      if (method === '' || lengths.length + codings.length > 1) broken.push(bytes.toString('latin1', 0, end))
      let size = Number(lengths[0] ?? 0)
      let body = bytes.subarray(end + 4, end + 4 + size)
      if (codings.length > 0) {
        const chunked = /^([0-9a-f]+)\r\n([^]*?)\r\n0\r\n\r\n/.exec(bytes.toString('latin1', end + 4))
        if (chunked === null) return
        size = chunked[0].length
        body = Buffer.from(chunked[2] as string, 'latin1')
      }
      if (bytes.length < end + 4 + size) return
      bytes = bytes.subarray(end + 4 + size)
      heard.push({ method, target, headers, body })
      socket.write('HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok')
    }
  })
}

const OURS = 'idempotency-key x-alias x-user x-tenant idempotency-fence idempotency-record x-forwarded-for'
const READ_BY_CGI = `${OURS} x-forwarded-proto content-type content-length host cdn-loop`.split(' ')

/** As an application behind CGI, WSGI or PHP reads the lines. */
function asCgi(headers: readonly string[]): string[] {
  return headers.map((text, i) => (i % 2 === 0 ? text.toLowerCase().replaceAll(/[^a-z0-9]/g, '-') : text))
}

const ROUTES = `[
  { name: p, match: { methods: [POST, PATCH, PUT], path: /p }, key: { from: ["header:idempotency-key", "header:x-alias"], forwardFence: true },
    scope: { caller: "header:x-user" }, fingerprint: { headers: [x-tenant] } }
]`

/** What the proxy answers to odd bytes until the connection ends. */
async function answersTo(port: number, bytes: string): Promise<string> {
  const client = connect(port, '127.0.0.1')
  let said = ''
  client.on('error', () => {})
  client.on('data', (chunk: Buffer) => {
    said += chunk.toString('latin1')
  })
  client.write(Buffer.from(bytes, 'latin1'))
  // A request that ends the connection, so that the wait has an end.
  client.write('GET /end HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n')
  const closed = new Promise<void>((resolve) => client.once('close', () => resolve()))
  const giveUp = setTimeout(() => client.destroy(), 2000)
  await closed
  clearTimeout(giveUp)
  return said
}

t.test(`P24 V06 the record of an odd head is that of what the upstream heard (SEED=${SEED})`, async (t) => {
  const heard: Heard[] = []
  const broken: string[] = []
  await using upstream = await tcpStub((socket) => hearFrom(socket, heard, broken))
  const token = `${tempDir(t)}/token`
  writeFileSync(token, 'a-token-of-the-test-0123456789abcdef')
  const admin = { authorization: 'Bearer a-token-of-the-test-0123456789abcdef' }
  const yaml = `admin: { listen: "127.0.0.1:0", tokenFile: "${token}" }\nupstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\nlimits: { upload: 1s }\nroutes: ${ROUTES}`
  const loaded = loadConfig({ text: yaml, env: {}, flags: {} })
  if (!loaded.ok) throw new Error('the configuration loads')
  const route = loaded.config.routes[0] as RoutePolicy
  await using proxy = await proxyInProcess(yaml)
  const executed = new Set<string>()
  let guarded = 0
  for (let run = 0; run < RUNS; run++) {
    const bytes = Array.from({ length: 1 + upTo(2) }, request).join('')
    const from = heard.length
    const said = await answersTo(proxy.port, bytes)
    const what = JSON.stringify(bytes)
    if (!/^(?:HTTP\/1\.1 \d{3} |$)/.test(said)) t.fail(`not an HTTP answer: ${what} ${said}`)
    for (const one of heard.slice(from)) {
      const { method, headers, body } = one
      const target = parseTarget(one.target)
      if (target === null) {
        t.fail(`a target that cannot be parsed: ${what}`)
        continue
      }
      const cgi = asCgi(headers)
      for (const name of READ_BY_CGI)
        if (JSON.stringify(linesOf(cgi, name)) !== JSON.stringify(linesOf(headers, name)))
          t.fail(`CGI reads another ${name}: ${what}`)
      for (const name of ['te', 'trailer', 'upgrade', 'keep-alive', 'expect'])
        if (name !== 'trailer' && linesOf(headers, name).length > 0) t.fail(`${name} was forwarded: ${what}`)
      if (linesOf(headers, 'host').length !== 1) t.fail(`none or several Host lines: ${what}`)
      if (linesOf(headers, 'x-forwarded-for').join() !== '127.0.0.1')
        t.fail(`not our X-Forwarded-For: ${what}`)
      const [id] = linesOf(headers, 'idempotency-record')
      const reading = readKey({ headers, query: target.query }, route.key, keyBody(headers, body, route.key))
      if (id === undefined) {
        const protects = route.match.methods.includes(method) && target.path === '/p'
        if (protects && reading.kind !== 'missing') t.fail(`a key passed the guard: ${what}`)
        continue
      }
      guarded++
      const caller = readCaller({ headers, certificate: null }, route.scope, null)
      if (reading.kind !== 'key' || caller.kind !== 'caller') {
        t.fail(`the upstream did not hear key and caller: ${what}`)
        continue
      }
      const namespace = { service: 'default', secret: null }
      const { key, qualifier } = reading
      const named = recordId(namespace, route, caller.parts, method, target.path, key, qualifier, null)
      if (named !== id) t.fail(`not the record of what was heard: ${what}`)
      const { path, query } = target
      const content = { method, target: one.target, path, query, headers, body }
      const kept = (await (await fetch(`${proxy.adminUrl}/v1/records/${id}`, { headers: admin })).json()) as {
        fingerprint: string
      }
      if (kept.fingerprint !== fingerprintOf(content, route.fingerprint).toString('base64url'))
        t.fail(`not the fingerprint of what was heard: ${what}`)
      if (executed.has(id)) t.fail(`executed twice: ${what}`)
      executed.add(id)
    }
  }
  t.same(broken, [], 'nothing malformed was sent')
  t.ok(guarded > 10, `${guarded} were executed`)
  t.equal(executed.size, guarded)
})
