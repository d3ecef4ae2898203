import { generateKeyPairSync, randomBytes } from 'node:crypto'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import { readConfigFile } from '../../src/config/files.ts'
import { formatConfigError, loadConfig } from '../../src/config/load.ts'
import { effective } from '../../src/config/written.ts'
import { errorsOf, FILES, load, routeFile, UPSTREAM } from './support.ts'

void t.test('flags override the file, and are enough without one', async (t) => {
  const flags = { upstream: 'http://127.0.0.1:4000/', listen: '127.0.0.2:80', store: 'memory:' }
  const alone = load('', { flags })
  t.equal(alone.upstream.url, 'http://127.0.0.1:4000')
  t.strictSame(alone.listen.address, { host: '127.0.0.2', port: 80 })
  t.equal(alone.store.url, 'memory:')
  const file =
    'upstream: { url: http://a, timeout: 5s }\nlisten: 127.0.0.1:1\nstore: { url: "sqlite:x", timeout: 1s }\n'
  t.match(load(file, { flags }), {
    upstream: { url: 'http://127.0.0.1:4000', timeout: 5000 },
    listen: { address: { port: 80 } },
    store: { url: 'memory:', timeout: 1000 },
  })
})

void t.test('V01 the service has letters, digits, _, . and -; --service overrides the file', async (t) => {
  const serviceOf = (text: string, service?: string): string =>
    load(UPSTREAM + text, { flags: { service } }).service
  t.equal(serviceOf(''), 'default')
  t.equal(serviceOf('service: Payments_v1.2-eu'), 'Payments_v1.2-eu')
  t.equal(serviceOf('service: payments', 'orders'), 'orders')
  t.equal(serviceOf(`service: ${'a'.repeat(64)}`), 'a'.repeat(64))
  for (const name of ['a b', 'a:b', 'a{b', 'a*', 'ä', '""', 'a'.repeat(65)])
    t.match(errorsOf(`${UPSTREAM}service: "${name.replaceAll('"', '')}"`), [
      /^c\.yaml:2:10: service: found .*; allowed: up to 64 letters, digits, `_`, `\.`, `-`/,
    ])
  t.match(errorsOf(UPSTREAM, { flags: { service: 'a/b' } }), [/^--service: service: found "a\/b"; allowed: /])
})

void t.test('V02 a store that others can share needs a service; an embedded one does not', async (t) => {
  for (const store of ['redis://h', 'rediss://u:p@h/'])
    t.match(errorsOf(UPSTREAM, { flags: { store } }), [
      /^--store: store\.url: found a store that other services can share, and no `service`/,
    ])
  for (const store of ['memory:', 'sqlite:a.db'])
    t.equal(load(UPSTREAM, { flags: { store } }).service, 'default')
  t.equal(load(UPSTREAM, { flags: { store: 'redis://h', service: 'pay' } }).service, 'pay')
  t.equal(load(`${UPSTREAM}service: pay`, { flags: { store: 'redis://h' } }).service, 'pay')
})

void t.test('W09 a migration needs two different stores that outlive a restart, and a phase', async (t) => {
  const store = (text: string) => `${UPSTREAM}service: pay\nstore: ${text}\n`
  const { migrate } = load(store('{ url: "redis://h", migrate: { from: "sqlite:a.db", phase: both } }')).store
  t.same(migrate, { from: 'sqlite:a.db', phase: 'both' })
  t.equal(load(store('{ url: "redis://h" }')).store.migrate, null)
  t.equal(load(store('{ url: "redis://h", migrate: off }')).store.migrate, null)
  for (const [url, migrate, error] of [
    ['redis://h', 'from: "redis://h", phase: both', /the same store twice/],
    ['redis://h', 'from: "memory:", phase: new', /memory:, which ends with its process/],
    ['memory:', 'from: "redis://h", phase: new', /memory:, which ends with its process/],
    ['redis://h', 'from: "sqlite:a.db"', /phase/],
    ['redis://h', 'from: "sqlite:a.db", phase: old', /mirror/],
  ] as const)
    t.match(errorsOf(store(`{ url: "${url}", migrate: { ${migrate} } }`))[0], error)
  t.match(errorsOf(`${UPSTREAM}store: { url: "sqlite:a.db", migrate: { from: "redis://h", phase: new } }`), [
    /no `service` to keep their records apart/,
  ])
})

