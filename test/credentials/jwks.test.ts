import { generateKeyPairSync, sign } from 'node:crypto'
import { once } from 'node:events'
import type { ServerResponse } from 'node:http'
import { exportJWK } from 'jose'
import t from 'tap'
import type { JwtPolicy } from '../../src/core/policy.ts'
import { type Verifier, verifier } from '../../src/credentials/callers.ts'
import {
  bearer,
  type JwksServer,
  jwksServer,
  NOW,
  type Pair,
  POLICY,
  pair,
  part,
  subject,
  token,
  told,
} from './support.ts'

const SECOND = 1000
const MINUTE = 60 * SECOND
const NO_KEY = 'refused: the bearer token is not signed with a key of its issuer'
const FORGED = 'refused: the signature of the bearer token is wrong'

const [one, two, stranger] = await Promise.all([
  pair('ES256', 'one'),
  pair('ES256', 'two'),
  pair('ES256', 'one'),
])

function unavailable(why: string): string {
  return `unavailable: the key set of scope.jwt.jwks could not be fetched (${why})`
}

interface Bench extends AsyncDisposable {
  readonly server: JwksServer
  readonly policy: JwtPolicy
  readonly tokens: Verifier
  readonly time: { now: number }
  /** The verdict on a token made now for a day. */
  of(by: Pair, header?: object): Promise<unknown>
}

async function bench(...pairs: readonly Pair[]): Promise<Bench> {
  const server = await jwksServer(...pairs)
  const policy = { ...POLICY, jwks: server.url }
  const time = { now: NOW }
  const tokens = verifier([policy], { clock: () => time.now })
  return {
    server,
    policy,
    tokens,
    time,
    of: async (by, header = {}) =>
      subject(tokens, policy, await token(by, { exp: time.now / 1000 + 86_400 }, header)),
    async [Symbol.asyncDispose]() {
      await tokens.close()
      await server[Symbol.asyncDispose]()
    },
  }
}

t.test('a key set is fetched when it is first needed, and kept for ten minutes', async (t) => {
  await using b = await bench(one)
  t.equal(told(await b.tokens.verify(b.policy, [])), 'absent')
  t.equal(await subject(b.tokens, b.policy, 'opaque'), 'refused: the bearer token is not a signed JWT')
  t.equal(b.server.asked, 0)
  t.equal(await b.of(one), 'u1')
  b.time.now += 10 * MINUTE - 1
  t.equal(await b.of(one), 'u1')
  t.equal(b.server.asked, 1)
  b.time.now += 1
  t.equal(await b.of(one), 'u1')
  t.equal(b.server.asked, 2)
})

t.test('many requests share one fetch, routes share one set, audiences stay their own', async (t) => {
  await using server = await jwksServer(one)
  const held: ServerResponse[] = []
  const asked = new Promise<void>((resolve) => {
    server.answer = (_, response) => {
      held.push(response)
      resolve()
    }
  })
  const orders = { ...POLICY, jwks: server.url, audience: ['orders'] }
  const mail = { ...POLICY, jwks: server.url, audience: ['mail'] }
  const tokens = verifier([orders, mail], { clock: () => NOW })
  t.teardown(() => tokens.close())
  const made = await token(one, { aud: 'orders' })
  const verdicts = Array.from({ length: 50 }, (_, i) => subject(tokens, i % 2 === 0 ? orders : mail, made))
  await asked
  for (const response of held) response.end(JSON.stringify({ keys: [one.jwk] }))
  const told = await Promise.all(verdicts)
  t.equal(told.filter((verdict) => verdict === 'u1').length, 25)
  t.equal(
    told.filter((verdict) => verdict === 'refused: the bearer token is for another audience').length,
    25,
  )
  t.equal(server.asked, 1)
})

