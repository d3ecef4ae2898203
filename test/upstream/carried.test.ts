/** Which answers of an upstream are carried (contract §15). */
import t from 'tap'
import {
  type AnswerParts,
  AnswerRefused,
  type Following,
  ResponseParser,
} from '../../src/upstream/response-parser.ts'
import { adminYaml, ask, fullOf } from '../support/admin.ts'
import { until } from '../support/e2e.ts'
import { answering, metricIs, problemOf, proxyBefore, scriptedPeer, values } from '../support/exchange.ts'
import { post, rawRequest } from '../support/raw.ts'
import { CARRIED, CHUNKED, LENGTH, OK } from './answers.ts'

const LIMIT = 1024
interface Read {
  head: string
  body: string
  trailers: string
  following: Following | null
  unasked: boolean
  refused: string | null
}

/** What the parser makes of these pieces, and of the end of the connection. */
function read(pieces: readonly string[], method = 'POST'): Read {
  const all: Read = { head: '', body: '', trailers: '', following: null, unasked: false, refused: null }
  const parts: AnswerParts = {
    onInterim() {},
    onHead(status, reason, lines) {
      all.head = [status, reason, ...lines].join('|')
    },
    onBody(bytes, from, to) {
      all.body += bytes.toString('latin1', from, to)
    },
    onUnasked() {
      all.unasked = true
    },
    onComplete(trailers, following) {
      all.trailers = trailers.join('|')
      all.following = following
    },
  }
  const parser = new ResponseParser(parts, () => LIMIT)
  parser.expect(method)
  try {
    for (const piece of pieces)
      if (all.following === null) parser.execute(Buffer.from(piece, 'latin1'), piece.length)
    parser.finish()
  } catch (error) {
    if (!(error instanceof AnswerRefused)) throw error
    all.refused = error.message
  }
  return all
}

/** The bytes whole, in two pieces at each place, and one by one. */
function cuts(bytes: string): string[][] {
  const all = [[bytes], bytes.split('')]
  for (let at = 1; at < bytes.length; at++) all.push([bytes.slice(0, at), bytes.slice(at)])
  return all
}

void t.test('§15.14 what nginx and curl carry is carried, wherever its bytes are cut', (t) => {
  for (const [bytes, following, head] of CARRIED)
    for (const pieces of cuts(bytes)) {
      const found = read(pieces)
      const expected = {
        body: 'ok',
        following,
        refused: null,
        unasked: false,
        trailers: bytes.includes('X-T') ? 'X-T|1' : '',
        ...(head === undefined ? {} : { head }),
      }
      if (JSON.stringify({ ...found, ...expected }) !== JSON.stringify(found))
        t.match(found, expected, JSON.stringify(pieces))
    }
  t.pass(`${CARRIED.length} answers`)
  t.end()
})