void t.test('an error in a flag names the flag', async (t) => {
  t.strictSame(
    errorsOf(UPSTREAM, {
      flags: { upstream: 'localhost:3000', listen: '80', store: 'tiered://u:secret@h/d' },
    }),
    [
      '--upstream: upstream.url: found "localhost:3000", did you mean `http://localhost:3000`?; allowed: http://host:port, https://host:port or unix:/absolute/path',
      '--listen: listen.address: found 80, did you mean `127.0.0.1:80`?; allowed: host:port with a port of 0 to 65535 (0: any free one), IPv6 in brackets, such as 127.0.0.1:8080, [::1]:8080',
      '--store: store.url: found "tiered://***@h/d"; allowed: memory:, sqlite:<path>, redis://host:port/db, redis+sentinel://host:port,host:port/master/db, redis+cluster://host:port,host:port (with TLS rediss), postgres://user:password@host:port/database or dynamodb://table?region=name',
    ],
  )
  t.strictSame(errorsOf('', { file: '' }), [
    'upstream.url: found nothing; required: http://host:port, https://host:port or unix:/path, in the file or as --upstream',
  ])
})

void t.test('errors are file:line:column: path: message, in the order of the file', async (t) => {
  const errors = errorsOf(routeFile('lease: fast', 'ttl: 1 day', 'profil: strict'))
  t.strictSame(
    errors.map((error) => error.split(': found')[0]),
    ['c.yaml:5:12: routes[0].lease', 'c.yaml:6:10: routes[0].ttl', 'c.yaml:7:5: routes[0].profil'],
  )
  t.match(errors[2], /did you mean `profile`\?/)
})

void t.test('an empty file is accepted if a flag names the upstream', async (t) => {
  for (const text of ['', '\n', '# nothing\n', '---\n', '~\n'])
    t.equal(load(text, { flags: { upstream: 'http://a' } }).routes.length, 0)
})

t.test('environment variables are put into parsed scalars, and read as the property’s type', async (t) => {
  const numbers = { PORT: '9000', COUNT: '7', WAIT: '3s', SIZE: '2MiB', STATUS: '409' }
  const env = { ...numbers, YES: 'true', EMPTY: '', TRICK: 'a: b, # c' }
  const config = load(
    `
listen: "127.0.0.1:\${PORT}"
upstream: { url: "http://\${HOST:-127.0.0.1}:3000", connections: "\${COUNT}", timeout: "\${WAIT}" }
readiness: { store: "\${YES}" }
limits: { request: "\${SIZE}" }
store: { url: "sqlite:\${TRICK}-\${EMPTY}-\${EMPTY:-filled}-$\${COUNT}-$5" }
defaults: { misuse: { status: "\${STATUS}" }, scope: { caller: ["header:\${NAME:-x-user}"] } }
`,
    { env },
  )
  t.match(config, {
    listen: { address: { port: 9000 } },
    upstream: { url: 'http://127.0.0.1:3000', connections: 7, timeout: 3000 },
    readiness: { store: true },
    limits: { request: 2 * 1024 ** 2 },
    defaults: { misuseStatus: 409, scope: { caller: [{ kind: 'header', name: 'x-user' }] } },
  })
  t.equal(config.store.url, 'sqlite:a: b, # c--filled-${COUNT}-$5')
})

void t.test('only values are substituted, not names', async (t) => {
  t.match(
    errorsOf(`${UPSTREAM}"\${NAME}": 1\n`, { env: { NAME: 'listen' } })[0],
    'found the unknown property `${NAME}`',
  )
})

