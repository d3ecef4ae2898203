import { readFileSync } from 'node:fs'
import t from 'tap'
import type { Config } from '../../src/config/config.ts'
import { formatConfigError, loadConfig } from '../../src/config/load.ts'
import { effective } from '../../src/config/written.ts'
import { FILES, load } from '../config/support.ts'

const config = load(readFileSync('test/config/everything.yaml', 'utf8'))

/** Every string in a value, however deep, with the name of its member. */
function texts(value: unknown, name = ''): [string, string][] {
  if (typeof value === 'string') return [[name, value]]
  if (value instanceof Map || value instanceof Set) return texts([...value], name)
  if (Array.isArray(value)) return value.flatMap((one) => texts(one, name))
  if (typeof value !== 'object' || value === null) return []
  return Object.entries(value).flatMap(([key, one]) => texts(one, key))
}

void t.test('K22 a configuration with every property shows no secret', async (t) => {
  const shown = effective(config)
  const text = JSON.stringify(shown)
  const secrets = [
    'a-token-of-the-tests',
    config.store.secret?.toString('utf8'),
    config.store.secret?.toString('base64'),
    config.store.encryption.keys[0]?.key.toString('hex'),
    config.store.encryption.keys[0]?.key.toString('base64'),
    config.issuer?.secret.toString('utf8'),
    'password@',
  ].filter((one) => typeof one === 'string')
  t.ok(secrets.length >= 7)
  for (const secret of secrets) t.notOk(text.includes(secret), 'a secret is masked')
  t.notMatch(text, /BEGIN|"type":"Buffer"/)
  t.match(shown, {
    admin: {
      listen: { address: '0.0.0.0:9000', tls: { minVersion: 'TLSv1.3' } },
      tokenFile: '***',
      hosts: ['admin.internal', '10.0.0.7', '[fd00::7]'],
    },
    store: {
      url: 'rediss://***@redis.internal:6380/3',
      timeout: '250ms',
      secretFile: '***',
      encryption: { keys: [{ id: 'k2026', file: '***' }] },
    },
    limits: { request: '64KiB', buffered: '1GiB', inFlight: 10 },
    issuer: { secretFile: '***', ttl: '1h' },
    audit: { file: '/var/log/idempotency-proxy/audit.log' },
  })
  const kept = new Map(texts(shown))
  for (const name of ['upstream', 'unmatched', 'profile', 'level']) t.not(kept.get(name), '***')
})

void t.test('K22 tokens in queries, key files and the reconciler’s credentials are masked', async (t) => {
  const [route] = config.routes
  const secret = 'hunter2'
  const jwks = `https://id.example.com/keys?token=${secret}&${secret}`
  const headers = ['Authorization', `Bearer ${secret}`]
  const changed = {
    ...config,
    store: { ...config.store, url: `redis://user:${secret}@h:1/0` },
    routes: [
      {
        ...route,
        scope: { ...route?.scope, jwt: { jwks, keyFile: secret, issuer: 'i', audience: [] } },
        reconcile: { request: { method: 'GET', path: `/v1/p?k={key}&api_key=${secret}`, headers } },
        key: { ...route?.key, pattern: /^(?:a+)$/u },
        outcomes: [{ status: 503, when: [], outcome: 'release' }],
        excludeHeaders: new Set(['x-a']),
      },
    ],
  } as unknown as Config
  const shown = effective(changed)
  t.notOk(JSON.stringify(shown).includes(secret))
  t.match(shown['routes'], [
    {
      scope: { jwt: { jwks: 'https://id.example.com/keys?token=***&***', keyFile: '***', issuer: 'i' } },
      reconcile: { request: { path: '/v1/p?k={key}&api_key=***', headers: { Authorization: '***' } } },
      key: { pattern: 'a+' },
      outcomes: { 503: 'release' },
      replay: { excludeHeaders: ['x-a'] },
    },
  ])
})

void t.test('/v1/config, read as a file, is the same configuration', async (t) => {
  // In a file the defaults have neither a name nor a match, and there is no `wait` where nothing waits.
  const { defaults, ...shown } = JSON.parse(JSON.stringify(effective(config)), (_, value) =>
    value === null ? undefined : value?.mode === 'reject' ? { ...value, wait: undefined } : value,
  ) as Record<string, object>
  const { name: _n, match, ...own } = defaults as Record<string, unknown>
  const { case: cases, parameters } = match as Record<string, unknown>
  const policy = { ...own, match: { case: cases, parameters } }
  const masked: [string, string][] = [
    ['"tokenFile":"***"', `"tokenFile":"${FILES}/token"`],
    ['"phase":"both"},"secretFile":"***"', `"phase":"both"},"secretFile":"${FILES}/secret"`],
    ['"secretFile":"***"', `"secretFile":"${FILES}/signing-secret"`],
    ['"file":"***"', `"file":"${FILES}/sealing-key"`],
    ['"descriptors":"***"', '"descriptors":"examples/grpc/payments.binpb"'],
    ['"keyFile":"***"', `"keyFile":"${FILES}/public.pem"`],
    ['"Authorization":"***"', '"Authorization":"Bearer t"'],
    ['"X-Record":"***"', '"X-Record":"{record}"'],
    ['"Content-Type":"***"', '"Content-Type":"application/json"'],
    ['"Location":"***"', '"Location":"/v1/x"'],
    ['rediss://***@', 'rediss://user:password@'],
    ['?v=***', '?v=1'],
    ['?brief=***', '?brief=1'],
  ]
  const text = masked.reduce(
    (all, [mask, value]) => all.replaceAll(mask, value),
    JSON.stringify({ ...shown, defaults: policy }),
  )
  const again = load(text)
  const written = (given: Config): unknown => JSON.parse(JSON.stringify(effective(given)))
  t.strictSame(written(again), written(config))
  const plain = ({ warnings: _w, routes, defaults: own, ...rest }: Config): unknown => ({
    ...rest,
    policies: [...routes, own].map(({ scope, ...more }) => ({ ...more, ...scope, callerIsDefault: false })),
  })
  t.same(plain(again), plain(config))
})

void t.test('durations and sizes are shown in the unit that people write', async (t) => {
  const text = `upstream: { url: "http://u", timeout: 120s }
limits: { request: 1024KiB }
defaults: { ttl: 48h, lease: "\${LEASE}", respondWithin: 90000ms }
`
  const given = loadConfig({ file: 'f', text, env: { LEASE: '61s' }, flags: {} })
  if (!given.ok) throw new Error(given.errors.map(formatConfigError).join('\n'))
  const own = effective(given.config)
  t.match(own, {
    listen: { address: '127.0.0.1:8080', tls: 'off' },
    upstream: { timeout: '2m', connectTimeout: '2s', idleTimeout: '60s' },
    limits: { request: '1MiB', response: '5MiB', upload: '30s' },
    drain: { delay: '0ms', timeout: '125s' },
    defaults: {
      ttl: '2d',
      ttlFailed: '2d',
      lease: '61s',
      respondWithin: '90s',
      tombstone: 'off',
      unresolvedTtl: '30d',
      limits: { request: '1MiB', newKeys: 'off' },
      inFlight: { wait: '10s' },
      reconcile: 'none',
      key: { from: ['header:idempotency-key'], derive: 'off', pattern: '' },
      scope: { caller: ['header:authorization'] },
    },
  })
})