const REFUSED: readonly (readonly [bytes: string, why: RegExp])[] = [
  ['garbage', /^the response is not HTTP\/1\.1$/],
  ['ICY 200 OK\r\n\r\n', /not HTTP\/1\.1/],
  ['HTTP/2.0 200 OK\r\n\r\n', /not HTTP\/1\.1/],
  ['HTTP/1.2 200 OK\r\n\r\n', /status line/],
  ['HTTP/1.1 099 OK\r\n\r\n', /status line/],
  ['HTTP/1.1 2000 OK\r\n\r\n', /status line/],
  ['HTTP/1.1 200 O\rK\r\n\r\n', /status line/],
  [`${OK}X: a\r b\r\n\r\n`, /header line 1 of the response has a control character/],
  [`${OK}Y: 1\r\nX: a\0b\r\n${LENGTH}\r\nok`, /header line 2 of the response has a control character/],
  [`${OK}X: a\x01b\r\n${LENGTH}\r\nok`, /control character/],
  [`${OK}X: a\x7f\r\n${LENGTH}\r\nok`, /control character/],
  [`${OK}X: a\r\n b\r\n${LENGTH}\r\nok`, /header line 2 of the response is malformed/],
  [`${OK}X : a\r\n${LENGTH}\r\nok`, /header line 1 .* malformed/],
  [`${OK}no colon\r\n${LENGTH}\r\nok`, /header line 1 .* malformed/],
  [`${OK}: a\r\n${LENGTH}\r\nok`, /header line 1 .* malformed/],
  [`${OK}X\x01: a\r\n${LENGTH}\r\nok`, /header line 1 .* malformed/],
  [`${OK}${LENGTH}Content-Length: 3\r\n\r\nok`, /two lengths/],
  [`${OK}Content-Length: +2\r\n\r\nok`, /length .* not a number/],
  [`${OK}Content-Length: 0x2\r\n\r\nok`, /length .* not a number/],
  [`${OK}Content-Length:\r\n\r\nok`, /length .* not a number/],
  [`${OK}Content-Length: 99999999999999999\r\n\r\nok`, /length .* not a number/],
  [`${OK}Transfer-Encoding: chunked, gzip\r\n\r\nok`, /transfer codings .* malformed/],
  [`${CHUNKED} 2\r\nok\r\n0\r\n\r\n`, /chunk .* no size/],
  [`${CHUNKED}2x\r\nok\r\n0\r\n\r\n`, /chunk .* no size/],
  [`${CHUNKED}2;a\rb\r\nok\r\n0\r\n\r\n`, /chunk .* no size/],
  [`${CHUNKED}fffffffffffffff\r\nok`, /chunk .* no size/],
  [`${CHUNKED}00000000000000002\r\nok\r\n0\r\n\r\n`, /chunk .* no size/],
  [`${CHUNKED}2\r\nok0\r\n\r\n`, /longer than announced/],
  [`${CHUNKED}2\r\nok \r\n0\r\n\r\n`, /longer than announced/],
  [`${CHUNKED}2\r\nok\r0\r\n\r\n`, /longer than announced/],
  ['HTTP/1.1 101 Switching Protocols\r\n\r\n', /switched protocols/],
]

void t.test('§15.14 what is not carried is refused with its reason, wherever its bytes are cut', (t) => {
  for (const [bytes, why] of REFUSED)
    for (const pieces of cuts(bytes)) {
      const { refused } = read(pieces)
      if (!why.test(String(refused))) t.match(refused, why, JSON.stringify(pieces))
    }
  t.pass(`${REFUSED.length} answers`)
  t.end()
})

void t.test('§15.14 a head, a chunk’s line and trailers are read up to limits.responseHead', (t) => {
  for (const [before, unit, after, what] of [
    [OK, 'X: a\r\n', `${LENGTH}\r\nok`, 'head'],
    [`${OK}${LENGTH}X: `, 'x', '\r\n\r\nok', 'head'],
    ['HTTP/1.1 200 OK\nContent-Length: 2\nX: ', 'x', '\n\nok', 'head'],
    ['HTTP/1.1 103 Hints\r\nX: ', 'x', `\r\n\r\n${OK}${LENGTH}\r\nok`, 'head'],
    [`${CHUNKED}2;`, 'x', '\r\nok\r\n0\r\n\r\n', 'chunk line'],
    [`${CHUNKED}2\r\nok\r\n0\r\nX: `, 'x', '\r\n\r\n', 'trailers'],
  ] as const)
    for (const [size, fits] of [
      [LIMIT - 100, true],
      [LIMIT + 100, false],
    ] as const) {
      const bytes = before + unit.repeat(size / unit.length) + after
      for (const pieces of [
        [bytes],
        bytes.match(/[^]{1,7}/g) as string[],
        [bytes.slice(0, -5), bytes.slice(-5)],
      ]) {
        const { refused, body } = read(pieces)
        const why = `the ${what} of the response is over limits.responseHead (${LIMIT} bytes)`
        t.equal(refused, fits ? null : why, `${what}, ${size}`)
        if (fits) t.equal(body, 'ok')
      }
    }
  // To the byte.
  for (const [size, fits] of [
    [LIMIT, true],
    [LIMIT + 1, false],
  ] as const)
    for (const lineEnd of ['\r\n', '\n']) {
      const frame = `HTTP/1.1 200 OK${lineEnd}X: ${lineEnd}${lineEnd}`
      const bytes = frame.replace('X: ', `X: ${'x'.repeat(size - frame.length)}`)
      for (const pieces of [[bytes], bytes.split('')]) t.equal(read(pieces).refused === null, fits, `${size}`)
    }
  t.end()
})