void t.test('no error shows a password', async (t) => {
  const text = 'upstream: { url: "http://u:hunter2@h/" }\nstore: { url: "redis://:${PW}@h/x" }\n'
  for (const error of errorsOf(text, { env: { PW: 'hunter2' } })) t.notMatch(error, 'hunter2')
})

void t.test('anchors, aliases and merge keys work, and own entries override merged ones', async (t) => {
  const { routes } = load(`${UPSTREAM}
defaults: &base { ttl: 2d, key: &key { minLength: 4, maxLength: 9 } }
routes:
  - { name: a, match: &match { path: /a }, <<: [{ lease: 5s }, *base], ttl: 3d }
  - { name: b, match: { <<: *match, methods: [PUT] }, key: *key }
`)
  t.match(routes[0], { ttl: 3 * 86_400_000, lease: 5000, key: { minLength: 4 } })
  t.match(routes[1], { match: { path: '/a', methods: ['PUT'] }, key: { maxLength: 9 } })
})

void t.test('an alias inside its own anchor ends in an error, not a loop', async (t) => {
  t.match(
    errorsOf(`${UPSTREAM}defaults: &d { <<: *d, key: *d }\n`)[0],
    /defaults\.key\.key: found the unknown property/,
  )
})

void t.test('a sealing key is 32 bytes raw, in hex or in base64, and nothing else', async (t) => {
  const dir = mkdtempSync(join(tmpdir(), 'keys-'))
  t.teardown(() => rmSync(dir, { recursive: true, force: true }))
  const file = join(dir, 'key')
  const text = `${UPSTREAM}store: { encryption: { keys: [{ id: a, file: "${file}" }] } }\n`
  // Raw keys that end in a line feed.
  for (const key of [randomBytes(31), Buffer.alloc(31, 0xff)].map((bytes) =>
    Buffer.concat([bytes, Buffer.from('\n')]),
  ))
    for (const written of [
      key,
      key.toString('hex'),
      `${key.toString('hex').toUpperCase()}\n`,
      key.toString('base64'),
      `${key.toString('base64')}\r\n`,
      key.toString('base64url'),
    ]) {
      writeFileSync(file, written)
      t.strictSame(load(text).store.encryption.keys, [{ id: 'a', key }])
    }
  for (const [wrong, found] of [
    [randomBytes(16).toString('hex'), '32 characters of text'],
    [randomBytes(24).toString('base64'), '32 characters of text'],
    [`${randomBytes(31).toString('hex')}\n`, '62 characters of text'],
    [`${randomBytes(32).toString('hex')}\n\n`, '65 characters of text'],
    [Buffer.alloc(31, 0x80), '31 bytes'],
    [Buffer.alloc(33, 0x80), '33 bytes'],
  ] as const) {
    writeFileSync(file, wrong)
    const [error, ...others] = errorsOf(text)
    t.match(error, `store.encryption.keys[0].file: found ${found} in`)
    t.match(error, '; allowed: 32 random bytes, raw, in hex (64 characters) or in base64 (44 characters)')
    t.strictSame(others, [])
  }
})

void t.test('secret files are read without their last newline', async (t) => {
  const config = load(`${UPSTREAM}store: { secretFile: ${FILES}/secret }\n`)
  t.strictSame(config.store.secret, Buffer.from('0123456789abcdef'))
})

void t.test('the admin listener must be off, on loopback, or have a token', async (t) => {
  const text = (address: string): string => `${UPSTREAM}admin: { listen: "${address}" }\n`
  t.equal(load(text('none')).admin.listen.address, null)
  for (const host of ['127.0.0.1', '127.9.9.9', 'localhost', '[::1]'])
    t.ok(load(text(`${host}:1`)).admin.listen.address, host)
  for (const host of ['0.0.0.0', '10.0.0.1', 'example.com', '[::]'])
    t.match(errorsOf(text(`${host}:1`))[0], 'without `admin.tokenFile`', host)
})

