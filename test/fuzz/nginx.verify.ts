import { once } from 'node:events'
import { connect } from 'node:net'
import t from 'tap'
import { plainRequest } from '../../src/http/plain.ts'
import { Random } from '../simulation/scheduler.ts'
import { NO_NGINX, nginx } from '../support/nginx.ts'
import { upstreamStub } from '../support/upstream.ts'
import { mutated } from './engine.ts'
import { corpusOf, TARGETS } from './targets.ts'

/** Requests that the proxy reads itself. */
const ASKED = Number(process.env['FUZZ_CASES'] ?? 60)
const SEED = Number(process.env['FUZZ_SEED'] ?? Math.floor(Math.random() * 2 ** 31))

/** A third opinion, beside Node's (targets.ts): whatever this proxy reads itself, nginx reads alike or refuses. */
void t.test('http-head: nginx hears the request that this proxy hears', { skip: NO_NGINX }, async (t) => {
  const heard: unknown[] = []
  const stub = await upstreamStub((seen, response) => {
    heard.push([seen.method, seen.target, seen.body.toString('latin1')])
    response.end('ok')
  })
  t.teardown(() => stub[Symbol.asyncDispose]())
  const { url } = await nginx(
    t,
    `server { listen LISTEN; ignore_invalid_headers off; underscores_in_headers on;
      location / { proxy_pass ${stub.url}; proxy_http_version 1.1; proxy_set_header Connection ""; } }`,
  )
  const [target] = TARGETS.filter(({ name }) => name === 'http-head')
  if (target === undefined) throw new Error('no such target')
  const corpus = corpusOf(target)
  const random = new Random(SEED)
  for (let asked = 0, n = 0; asked < ASKED; n++) {
    const input = corpus[n] ?? mutated(random.pick(corpus), random.pick(corpus), target.words, random)
    const plain = plainRequest(Buffer.from(input), null as never)
    if (plain === null) continue
    asked++
    const client = connect(Number(new URL(url).port), '127.0.0.1').on('error', () => {})
    const answered = once(client, 'data')
    client.write(input)
    await answered
    // Whatever else it takes the bytes for would follow.
    client.end()
    client.resume()
    await once(client, 'close')
    const expected = [plain.method, plain.url, plain.takeBody().toString('latin1')]
    const all = heard.splice(0)
    if (all.length > 0)
      t.strictSame(all, [expected], `seed ${SEED}: ${JSON.stringify(input.toString('latin1'))}`)
  }
})