void t.test('§15.26 after which answers a connection can be used again', (t) => {
  for (const [bytes, following, method, unasked] of [
    ['HTTP/1.1 204 No Content\r\n\r\n', 'implicit'],
    ['HTTP/1.1 304 Not Modified\r\n\r\n', 'implicit'],
    ['HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n', 'nothing'],
    ['HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n', 'nothing'],
    ['HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n', 'nothing'],
    ['HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n', 'nothing'],
    ['HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n', 'nothing'],
    ['HTTP/1.1 205 Reset Content\r\n\r\n', 'nothing'],
    ['HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n', 'nothing'],
    ['HTTP/1.1 205 Reset Content\r\nContent-Length: 2\r\n\r\n', 'nothing'],
    ['HTTP/1.1 205 Reset Content\r\nTransfer-Encoding: chunked\r\n\r\n', 'nothing'],
    [`${OK}${LENGTH}\r\n`, 'nothing', 'HEAD'],
    [`${OK}Transfer-Encoding: chunked\r\n\r\n`, 'nothing', 'HEAD'],
    [`${OK}Content-Length: 0\r\n\r\n`, 'explicit'],
    [`${OK}${LENGTH}Connection: x, close\r\n\r\nok`, 'nothing'],
    [`HTTP/1.0 200 OK\r\n${LENGTH}\r\nok`, 'nothing'],
    [`HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n${LENGTH}\r\nok`, 'explicit'],
    [`${OK}${LENGTH}\r\nok\r\n`, 'nothing', 'POST', true],
    [`HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n`, 'nothing', 'POST', true],
    [`${CHUNKED}0\r\n\r\n\r\n`, 'nothing', 'POST', true],
  ] as const)
    t.match(
      read([bytes], method),
      { following, unasked: unasked === true, refused: null },
      JSON.stringify(bytes),
    )
  t.end()
})

void t.test('Y13 a head of 40 KiB is carried and replayed, and a sloppy one too', async (t) => {
  const lines = Array.from({ length: 40 }, (_, n) => `Set-Cookie: c${n}=${'x'.repeat(1000)}\r\n`)
  for (const [bytes, cookies] of [
    [`HTTP/1.1 201 Created\r\n${lines.join('')}${LENGTH}\r\nok`, 40],
    ['HTTP/1.1 201 Created\nSet-Cookie: a=b\nContent-Length: 2\n\nok', 1],
    [`HTTP/1.1 201 Created\r\n${LENGTH}${LENGTH}\r\nok`, 0],
    [
      'HTTP/1.1 201 Created\r\nContent-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\n2 \r\nok\r\n0\r\n\r\n',
      0,
    ],
  ] as const) {
    await using peer = await answering(bytes)
    await using proxy = await proxyBefore(peer)
    // Protected, replayed, and passed on: with one length, or chunked.
    for (const [request, replayed] of [
      [post('/p', 'k', '{}'), []],
      [post('/p', 'k', '{}'), ['true']],
      [post('/other', null, '{}'), []],
    ] as const) {
      const answer = await rawRequest(proxy.port, request)
      t.strictSame([answer.status, answer.body.toString()], [201, 'ok'])
      t.equal(values(answer, 'set-cookie').length, cookies)
      t.strictSame(values(answer, 'idempotent-replayed'), replayed)
      t.equal(values(answer, 'content-length').length + values(answer, 'transfer-encoding').length, 1)
    }
  }
})