void t.test('port 0 is no conflict, nor is one port on two addresses', async (t) => {
  t.equal(load(`${UPSTREAM}listen: 127.0.0.1:0\nadmin: { listen: 127.0.0.1:0 }\n`).listen.address.port, 0)
  t.match(load(`${UPSTREAM}listen: 127.0.0.1:9000\nadmin: { listen: 127.0.0.2:9000 }\n`).listen.address, {
    port: 9000,
  })
})

void t.test('a check is skipped if a value that it compares could not be read', async (t) => {
  const late = 'defaults: { ttl: 1s, respondWithin: 90s }'
  const errors = errorsOf(`upstream: { url: http://a, timeout: 2days }\n${late}\n`)
  t.strictSame(errors.length, 1)
  t.match(errors[0], 'upstream.timeout')
})

void t.test('an upstream address is an origin or a Unix socket', async (t) => {
  const url = (text: string): string => load('', { flags: { upstream: text } }).upstream.url
  t.equal(url('HTTP://Example.com:80/'), 'http://example.com')
  t.equal(url('https://[::1]:3000'), 'https://[::1]:3000')
  t.equal(url('http://my_app:3000'), 'http://my_app:3000')
  t.equal(url('unix:/run/app.sock'), 'unix:/run/app.sock')
})

void t.test('a JWK Set comes over https, or from this machine', async (t) => {
  const text = (url: string): string =>
    routeFile(`scope: { caller: "jwt:sub", jwt: { jwks: ${JSON.stringify(url)} } }`)
  for (const [url, kept] of Object.entries({
    'https://id.example.com/jwks?version=1': 'https://id.example.com/jwks?version=1',
    'HTTPS://ID.example.com': 'https://id.example.com/',
    'http://localhost:8080/jwks': 'http://localhost:8080/jwks',
    'http://127.0.0.1/jwks': 'http://127.0.0.1/jwks',
    'http://[::1]:8080/jwks': 'http://[::1]:8080/jwks',
  }))
    t.equal(load(text(url)).routes[0]?.scope.jwt?.jwks, kept)
  const local = 'http://localhost.example.com/jwks http://10.0.0.1/jwks http://127.0.0.1@id.example.com/jwks'
  const remote = 'https://user@id.example.com/jwks https:// https:///jwks https://id.example.com:0/jwks'
  const others = ['https://id.example.com/a b', 'file:///jwks', 'data:application/json,{}']
  for (const url of [...`${local} ${remote}`.split(' '), ...others])
    t.match(
      errorsOf(text(url)),
      [/routes\[0\]\.scope\.jwt\.jwks: found .*; allowed: none, or the https:\/\/ URL/],
      url,
    )
})

void t.test('an error in a key file is reported where the file is named', async (t) => {
  const file = join(t.testdir(), 'keys')
  const { privateKey } = generateKeyPairSync('ed25519')
  writeFileSync(file, privateKey.export({ type: 'pkcs8', format: 'pem' }))
  const errors = errorsOf(routeFile(`scope: { caller: "jwt:sub", jwt: { keyFile: ${file} } }`))
  t.equal(errors.length, 1)
  t.match(errors[0], `c.yaml:5:49: routes[0].scope.jwt.keyFile: found a private key in "`)
  t.match(errors[0], '; allowed: one public key or X.509 certificate in PEM, a JWK or a JWK Set')
})

void t.test('paths of the proxy itself must be exact and normalised', async (t) => {
  const text = (path: string): string => `${UPSTREAM}status: { path: ${JSON.stringify(path)} }\n`
  for (const path of ['/a', '/v1/caf%C3%A9:batch', '/~a/-']) t.equal(load(text(path)).status.path, path)
  const inexact = '/ //a /a//b /a/ /a/./b /a/../b /a%2e /%2f /a/:id /a/* /a?b /a#b /é'
  for (const path of ['', '/a b', ...inexact.split(' ')])
    t.match(errorsOf(text(path)), [/status\.path: found .*; allowed: off, or one exact path/], path)
})

