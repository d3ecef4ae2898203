/** Whether nginx and curl carry what this proxy carries. */
import { execFile } from 'node:child_process'
import t from 'tap'
import { scriptedPeer } from '../support/exchange.ts'
import { NO_NGINX, nginx } from '../support/nginx.ts'
import { rawRequest } from '../support/raw.ts'
import { CARRIED } from './answers.ts'

const BOTH = CARRIED.map(([bytes]) => bytes).filter((bytes) => bytes.startsWith('HTTP/'))

/** An upstream that answers `/n` with the nth. */
const peer = await scriptedPeer((socket, request) => {
  socket.end(Buffer.from(BOTH[Number(request.split(' ')[1]?.slice(1))] ?? '', 'latin1'))
})
t.teardown(() => peer[Symbol.asyncDispose]())

void t.test('§15.14 nginx', { skip: NO_NGINX }, async (t) => {
  const { url } = await nginx(
    t,
    `server { listen LISTEN; location / { proxy_pass ${peer.url}; proxy_http_version 1.1; proxy_set_header Connection ""; } }`,
  )
  for (const [n, bytes] of BOTH.entries()) {
    // It takes the interim answer for the final one.
    if (bytes.includes(' 100 ')) continue
    const answer = await rawRequest(Number(new URL(url).port), `GET /${n} HTTP/1.1\r\nHost: a\r\n\r\n`)
    // From 1.23 on it refuses what frames the body twice, which contract §15 names, and odd codings.
    if (
      answer.status === 502 &&
      /(?:content-length|transfer-encoding)[^]*(?:content-length|transfer-encoding|identity|,)/i.test(bytes)
    )
      continue
    t.strictSame([answer.status, answer.body.toString()], [200, 'ok'], JSON.stringify(bytes))
  }
})

void t.test('§15.14 curl', async (t) => {
  for (const [n, bytes] of BOTH.entries()) {
    // It refuses a trailer without a colon.
    if (bytes.includes('\r\nNone\r\n')) continue
    const body = await new Promise((resolve) => {
      execFile('curl', ['-s', '-m', '5', `${peer.url}/${n}`], (error, out) => resolve(error?.code ?? out))
    })
    t.equal(body, 'ok', JSON.stringify(bytes))
  }
})