t.test('S04 a key published after the last fetch is found, and a removed key is refused', async (t) => {
  await using b = await bench(one)
  t.equal(await b.of(one), 'u1')
  b.server.publish(one, two)
  b.time.now += 10 * SECOND
  t.equal(await b.of(two), 'u1', 'the same sub under the new key')
  t.equal(await b.of(one), 'u1')
  t.equal(b.server.asked, 2)
  b.server.publish(two)
  b.time.now += 10 * MINUTE
  t.equal(await b.of(one), NO_KEY, 'ten minutes later')
  t.equal(await b.of(two), 'u1')
  t.equal(b.server.asked, 3)
})

t.test('S04 a new key under the same key id is found, and also without a key id', async (t) => {
  await using b = await bench(one)
  t.equal(await b.of(one), 'u1')
  t.equal(await b.of(stranger), FORGED)
  b.server.publish(stranger)
  b.time.now += 10 * SECOND
  t.equal(await b.of(stranger), 'u1')
  t.equal(await b.of(one), FORGED)
  t.equal(await b.of(stranger, { kid: undefined }), 'u1')
  t.equal(b.server.asked, 2)
})

t.test('made-up key ids and bad signatures cause at most one fetch in ten seconds', async (t) => {
  await using b = await bench(one)
  t.equal(await b.of(one), 'u1')
  const flood = async (): Promise<void> => {
    const made = Array.from({ length: 40 }, (_, i) => b.of(stranger, i % 2 === 0 ? { kid: `x${i}` } : {}))
    for (const verdict of await Promise.all(made)) t.match(verdict, /^refused: /)
  }
  await flood()
  t.equal(b.server.asked, 1, 'it was just fetched')
  b.time.now += 10 * SECOND - 1
  await flood()
  t.equal(b.server.asked, 1)
  b.time.now += 1
  await flood()
  await flood()
  t.equal(b.server.asked, 2, 'once in ten seconds')
  t.equal(await b.of(one), 'u1')
  t.equal(b.server.asked, 2, 'a good token causes no fetch')
})

t.test('the cached keys count for an hour while the key server is down', async (t) => {
  await using b = await bench(one)
  t.equal(await b.of(one), 'u1')
  await b.server.stop()
  b.time.now += 10 * MINUTE
  t.equal(await b.of(one), 'u1')
  t.equal(await b.of(two), unavailable('ECONNREFUSED'), 'the key may have been published since')
  t.equal(await b.of(stranger), FORGED, 'the key is cached, and the signature is wrong')
  b.time.now += 50 * MINUTE - 1
  t.equal(await b.of(one), 'u1')
  b.time.now += 1
  t.equal(await b.of(one), unavailable('ECONNREFUSED'))
})

t.test('a set that could not be fetched counts as soon as the key server is back', async (t) => {
  await using b = await bench(one)
  const { answer } = b.server
  b.server.answer = (_, response) => response.writeHead(503).end()
  t.equal(await b.of(one), unavailable('answered 503'))
  t.equal(await b.of(one), unavailable('answered 503'))
  t.equal(b.server.asked, 1, 'it is not asked again within a second')
  b.server.answer = answer
  b.time.now += SECOND
  t.equal(await b.of(one), 'u1')
  t.equal(b.server.asked, 2)
})

t.test('known keys do not wait for a key server that has just failed', async (t) => {
  await using b = await bench(one)
  t.equal(await b.of(one), 'u1')
  b.server.answer = (_, response) => response.writeHead(500).end()
  b.time.now += 10 * MINUTE
  t.equal(await b.of(one), 'u1')
  t.equal(b.server.asked, 2)
  const asked = new Promise<ServerResponse>((resolve) => {
    b.server.answer = (_, response) => resolve(response)
  })
  b.time.now += SECOND
  t.equal(await b.of(one), 'u1', 'answered while the next fetch is still open')
  const response = await asked
  t.equal(b.server.asked, 3)
  // That answer publishes both keys, and a token that needs the new one waits for it.
  const waiting = b.of(two)
  response.end(JSON.stringify({ keys: [one.jwk, two.jwk] }))
  t.equal(await waiting, 'u1')
  t.equal(b.server.asked, 3)
})

