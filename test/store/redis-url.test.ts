import { writeFileSync } from 'node:fs'
import t from 'tap'
import { reconnectDelay } from '../../src/store/reconnect.ts'
import { addressOf, Misconfigured, redisUrl } from '../../src/store/redis-url.ts'
import { tempDir } from './fixtures.ts'

const OPEN = { username: '', password: '', db: 0 }

void t.test('the URL of a server gives host, port, credentials, database and TLS', async (t) => {
  t.strictSame(redisUrl('redis://cache'), { kind: 'server', server: addressOf('redis://cache') })
  t.strictSame(addressOf('redis://cache'), { host: 'cache', port: 6379, ...OPEN })
  t.strictSame(addressOf('redis://:s%40@10.0.0.1:1/'), {
    host: '10.0.0.1',
    port: 1,
    ...OPEN,
    password: 's@',
  })
  t.strictSame(addressOf('rediss://u%40x:p%2F@[::1]:7000/14'), {
    host: '::1',
    port: 7000,
    username: 'u@x',
    password: 'p/',
    db: 14,
    tls: {},
  })
})

void t.test('the URL of Sentinels gives them, the master, and how each is greeted', async (t) => {
  t.strictSame(redisUrl('redis+sentinel://h1,h2:1,[::1]:22,[::2]/a.b-c_d'), {
    kind: 'sentinel',
    sentinels: [
      { host: 'h1', port: 26_379, ...OPEN },
      { host: 'h2', port: 1, ...OPEN },
      { host: '::1', port: 22, ...OPEN },
      { host: '::2', port: 26_379, ...OPEN },
    ],
    master: 'a.b-c_d',
    server: OPEN,
  })
  const greeted = (url: string) => {
    const found = redisUrl(url)
    if (found.kind !== 'sentinel') throw new Error(found.kind)
    const [first] = found.sentinels
    return [found.server, first?.username, first?.password, first?.db, first?.tls]
  }
  t.strictSame(
    greeted('redis+sentinel://:p%2F@h/m/3'),
    [{ username: '', password: 'p/', db: 3 }, '', 'p/', 0, undefined],
    'a password without a user is theirs, too',
  )
  t.strictSame(greeted('redis+sentinel://u%40:p@h/m/'), [
    { username: 'u@', password: 'p', db: 0 },
    '',
    '',
    0,
    undefined,
  ])
  t.strictSame(greeted('rediss+sentinel://:p@h/m?sentinelUsername=s&sentinelPassword=x%26y'), [
    { username: '', password: 'p', db: 0, tls: {} },
    's',
    'x&y',
    0,
    {},
  ])
})

void t.test('the URL of a cluster gives some of its nodes', async (t) => {
  t.strictSame(redisUrl('redis+cluster://h1:7000,h2'), {
    kind: 'cluster',
    hosts: [
      { host: 'h1', port: 7000 },
      { host: 'h2', port: 6379 },
    ],
    server: OPEN,
  })
  t.strictSame(redisUrl('rediss+cluster://u:p%40@[::1]:7001/0'), {
    kind: 'cluster',
    hosts: [{ host: '::1', port: 7001 }],
    server: { username: 'u', password: 'p@', db: 0, tls: {} },
  })
})

void t.test('TLS uses the files that a URL names', async (t) => {
  using folder = tempDir()
  const [ca, cert, key] = ['ca', 'cert', 'key'].map((name) => {
    writeFileSync(`${folder.path}/${name}`, name)
    return `${folder.path}/${name}`
  })
  const all = `cacert=${ca}&cert=${cert}&key=${key}`
  const tls = { ca: Buffer.from('ca'), cert: Buffer.from('cert'), key: Buffer.from('key') }
  t.strictSame(addressOf(`rediss://h?${all}`).tls, tls)
  t.match(redisUrl(`rediss+cluster://h?${all}`), { server: { tls } })
  t.match(redisUrl(`rediss+sentinel://h/m?${all}`), { server: { tls }, sentinels: [{ tls }] })
  t.strictSame(addressOf(`rediss://h?key=${key}`).tls, { key: tls.key })
  t.throws(() => addressOf(`rediss://h?cert=${cert}.no`), {
    name: 'StoreUnavailable',
    maybeApplied: false,
    message: /^store.url: cert cannot be read: ENOENT/,
  })
})

void t.test('a URL that leads to other servers is no outage: nothing was applied', async (t) => {
  t.match(new Misconfigured('why'), { name: 'StoreUnavailable', maybeApplied: false, message: 'why' })
})

void t.test('attempts to connect are ever further apart, up to half a second', async (t) => {
  t.strictSame([1, 2, 3, 4, 5, 6, 50].map(reconnectDelay), [50, 100, 200, 400, 500, 500, 500])
})