void t.test('Y13 the true reason stands in the detail, the log and the history', async (t) => {
  const large = `HTTP/1.1 201 Created\r\nX: ${'x'.repeat(70_000)}\r\n${LENGTH}\r\nok`
  for (const [bytes, why] of [
    [large, /the head of the response is over limits.responseHead \(65536 bytes\)/],
    [`HTTP/1.1 201 Created\r\nX: a\x01\r\n${LENGTH}\r\nok`, /header line 1 .* control character/],
    ['garbage\r\n\r\n', /the response is not HTTP\/1\.1/],
    [`${CHUNKED}2\r\nok\r\nzz\r\n`, /a chunk of the response has no size/],
    ['HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n', /transfer coding gzip, chunked/],
    // Live: the client has the head already, and its connection is cut.
    [`${OK}Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n`, /no size/],
    ['HTTP/1.1 200 OK\r\nContent-Length: 10\r\n', /the upstream closed the connection/],
  ] as const) {
    await using peer = await scriptedPeer((socket) => void socket.end(bytes, 'latin1'))
    await using proxy = await proxyBefore(peer, { more: adminYaml(t).replace(/^listen.*$/m, '') })
    const live = bytes.includes('event-stream')
    const answered = rawRequest(proxy.port, post('/p', 'k', '{}'))
    if (live) {
      await t.rejects(answered)
      await proxy.logged(({ cause }) => why.test(String(cause)))
    } else {
      const { code, detail, status } = problemOf(await answered)
      t.strictSame([code, status], ['upstream_failed', 502])
      t.match(detail, why)
      if (!why.source.includes('closed')) t.notMatch(detail, /closed/)
      await proxy.logged(({ cause }) => why.test(String(cause)))
      // Passed on, its head has left before its body.
      if (!/chunked/.test(bytes))
        t.match(problemOf(await rawRequest(proxy.port, post('/other', null, '{}'))).detail, why)
    }
    await metricIs(proxy, 'idempotency_completions_total{route="r",result="unknown"}', 1)
    t.match(problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}'))), {
      code: 'idempotency_outcome_unknown',
    })
    const body = { key: 'k', route: 'r', method: 'POST', path: '/p', caller: {} }
    const shown = async () => fullOf(await ask(proxy, '/v1/records/lookup', { method: 'POST', body }))
    t.match((await shown()).lastError, why)
    // Written behind the answer.
    await until(async () => why.test(JSON.stringify((await shown()).history)))
  }
})

void t.test('§10 limits.responseHead is reloaded live, for connections that are open too', async (t) => {
  await using peer = await answering(`HTTP/1.1 201 Created\r\nX: ${'x'.repeat(3000)}\r\n${LENGTH}\r\nok`)
  await using proxy = await proxyBefore(peer)
  const statusOf = async (key: string) => (await rawRequest(proxy.port, post('/p', key, '{}'))).status
  t.equal(await statusOf('a'), 201)
  await proxy.reload(
    `upstream: { url: "${peer.url}" }\nstore: { url: "memory:" }\nroutes: [{ name: r, match: { path: /p } }]\nlimits: { responseHead: 2KiB }`,
  )
  t.equal(await statusOf('b'), 502)
  t.equal(peer.sockets.length, 1)
})

void t.test('§15.14 §15.26 behind an upload that is streamed, the same is carried and kept', async (t) => {
  const upload = `POST /other HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n`
  const headOf = (size: number) => `HTTP/1.1 201 Created\r\nX: ${'x'.repeat(size)}\r\n${LENGTH}\r\nok`
  for (const [bytes, why, connections] of [
    [headOf(40_000), null, 1],
    [headOf(70_000), /over limits\.responseHead \(65536 bytes\)/, 2],
    ['HTTP/1.1 201 Created\nContent-Length: 2\n\nok', null, 2],
    [`HTTP/1.1 201 Created\r\n${LENGTH}${LENGTH}\r\nok`, null, 2],
  ] as const) {
    await using peer = await answering(bytes)
    await using proxy = await proxyBefore(peer)
    for (let n = 1; n <= 2; n++) {
      const answer = await rawRequest(proxy.port, upload)
      if (why === null) t.equal(answer.body.toString(), 'ok')
      else t.match(problemOf(answer).detail, why)
    }
    t.equal(peer.sockets.length, connections)
  }
})
