import { readFileSync } from 'node:fs'
import t from 'tap'
import { effective } from '../../src/admin/effective.ts'
import type { Config } from '../../src/config/config.ts'
import { loadConfig } from '../../src/config/load.ts'
import { FIXTURES } from '../config/support.ts'

const loaded = loadConfig({
  file: 'good-everything.yaml',
  text: readFileSync(`${FIXTURES}/good-everything.yaml`, 'utf8'),
  env: {},
  flags: {},
})
if (!loaded.ok) throw new Error('the fixture is bad')
const { config } = loaded

/** Every text of a value, however deep, with the member that it stands under. */
function texts(value: unknown, name = ''): [string, string][] {
  if (typeof value === 'string') return [[name, value]]
  if (value instanceof Map || value instanceof Set) return texts([...value], name)
  if (Array.isArray(value)) return value.flatMap((one) => texts(one, name))
  if (typeof value !== 'object' || value === null) return []
  return Object.entries(value).flatMap(([key, one]) => texts(one, key))
}

void t.test('K22 of a configuration with every property no secret is shown', async (t) => {
  const shown = effective(config)
  const text = JSON.stringify(shown)
  const secrets = [
    config.admin.token,
    config.store.secret?.toString('utf8'),
    config.store.secret?.toString('base64'),
    config.issuer?.secret.toString('utf8'),
    'password@',
  ].filter((one) => typeof one === 'string')
  t.ok(secrets.length >= 5)
  for (const secret of secrets) t.notOk(text.includes(secret), 'a secret is masked')
  t.notMatch(text, /BEGIN|"type":"Buffer"/)
  t.match(shown, {
    admin: { token: '***', hosts: ['admin.internal', '10.0.0.7', '[fd00::7]'] },
    store: { url: 'rediss://***@redis.internal:6380/3', timeout: 250, secret: '***' },
    limits: { buffered: 1024 ** 3 },
    issuer: { secret: '***' },
    audit: { file: '/var/log/idempotency-proxy/audit.log' },
  })
  const kept = new Map(texts(shown))
  for (const name of ['upstream', 'unmatched', 'profile', 'level']) t.not(kept.get(name), '***')
})

void t.test(
  'K22 tokens in queries, the texts of key files and the reconciler’s own credentials are secrets',
  async (t) => {
    const [route] = config.routes
    const secret = 'hunter2'
    const changed = {
      ...config,
      store: { ...config.store, url: `redis://user:${secret}@h:1/0` },
      routes: [
        {
          ...route,
          scope: {
            ...route?.scope,
            jwt: {
              jwks: `https://id.example.com/keys?token=${secret}&${secret}`,
              keyFile: secret,
              issuer: 'i',
              audience: [],
            },
          },
          reconcile: {
            request: {
              method: 'GET',
              path: `/v1/p?k={key}&api_key=${secret}`,
              headers: ['Authorization', `Bearer ${secret}`],
            },
          },
          key: { ...route?.key, pattern: /^a+$/u },
          outcomes: { exact: new Map([[503, 'release']]), class: new Map() },
          excludeHeaders: new Set(['x-a']),
        },
      ],
    } as unknown as Config
    const shown = effective(changed)
    t.notOk(JSON.stringify(shown).includes(secret))
    t.match(shown['routes'], [
      {
        scope: { jwt: { jwks: 'https://id.example.com/keys?token=***&***', keyFile: '***', issuer: 'i' } },
        reconcile: { request: { path: '/v1/p?k={key}&api_key=***', headers: ['Authorization', '***'] } },
        key: { pattern: '^a+$' },
        outcomes: { exact: { 503: 'release' }, class: {} },
        excludeHeaders: ['x-a'],
      },
    ])
  },
)
