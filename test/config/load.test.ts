import { generateKeyPairSync } from 'node:crypto'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { readConfigFile } from '../../src/config/files.ts'
import { formatConfigError, loadConfig } from '../../src/config/load.ts'
import { errorsOf, FIXTURES, load, routeFile, UPSTREAM } from './support.ts'

void t.test('flags go over the file, and are enough without one', async (t) => {
  const flags = { upstream: 'http://127.0.0.1:4000/', listen: '0.0.0.0:80', store: 'memory:' }
  const alone = load('', { flags })
  t.equal(alone.upstream.url, 'http://127.0.0.1:4000')
  t.strictSame(alone.listen, { host: '0.0.0.0', port: 80 })
  t.equal(alone.store.url, 'memory:')
  const over = load(
    'upstream: { url: http://a, timeout: 5s }\nlisten: 127.0.0.1:1\nstore: { url: "sqlite:x", timeout: 1s }\n',
    { flags },
  )
  t.match(over, {
    upstream: { url: 'http://127.0.0.1:4000', timeout: 5000 },
    listen: { port: 80 },
    store: { url: 'memory:', timeout: 1000 },
  })
})

void t.test(
  'V01 the service is a name of letters, digits, _, . and -; --service goes over the file',
  async (t) => {
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
    t.match(errorsOf(UPSTREAM, { flags: { service: 'a/b' } }), [
      /^--service: service: found "a\/b"; allowed: /,
    ])
  },
)

void t.test('V02 a store that others can share needs a service; embedded ones do without', async (t) => {
  for (const store of ['redis://h', 'rediss://u:p@h/'])
    t.match(errorsOf(UPSTREAM, { flags: { store } }), [
      /^--store: store\.url: found a store that other services can share, and no `service`/,
    ])
  for (const store of ['memory:', 'sqlite:a.db'])
    t.equal(load(UPSTREAM, { flags: { store } }).service, 'default')
  t.equal(load(UPSTREAM, { flags: { store: 'redis://h', service: 'pay' } }).service, 'pay')
  t.equal(load(`${UPSTREAM}service: pay`, { flags: { store: 'redis://h' } }).service, 'pay')
})

void t.test('an error of a flag names the flag', async (t) => {
  t.strictSame(
    errorsOf(UPSTREAM, {
      flags: { upstream: 'localhost:3000', listen: '80', store: 'postgres://u:secret@h/d' },
    }),
    [
      '--upstream: upstream.url: found "localhost:3000"; allowed: http://host:port, https://host:port or unix:/absolute/path',
      '--listen: listen: found 80; allowed: host:port with a port of 0 to 65535 (0: any free one), IPv6 in brackets, such as 127.0.0.1:8080, [::1]:8080',
      '--store: store.url: `store.url: postgres:` is not implemented in this version; allowed: memory:, sqlite:<path>, redis://host:port/db or rediss://host:port/db',
    ],
  )
  t.strictSame(errorsOf('', { file: '' }), [
    'upstream.url: found nothing; required: http://host:port, https://host:port or unix:/path, in the file or as --upstream',
  ])
})

void t.test(
  'an error is formatted as file:line:column: path: message, and all of them come in the order of the file',
  async (t) => {
    const errors = errorsOf(routeFile('lease: fast', 'ttl: 1 day', 'profil: strict'))
    t.strictSame(
      errors.map((error) => error.split(': found')[0]),
      ['c.yaml:5:12: routes[0].lease', 'c.yaml:6:10: routes[0].ttl', 'c.yaml:7:5: routes[0].profil'],
    )
    t.match(errors[2], /did you mean `profile`\?/)
  },
)

void t.test('an empty file is a configuration, where a flag names the upstream', async (t) => {
  for (const text of ['', '\n', '# nothing\n', '---\n', '~\n']) {
    t.equal(load(text, { flags: { upstream: 'http://a' } }).routes.length, 0)
  }
})