t.test('an old set is fetched again before it counts if the last failure was long ago', async (t) => {
  await using b = await bench(one)
  t.equal(await b.of(one), 'u1')
  const { answer } = b.server
  b.server.answer = (_, response) => response.writeHead(500).end()
  b.time.now += 10 * SECOND
  t.equal(await b.of(two), unavailable('answered 500'))
  b.server.answer = answer
  b.server.publish(two)
  b.time.now += 30 * MINUTE
  t.equal(await b.of(one), NO_KEY, 'removed meanwhile')
})

t.test('a clock set back makes a set old, not fresh', async (t) => {
  await using b = await bench(one)
  t.equal(await b.of(one), 'u1')
  b.server.publish(two)
  b.time.now -= 60 * MINUTE
  t.equal(await b.of(one), NO_KEY)
  t.equal(b.server.asked, 2)
})

t.test('an answer that is not a JWK Set changes nothing', async (t) => {
  const wrong = unavailable('the response is not a JWK Set')
  const set = JSON.stringify({ keys: [one.jwk] })
  for (const [what, answer, expected] of [
    ['HTML', '<html></html>', wrong],
    ['nothing', '', wrong],
    ['null', 'null', wrong],
    ['an error in JSON', '{"error":"not found"}', wrong],
    ['keys that are not a list', '{"keys":{}}', wrong],
    ['a key that is not an object', '{"keys":[null]}', wrong],
    ['half a set', set.slice(0, -9), wrong],
    ['lists within lists', `{"keys":${'['.repeat(400_000)}`, wrong],
    ['lists within lists, closed', `{"keys":[{"a":${'['.repeat(9e4)}${']'.repeat(9e4)}}]}`, wrong],
  ] as const) {
    await using b = await bench()
    b.server.answer = (_, response) => response.end(answer)
    t.equal(await b.of(one), expected, what)
    b.server.publish(one)
    b.time.now += SECOND
    t.equal(await b.of(one), 'u1')
    b.server.answer = (_, response) => response.end(answer)
    b.time.now += 10 * MINUTE
    t.equal(await b.of(one), 'u1', `${what}: the cached keys still count`)
  }
})

t.test('statuses other than 200 count as no answer, and redirects are not followed', async (t) => {
  await using elsewhere = await jwksServer(one)
  for (const status of [301, 302, 307, 401, 404, 500, 203, 206]) {
    await using b = await bench()
    b.server.answer = (_, response) =>
      response.writeHead(status, { location: elsewhere.url }).end(JSON.stringify({ keys: [one.jwk] }))
    t.equal(await b.of(one), unavailable(`answered ${status}`))
  }
  t.equal(elsewhere.asked, 0)
})

t.test('an empty set is valid and lets nobody in', async (t) => {
  await using b = await bench()
  t.equal(await b.of(one), NO_KEY)
})

t.test('secret, private, short and broken keys of a set verify nothing', async (t) => {
  const small = generateKeyPairSync('rsa', { modulusLength: 1024 })
  const secret = Buffer.alloc(32, 1)
  await using b = await bench()
  const jwks = [
    { kty: 'oct', kid: 'secret', k: secret.toString('base64url') },
    { ...(await exportJWK(two.privateKey)), kid: 'private' },
    { ...(await exportJWK(small.publicKey)), kid: 'small' },
    { kty: 'EC', crv: 'P-256', kid: 'broken', x: 'AA', y: 'AA' },
    { ...one.jwk, kid: 'encryption', use: 'enc' },
  ]
  b.server.answer = (_, response) => response.end(JSON.stringify({ keys: jwks }))
  t.match(
    await b.of({ ...one, alg: 'HS256', privateKey: secret as never }, { kid: 'secret' }),
    /not accepted/,
  )
  t.equal(await b.of(two, { kid: 'private' }), NO_KEY)
  t.equal(await b.of(one, { kid: 'broken' }), NO_KEY)
  t.equal(await b.of(one, { kid: 'encryption' }), NO_KEY)
  const input = `${part({ alg: 'RS256', kid: 'small' })}.${part({ sub: 'u1', exp: NOW })}`
  const signature = sign('sha256', Buffer.from(input), small.privateKey).toString('base64url')
  t.equal(await subject(b.tokens, b.policy, `${input}.${signature}`), NO_KEY)
})