void t.test('the URL of every kind of store is accepted', async (t) => {
  for (const url of `
    memory: sqlite:./a.db sqlite:/var/lib/a.db redis://h redis://:p@h:1/2 rediss://u:p@h/
    redis+sentinel://h1:26379,h2/payments redis+sentinel://[::1],10.0.0.1:1/a.b-c_d/
    rediss+sentinel://u:p%40@h/m/3?sentinelUsername=x&sentinelPassword=y%26z
    redis+cluster://h1:7000,h2:7001 redis+cluster://h/ rediss+cluster://u:p@h,[::1]:7000/0
    rediss+cluster://h/?cacert=/ca.pem&cert=/c.pem&key=/k.pem
    rediss+sentinel://h/m?sentinelPassword=x&cacert=/ca.pem rediss://u:p@h:1/0?cert=/c.pem&key=/k.pem
    postgres://u@h/d
    postgresql://u%40x:p%2Fw@[::1]:5433/d%C3%BC?sslmode=verify-full&sslrootcert=/ca.pem&sslcert=/c.pem&sslkey=/k.pem
    postgres://u:p@h/d?sslmode=verify-ca&sslrootcert=/ca.pem dynamodb://payments
    dynamodb://Pay_ments.v-1?region=us-gov-west-1&endpoint=http://127.0.0.1:8000
    dynamodb://payments?endpoint=https%3A%2F%2Fvpce-1.dynamodb.eu-central-1.vpce.amazonaws.com/
  `
    .trim()
    .split(/\s+/)) {
    t.equal(load('', { flags: { upstream: 'http://a', store: url, service: 'a' } }).store.url, url)
  }
})