void t.test(
  'the environment is put into scalars after parsing, and read as the type of the property',
  async (t) => {
    const env = {
      PORT: '9000',
      COUNT: '7',
      YES: 'true',
      WAIT: '3s',
      SIZE: '2MiB',
      STATUS: '409',
      EMPTY: '',
      TRICK: 'a: b, # c',
    }
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
      listen: { port: 9000 },
      upstream: { url: 'http://127.0.0.1:3000', connections: 7, timeout: 3000 },
      readiness: { store: true },
      limits: { request: 2 * 1024 ** 2 },
      defaults: { misuseStatus: 409, scope: { caller: [{ kind: 'header', name: 'x-user' }] } },
    })
    t.equal(config.store.url, 'sqlite:a: b, # c--filled-${COUNT}-$5')
  },
)

void t.test('names are not substituted, only values', async (t) => {
  t.match(
    errorsOf(`${UPSTREAM}"\${NAME}": 1\n`, { env: { NAME: 'listen' } })[0],
    'found the unknown property `${NAME}`',
  )
})

void t.test('no error shows a password', async (t) => {
  const text = 'upstream: { url: "http://u:hunter2@h/" }\nstore: { url: "redis://:${PW}@h/x" }\n'
  for (const error of errorsOf(text, { env: { PW: 'hunter2' } })) t.notMatch(error, 'hunter2')
})

void t.test('anchors, aliases and merge keys, which own entries override', async (t) => {
  const { routes } = load(`${UPSTREAM}
defaults: &base { ttl: 2d, key: &key { minLength: 4, maxLength: 9 } }
routes:
  - { name: a, match: &match { path: /a }, <<: [{ lease: 5s }, *base], ttl: 3d }
  - { name: b, match: { <<: *match, methods: [PUT] }, key: *key }
`)
  t.match(routes[0], { ttl: 3 * 86_400_000, lease: 5000, key: { minLength: 4 } })
  t.match(routes[1], { match: { path: '/a', methods: ['PUT'] }, key: { maxLength: 9 } })
})

void t.test('an alias within itself ends in an error, not in a loop', async (t) => {
  t.match(
    errorsOf(`${UPSTREAM}defaults: &d { <<: *d, key: *d }\n`)[0],
    /defaults\.key\.key: found the unknown property/,
  )
})

void t.test('files of secrets are read without their last newline', async (t) => {
  const config = load(
    `${UPSTREAM}admin: { listen: 0.0.0.0:9464, tokenFile: ${FIXTURES}/files/token }\nstore: { secretFile: ${FIXTURES}/files/secret }\n`,
  )
  t.equal(config.admin.token, 'a-token-of-the-tests')
  t.strictSame(config.store.secret, Buffer.from('0123456789abcdef'))
})

void t.test('the admin listener is off, or on loopback, or has a token', async (t) => {
  t.equal(load(`${UPSTREAM}admin: { listen: none }\n`).admin.listen, null)
  for (const host of ['127.0.0.1', '127.9.9.9', 'localhost', '"[::1]']) {
    t.ok(
      load(`${UPSTREAM}admin: { listen: ${host}:1${host.startsWith('"') ? '"' : ''} }\n`).admin.listen,
      host,
    )
  }
  for (const host of ['0.0.0.0', '10.0.0.1', 'example.com', '"[::]']) {
    const text = `${UPSTREAM}admin: { listen: ${host}:1${host.startsWith('"') ? '"' : ''} }\n`
    t.match(errorsOf(text)[0], 'without `admin.tokenFile`', host)
  }
})

void t.test('any free port is no conflict', async (t) => {
  t.equal(load(`${UPSTREAM}listen: 127.0.0.1:0\nadmin: { listen: 127.0.0.1:0 }\n`).listen.port, 0)
  t.match(load(`${UPSTREAM}listen: 127.0.0.1:9000\nadmin: { listen: 127.0.0.2:9000 }\n`).listen, {
    port: 9000,
  })
})

void t.test('a check is silent where what it compares could not be read', async (t) => {
  const errors = errorsOf(
    'upstream: { url: http://a, timeout: 2days }\ndefaults: { ttl: 1s, respondWithin: 90s }\n',
  )
  t.strictSame(errors.length, 1)
  t.match(errors[0], 'upstream.timeout')
})