t.test('an endless answer is cut off after a mebibyte', async (t) => {
  await using b = await bench()
  const closed = new Promise<number>((resolve) => {
    b.server.answer = (request, response) => {
      let sent = 0
      const block = Buffer.alloc(65_536, ' ')
      const more = (): void => {
        while (!response.destroyed && response.write(block)) sent += block.length
      }
      response.on('drain', more)
      request.socket.on('close', () => resolve(sent))
      more()
    }
  })
  t.equal(await b.of(one), unavailable('more than 1048576 bytes'))
  t.ok((await closed) < 50 * 1024 ** 2, 'only what the sockets held')
})

t.test('a key server that does not answer in full times out', async (t) => {
  for (const [what, answer] of [
    ['silent', () => {}],
    ['only a head', (response: ServerResponse) => response.flushHeaders()],
    ['half a body', (response: ServerResponse) => response.write('{"keys":[')],
  ] as const) {
    await using server = await jwksServer()
    const policy = { ...POLICY, jwks: server.url }
    const tokens = verifier([policy], { clock: () => NOW, fetchTimeout: 150 })
    t.teardown(() => tokens.close())
    const closed = new Promise<void>((resolve) => {
      server.answer = (request, response) => {
        request.socket.on('close', () => resolve())
        answer(response)
      }
    })
    const made = await token(one)
    t.equal(await subject(tokens, policy, made), unavailable('timed out'), what)
    await closed
    t.equal(await subject(tokens, policy, made), unavailable('timed out'), 'not asked again within a second')
    t.equal(server.asked, 1)
  }
})

t.test('a key server that breaks off, or whose name does not resolve, is unavailable', async (t) => {
  await using b = await bench()
  b.server.answer = (request) => request.socket.destroy()
  t.equal(await b.of(one), unavailable('UND_ERR_SOCKET'))
  b.time.now += SECOND
  b.server.answer = (request, response) => {
    response.writeHead(200, { 'content-length': 1000 })
    response.write('{', () => request.socket.destroy())
  }
  t.equal(await b.of(one), unavailable('UND_ERR_RES_CONTENT_LENGTH_MISMATCH'))
  const policy = { ...POLICY, jwks: 'https://name.invalid/jwks' }
  const tokens = verifier([policy], { clock: () => NOW })
  t.match(await subject(tokens, policy, await token(one)), /^unavailable: .*\(E[A-Z_]+\)$/)
  await tokens.close()
})

t.test('close ends a fetch under way, and nothing is fetched after it', async (t) => {
  await using b = await bench()
  const asked = new Promise<void>((resolve) => {
    b.server.answer = () => resolve()
  })
  const waiting = b.tokens.verify(b.policy, bearer(await token(one)))
  await asked
  await b.tokens.close()
  t.match(told(await waiting), /^unavailable: /)
  b.time.now += SECOND
  t.match(await b.of(one), /^unavailable: /)
  t.equal(b.server.asked, 1)
})

t.test('the timeout of a fetch that was in time does no harm later', async (t) => {
  await using server = await jwksServer(one)
  const policy = { ...POLICY, jwks: server.url }
  const tokens = verifier([policy], { clock: () => NOW, fetchTimeout: 100 })
  t.equal(await subject(tokens, policy, await token(one)), 'u1')
  // An unhandled rejection would end the process here.
  const later = AbortSignal.timeout(150)
  const alive = setInterval(() => {}, 1000)
  await once(later, 'abort')
  clearInterval(alive)
  t.equal(await subject(tokens, policy, await token(one)), 'u1')
  await tokens.close()
})