void t.test('an invalid URL of a store gets one clear error, without its password', async (t) => {
  // biome-ignore format: a table
  for (const [url, why] of [
    ['redis://h?cacert=/a', /without a query$/],
    ['redis://h#a', /without a fragment$/],
    ['rediss://h?tls=1', /of the options cacert, cert, key, each at most once$/],
    ['rediss://h?cacert=/a&cacert=/b', /each at most once$/],
    ['rediss://h?cacert=', /each at most once$/],
    ['rediss://h?cert=/a', /cert and key only together$/],
    ['redis+sentinel://h/m?cacert=/a',
      /of the options sentinelUsername, sentinelPassword, each at most once$/],
    ['rediss+sentinel://h/m?key=/a', /cert and key only together$/],
    ['rediss+cluster://h?sentinelPassword=x', /of the options cacert, cert, key, each at most once$/],
    ['redis+cluster://', /allowed: redis\+cluster:\/\/user:password@host:port,host:port, rediss\+cluster/],
    ['redis+cluster:h', /allowed: redis\+cluster/],
    ['redis+cluster://:secret@h/1', /without a database: a cluster has only database 0/],
    ['redis+cluster://:secret@h/x', /without a database/],
    ['redis+cluster://:secret@h:0', /a port of 1 to 65535/],
    ['redis+cluster://:secret@h?x=secret', /without a query/],
    ['redis+cluster://:secret%zz@h', /percent-encoded/],
    ['redis+sentinel://', /allowed: redis\+sentinel:\/\/user:password@host:port,host:port\/master\/db/],
    ['redis+sentinel:h/m', /allowed: redis\+sentinel/],
    ['redis+sentinel://h/m#f', /allowed: redis\+sentinel/],
    ['redis+sentinel://h/m?', /allowed: redis\+sentinel/],
    ['redis+sentinel://:secret@/m', /allowed: redis\+sentinel/],
    ['redis+sentinel://:secret@h', /the master's name of letters/],
    ['redis+sentinel://:secret@h/', /the master's name of letters/],
    ['redis+sentinel://:secret@h/m/x', /the database a number/],
    ['redis+sentinel://:secret@h/m m', /the master's name of letters/],
    ['redis+sentinel://:secret@h,/m', /each a host:port/],
    ['redis+sentinel://:secret@h:0/m', /a port of 1 to 65535/],
    ['redis+sentinel://:secret@h:70000/m', /a port of 1 to 65535/],
    ['redis+sentinel://:secret@::1/m', /IPv6 in brackets/],
    ['redis+sentinel://:secret@u@h/m', /allowed: redis\+sentinel/],
    ['redis+sentinel://a:b:secret@h/m', /percent-encoded/],
    ['redis+sentinel://:secret%@h/m', /percent-encoded/],
    ['redis+sentinel://h/m?sentinelPassword=secret&password=secret',
      /of the options sentinelUsername, sentinelPassword, each/],
    ['redis+sentinel://h/m?sentinelPassword=secret&sentinelPassword=secret', /each at most once/],
    ['postgres://h/d', /with a user and a database/],
    ['postgres://u:secret@h', /with a user and a database/],
    ['postgres://u:secret@h/', /with a user and a database/],
    ['postgres://u:secret@h/a/b', /with a user and a database/],
    ['postgres://u:secret@h/%ff', /percent-encoded/],
    ['postgres://u:%00@h/d', /percent-encoded/],
    ['postgres://u:secret@/d', /allowed: memory:/],
    ['postgres://u:secret@h:0/d', /allowed: memory:/],
    ['postgres://u:secret@h:1,g:2/d', /allowed: memory:/],
    ['postgres://u:secret@%2Frun/d', /allowed: memory:/],
    ['postgres://u:secret@h/d#f', /allowed: memory:/],
    ['postgres:///d', /allowed: memory:/],
    ['postgres://u:secret@h/d?sslmode=prefer', /sslmode \(disable, require, verify-ca, verify-full\)/],
    ['postgres://u:secret@h/d?options=-c', /of the options sslmode/],
    ['postgres://u:secret@h/d?sslmode=require&sslmode=disable', /each at most once/],
    ['postgres://u:secret@h/d?sslmode=require&sslrootcert=', /of the options/],
    ['postgres://u:secret@h/d?sslrootcert=/ca.pem', /only with sslmode=require/],
    ['postgres://u:secret@h/d?sslmode=require&sslrootcert=/ca.pem',
      /sslrootcert only with sslmode=verify-ca/],
    ['postgres://u:secret@h/d?sslmode=verify-ca', /sslmode=verify-ca only with sslrootcert/],
    ['postgres://u:secret@h/d?sslmode=require&sslcert=/c.pem', /sslcert and sslkey only together/],
    ['dynamodb:', /allowed: dynamodb:\/\/table\?region=name, the table a name of 3 to 255/],
    ['dynamodb://', /allowed: dynamodb:\/\/table/],
    ['dynamodb://ab', /3 to 255 letters/],
    ['dynamodb://u:secret@payments', /without credentials/],
    ['dynamodb://payments/x', /allowed: dynamodb/],
    ['dynamodb://payments?', /allowed: dynamodb/],
    ['dynamodb://payments?region=eu-central-1#x', /allowed: dynamodb/],
    ['dynamodb://payments?region=Frankfurt', /of the options region, such as eu-central-1/],
    ['dynamodb://payments?region=eu-west-1&region=eu-west-1', /each at most once/],
    ['dynamodb://payments?toString=x', /of the options region/],
    ['dynamodb://payments?endpoint=h:8000', /an http:\/\/ or https:\/\/ origin/],
    ['dynamodb://payments?endpoint=http://h:0', /origin/],
    ['dynamodb://payments?endpoint=http://u:secret@h', /origin/],
    ['dynamodb://payments?endpoint=http://h/path', /origin/],
  ] as const) {
    const [error = '', ...more] = errorsOf('', { flags: { upstream: 'http://a', store: url, service: 'a' } })
    t.match(error, why, url)
    t.match(error, /^--store: store\.url: found /)
    t.same(more, [])
    t.notMatch(error.replace('?x=secret', ''), /secret/)
  }
})

void t.test('tiered: needs both a store that decides and a cache', async (t) => {
  const of = (store: string) => `service: a\n${UPSTREAM}store: { ${store} }\n`
  const tiered = load(of('url: "tiered:", primary: { url: "postgres://u@h/d" }, cache: { url: "redis://c" }'))
  t.match(tiered.store, { url: 'postgres://u@h/d', cache: { url: 'redis://c' } })
  const tiers = { primary: { url: 'postgres://***@h/d' }, cache: { url: 'redis://c' } }
  t.match(effective(tiered), { store: { url: 'tiered:', ...tiers } })
  t.equal(load(UPSTREAM).store.cache, undefined)
  const both = /required: store.primary.url, which decides, and store.cache.url/
  const on = (primary: string, cache: string) =>
    `url: "tiered:", primary: { url: "${primary}" }, cache: { url: "${cache}" }`
  for (const [text, why] of [
    ['url: "tiered:"', both],
    ['url: "tiered:", cache: { url: "memory:" }', both],
    ['url: "tiered:", primary: { url: "redis://h" }', both],
    ['url: "redis://h", cache: { url: "memory:" }', /found a tier without tiered:/],
    [`${on('redis://h', 'memory:')}, migrate: { from: "redis://g", phase: both }`, /without a cache/],
    ['url: "redis://h", migrate: { from: "tiered:", phase: both }', /without a cache/],
    ['url: "tiered://x"', /found "tiered:\/\/x"; allowed: memory:/],
    [on('memory:', 'memory:'), /but not memory:, which loses its records/],
    [on('tiered:', 'memory:'), /found "tiered:"; allowed/],
    [on('redis://h', 'sqlite:a'), /allowed: memory:, redis:/],
    [on('redis://h', 'redis:h'), /allowed: memory:, sqlite/],
  ] as const)
    t.ok(
      errorsOf(of(text)).some((error) => why.test(error)),
      text,
    )
})

void t.test('a configuration file that cannot be read is reported like any other error', async (t) => {
  const told = (file: string): string => {
    const read = readConfigFile(file)
    return read.ok ? read.text : formatConfigError(read.error)
  }
  t.equal(
    told('absent.yaml'),
    'absent.yaml: found no such file; allowed: a readable file of YAML or JSON in UTF-8',
  )
  t.equal(told('config'), 'config: found a directory; allowed: a readable file of YAML or JSON in UTF-8')
  t.equal(
    told(process.execPath),
    `${process.execPath}: found bytes that are not UTF-8; allowed: a readable file of YAML or JSON in UTF-8`,
  )
  t.match(told('config/minimal.yaml'), 'upstream:')
})

void t.test('V05 the proxy’s own address is refused as a flag too', async (t) => {
  for (const flags of [
    { upstream: 'http://localhost:8080' },
    { upstream: 'http://[::1]:9000', listen: '[::]:9000' },
    { upstream: 'http://proxy:80', listen: 'proxy:80' },
    { upstream: 'http://127.0.0.1:9464' },
  ]) {
    const loaded = loadConfig({ text: 'defaults: { scope: { caller: none } }', env: {}, flags })
    t.match(loaded.ok ? [] : loaded.errors.map(formatConfigError), [
      /^--upstream: upstream\.url: .*this proxy itself listens/,
    ])
  }
  for (const flags of [
    { upstream: 'http://127.0.0.1:9000', listen: '127.0.0.1:0' },
    { upstream: 'http://127.0.0.2:9000', listen: '127.0.0.1:9000' },
    { upstream: 'http://app:8080' },
    { upstream: 'unix:/run/app.sock' },
  ])
    t.ok(loadConfig({ text: '', env: {}, flags }).ok, flags.upstream)
})