void t.test('upstream addresses are an origin or a socket', async (t) => {
  const url = (text: string): string => load('', { flags: { upstream: text } }).upstream.url
  t.equal(url('HTTP://Example.com:80/'), 'http://example.com')
  t.equal(url('https://[::1]:3000'), 'https://[::1]:3000')
  t.equal(url('http://my_app:3000'), 'http://my_app:3000')
  t.equal(url('unix:/run/app.sock'), 'unix:/run/app.sock')
})

void t.test('a JWK Set comes by https, or from this machine', async (t) => {
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
  for (const url of [
    'http://localhost.example.com/jwks',
    'http://10.0.0.1/jwks',
    'http://127.0.0.1@id.example.com/jwks',
    'https://user@id.example.com/jwks',
    'https://',
    'https:///jwks',
    'https://id.example.com:0/jwks',
    'https://id.example.com/a b',
    'file:///jwks',
    'data:application/json,{}',
  ])
    t.match(
      errorsOf(text(url)),
      [/routes\[0\]\.scope\.jwt\.jwks: found .*; allowed: none, or the https:\/\/ URL/],
      url,
    )
})

void t.test('what is wrong with a file of keys is told with the place where it is named', async (t) => {
  const file = join(t.testdir(), 'keys')
  const { privateKey } = generateKeyPairSync('ed25519')
  writeFileSync(file, privateKey.export({ type: 'pkcs8', format: 'pem' }))
  const errors = errorsOf(routeFile(`scope: { caller: "jwt:sub", jwt: { keyFile: ${file} } }`))
  t.equal(errors.length, 1)
  t.match(errors[0], `c.yaml:5:49: routes[0].scope.jwt.keyFile: found a private key in "`)
  t.match(errors[0], '; allowed: one public key or X.509 certificate in PEM, a JWK or a JWK Set')
})

void t.test('paths of the proxy itself are exact and normal', async (t) => {
  const text = (path: string): string => `${UPSTREAM}status: { path: ${JSON.stringify(path)} }\n`
  for (const path of ['/a', '/v1/caf%C3%A9:batch', '/~a/-']) t.equal(load(text(path)).status.path, path)
  for (const path of [
    '',
    '/',
    '//a',
    '/a//b',
    '/a/',
    '/a/./b',
    '/a/../b',
    '/a%2e',
    '/%2f',
    '/a/:id',
    '/a/*',
    '/a?b',
    '/a#b',
    '/a b',
    '/é',
  ])
    t.match(errorsOf(text(path)), [/status\.path: found .*; allowed: off, or one exact path/], path)
})

void t.test('stores that this version opens', async (t) => {
  for (const url of [
    'memory:',
    'sqlite:./a.db',
    'sqlite:/var/lib/a.db',
    'redis://h',
    'redis://:p@h:1/2',
    'rediss://u:p@h/',
  ]) {
    t.equal(load('', { flags: { upstream: 'http://a', store: url, service: 'a' } }).store.url, url)
  }
})

void t.test('a configuration file that cannot be read is an error of the configuration', async (t) => {
  const told = (file: string): string => {
    const read = readConfigFile(file)
    return read.ok ? read.text : formatConfigError(read.error)
  }
  t.equal(told('absent.yaml'), 'absent.yaml: found no such file; allowed: a readable file of YAML in UTF-8')
  t.equal(told('config'), 'config: found a directory; allowed: a readable file of YAML in UTF-8')
  t.equal(
    told(process.execPath),
    `${process.execPath}: found bytes that are not UTF-8; allowed: a readable file of YAML in UTF-8`,
  )
  t.match(told('config/minimal.yaml'), 'upstream:')
})

void t.test('V05 the proxy’s own address as a flag is refused, too', async (t) => {
  for (const flags of [
    { upstream: 'http://localhost:8080' },
    { upstream: 'http://[::1]:9000', listen: '[::]:9000' },
    { upstream: 'http://proxy:80', listen: 'proxy:80' },
    { upstream: 'http://127.0.0.1:9464' },
  ]) {
    const loaded = loadConfig({ text: '', env: {}, flags })
    t.match(loaded.ok ? [] : loaded.errors.map(formatConfigError), [
      /^--upstream: upstream\.url: .*listens on itself/,
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
