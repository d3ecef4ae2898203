import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { commandHelp } from '../../src/commands/command.ts'
import { COMMANDS } from '../../src/commands/dispatch.ts'
import { command } from '../support/commands.ts'
import { tempDir } from '../support/e2e.ts'

const ID = 'A'.repeat(43)

/** Writes a file into the folder, and says where. */
const filesIn =
  (dir: string) =>
  (name: string, content: string): string => {
    writeFileSync(join(dir, name), content)
    return join(dir, name)
  }

t.test('every command answers --help and -h with all its flags on standard output, exit 0', async (t) => {
  for (const [name, load] of Object.entries(COMMANDS)) {
    const own = await load()
    t.equal(own.name, name)
    for (const flag of ['--help', '-h']) {
      const { code, out, err } = await command([name, flag])
      t.strictSame([code, err], [0, ''], `${name} ${flag}`)
      for (const option of Object.keys(own.options))
        t.ok(out.includes(`--${option}`), `${name} shows --${option}`)
      for (const way of own.usage) t.ok(out.includes(`idempotency-proxy ${way}\n`))
    }
  }
  for (const words of [['--help'], ['-h']]) {
    const { code, out, err } = await command(words)
    t.strictSame([code, err], [0, ''])
    for (const name of [
      ...Object.keys(COMMANDS),
      '--config',
      '--upstream',
      '--listen',
      '--store',
      'Exit codes',
    ])
      t.ok(out.includes(name), `the general help names ${name}`)
  }
  t.match(await command(['--config', 'x', '--help']), { code: 0, out: /--upstream/, err: '' })
})

void t.test('--version prints that of package.json, and schema the published JSON Schema', async (t) => {
  const { version } = JSON.parse(readFileSync(new URL('../../package.json', import.meta.url), 'utf8'))
  t.strictSame(await command(['--version']), { code: 0, out: `${version}\n`, err: '' })
  const schema = readFileSync(new URL('../../schema/idempotency-proxy.schema.json', import.meta.url), 'utf8')
  t.strictSame(await command(['schema']), { code: 0, out: schema, err: '' })
})

t.test('docs/cli.md has the help of every command, word for word, and shared options once', async (t) => {
  const text = readFileSync(new URL('../../docs/cli.md', import.meta.url), 'utf8')
  const plain = (line: string) => line.replaceAll(/\s+/g, ' ')
  const shared = [...text.matchAll(/```text\n( {2}--.*?)\n```/gs)].flatMap(([, block = '']) =>
    block.split('\n').map(plain),
  )
  const all = await Promise.all(Object.values(COMMANDS).map(async (load) => commandHelp(await load())))
  for (const line of shared) t.ok(all.filter((help) => plain(help).includes(line)).length > 1, line)
  const own = (help: string) =>
    help
      .split('\n')
      .filter(
        (line) => !/^ {2}--/.test(line) || ![...shared, ' --help, -h prints this'].includes(plain(line)),
      )
      .join('\n')
      .trimEnd()
  const blocks = [...text.matchAll(/```text\n(idempotency-proxy .*?)\n```/gs)].map(([, block]) => block)
  t.strictSame(new Set(blocks), new Set(all.map(own)), 'as --help prints it: node src/cli.ts COMMAND --help')
})

void t.test('migrate --print prints the PostgreSQL schema', async (t) => {
  const { code, out, err } = await command(['migrate', '--print'])
  t.strictSame([code, err], [0, ''])
  t.match(out, /^BEGIN;.*CREATE SCHEMA idempotency;.*^COMMIT;\n$/ms)
})

void t.test('check --against names what a reload refuses, and then exits 1', async (t) => {
  const dir = tempDir(t)
  const file = (name: string, content: string): string => {
    writeFileSync(join(dir, name), `upstream: { url: "http://127.0.0.1:3000" }\n${content}\n`)
    return join(dir, name)
  }
  const old = file('old.yaml', 'routes: [{ name: pay, match: { path: /pay } }]')
  const live = file('live.yaml', 'routes: [{ name: pay, match: { path: /pay }, ttl: 48h, ttlFailed: 1h }]')
  const ttl = '  routes[pay].ttl: 24h → 2d\n  routes[pay].ttlFailed: 24h → 1h\n'
  const applied = { code: 0, out: `${live}: fine; a reload applies all of it\n${ttl}` }
  t.match(await command(['check', live, '--against', old]), applied)
  const ignoring = 'routes: [{ name: pay, match: { path: /pay }, key: ignored }]'
  const other = file('other.yaml', `status: { path: /s }\n${ignoring}`)
  const identifies = 'changes which record a request finds: restart, after ttl has passed'
  t.match(await command(['check', other, '--against', old]), {
    code: 1,
    out: `routes[pay].key.presence: optional → ignored: ${identifies}\nstatus.path: off → /s: needs a restart\n`,
  })
  const shared = ['--store', 'redis://127.0.0.1:1', '--service', 'pay']
  t.match(
    await command(['check', other, '--against', old, ...shared]),
    {
      code: 1,
      out: /\nroutes\[pay\]\.match: replicas with this file do not claim until .* all at once \(Recreate\), or start with --accept-rescope, and keys of pay may execute twice\n$/,
    },
    'Y20 on a shared store',
  )
  t.match(await command(['check', live, '--against', old, ...shared]), { code: 0 })
  const broken = file('broken.yaml', 'nonsense: 1')
  for (const words of [
    [old, '--against', broken],
    [broken, '--against', old],
  ]) {
    const said = await command(['check', ...words])
    t.strictSame([said.code, said.out], [1, ''])
    t.match(said.err, 'broken.yaml:2:1: nonsense: found the unknown property')
  }
  const flagged = await command(['check', old, '--against', old, '--upstream', 'http://127.0.0.1:1'])
  t.match(flagged, { code: 0 }, 'flags override both')
})

void t.test('a usage error exits 2 and says what was found and what is allowed', async (t) => {
  const dir = tempDir(t)
  const file = filesIn(dir)
  const token = file('token', 'right-token\n')
  const memory = file('memory.yaml', 'upstream: { url: "http://127.0.0.1:1" }\nstore: { url: "memory:" }\n')
  const store = '--store sqlite:none.db'
  const by = `--reason why --yes ${store}`
  const admin = '--admin http://127.0.0.1:1'
  const upstream = '--upstream http://127.0.0.1:1'
  /** What `resolve --completed` says of a file. */
  const completed = (name: string, content: string): string =>
    `resolve ${ID} --completed ${file(name, content)} ${by}`
  // "~" is a blank within a word.
  // biome-ignore format: a table
  const cases: [string, RegExp][] = [
    ['', /nothing to serve: give --config FILE or --upstream URL/],
    ['serve', /nothing to serve: give --config FILE or --upstream URL/],
    ['nonsense', /unknown command "nonsense".*serve.*check.*schema/],
    ['--nonsense', /: unknown option --nonsense; allowed: --.*\n/],
    ['check --nonsense', /: unknown option --nonsense; allowed: --.*\n/],
    ['schema --nonsense', /: unknown option --nonsense; allowed: --.*\n/],
    ['list --nonsense', /: unknown option --nonsense; allowed: --.*\n/],
    ['--upsteam http://127.0.0.1:1', /: unknown option --upsteam; did you mean --upstream\?\n/],
    ['check --port 80', /: unknown option --port; did you mean --listen\?\n/],
    ['list -z', /: unknown option -z; allowed: --.*\n/],
    ['--upstream', /--upstream/],
    ['schema extra', /extra/],
    ['check', /needs a file/],
    ['check a.yaml b.yaml', /one file/],
    [`serve ${upstream} extra`, /unexpected argument "extra"/],
    [`${upstream} extra`, /unexpected argument "extra"/],
    [`list extra ${store}`, /list takes no argument, found 1/],
    [`list --limit 0 ${store}`, /--limit: found "0"; allowed: a whole number from 1/],
    [`list --limit 1 --limit 2 ${store}`, /--limit is given more than once; allowed: once/],
    ['list', /no source given: use --admin URL --token-file FILE, --config FILE, or --store URL/],
    [`list ${admin} ${store}`, /found --admin and --store; allowed: --admin, or/],
    [`list ${admin}`, /--admin needs --token-file FILE/],
    [`list --token-file ${token}`, /found --token-file without --admin URL/],
    [`inspect ${ID} --store redis://127.0.0.1:1`,
      /: --service NAME is required: several services may share this/],
    [`list --config ${memory}`, /memory:, which only its own process can see; allowed: --admin URL/],
    ['list --store memory:', /memory:, which only its own process can see; allowed: --admin URL/],
    ...['127.0.0.1:9464', 'ftp://h', 'http://h/path', 'http://u:p@h', 'http://h?q'].map(
      (url): [string, RegExp] => [
        `list --admin ${url} --token-file ${token}`,
        /--admin: found "[^"]*"; allowed: http:\/\/host:port or https:\/\/host:port, no path/,
      ],
    ),
    [`list ${admin} --token-file ${dir}/none`,
      /--token-file: found no such file at ".*none"; allowed: a readable file/],
    [`list ${admin} --token-file ${file('blank', 'two words\n')}`,
      /--token-file: found something else on line 1 in ".*blank"; allowed: one token per line, in printable ASCII/],
    [`inspect ${store}`, /inspect needs the id of a record, or a key/],
    [`inspect a b ${store}`, /inspect takes one id or key, found 2 arguments/],
    [`inspect my-secret-key! ${store}`, /found neither a record id nor the first 8 or more .* a key needs --method/],
    [`inspect k --caller no~line ${store}`, /--caller: found neither "Name: value", nor/],
    [`inspect k --caller {"sub":[1]} ${store}`, /--caller: found no JSON object of strings/],
    [`inspect k --caller { ${store}`, /--caller: found no JSON object of strings/],
    [`inspect k --caller @${dir}/none ${store}`, /--caller: found a file that cannot be read at ".*none"/],
    [`resolve ${by}`, /resolve needs a whole record id of 43 characters; inspect finds it/],
    [`resolve a-key ${by}`, /a whole record id of 43 characters, which this is not; inspect finds it/],
    [`resolve ${ID} ${ID} ${by}`, /resolve takes one record id, found 2 arguments/],
    [`resolve ${ID} ${by}`, /found neither; allowed: --completed FILE or --retryable/],
    [`resolve ${ID} --retryable --completed x ${by}`, /found both; allowed: --completed FILE or --retryable/],
    [`delete ${by}`, /delete needs a whole record id of 43 characters/],
    [`delete ${ID} --yes ${store}`, /--reason is required; it goes into the audit log/],
    [`resolve ${ID} --retryable --yes ${store}`, /--reason is required; it goes into the audit log/],
    [`resolve ${ID} --retryable --reason ~ --yes ${store}`, /--reason is required/],
    [`resolve ${ID} --retryable --version v1 ${by}`, /--version: found "v1"; allowed: a whole number/],
    [`resolve ${ID} --retryable --reason x ${store}`, /no terminal for the confirmation: add --yes/],
    [`resolve ${ID} --retryable ${by}`, /found --store alone; allowed: with --config FILE, or --admin URL/],
    [`resolve ${ID} --completed ${dir}/none ${by}`, /--completed: ".*none": found ENOENT.*allowed: \{"status"/],
    [completed('t.json', 'x'), /"[^"]*t.json": found no JSON in UTF-8; allowed/],
    [completed('u.json', '\xff'), /found no JSON in UTF-8/],
    [completed('e.json', '{}'), /e.json": \/response: must have required properties status/],
    [completed('s.json', '{"status":99}'), /s.json": \/response\/status: must be >= 200/],
    [completed('o.json', '{"status":200,"headers":{"a":"b"}}'),
      /o.json": \/response\/headers: must be array, such as \[\["Content-Type","application\/json"\]\];/],
    [completed('m.json', '{"status":200,"more":1}'), /m.json": \/response\/more: .*; allowed: \{"status", "headers"/],
    [completed('b.json', '{"status":200,"body":"","bodyBase64":""}'),
      /b.json": \/response: found body and bodyBase64; allowed: one of them/],
    [completed('h.json', '{"status":200,"headers":[["a b","c"]]}'),
      /h.json": \/response\/headers\/0: not a header line/],
    [`report x ${store}`, /report takes no argument, found 1/],
    [`report --format xml ${store}`, /--format: found "xml"; allowed: text, json, csv, markdown/],
    [`report --format csv --json ${store}`, /found --json and --format; allowed: one of them/],
    [`report --log none ${store}`, /found --log and --store; allowed: one of them/],
    ['report --log none --since yesterday', /--since: found "yesterday"; allowed: more than 0, such as 90m/],
    ['report --log none --since 0', /--since: found "0"/],
    ['doctor', /nothing to check: give --config FILE or --store URL, or --admin URL --token-file FILE/],
    [`doctor x ${store}`, /doctor takes no argument, found 1/],
    [`doctor --token-file ${token} ${store}`, /found --token-file without --admin URL/],
    ['drain', /drain needs the running proxy: --admin URL --token-file FILE/],
    ['undrain', /undrain needs the running proxy: --admin URL --token-file FILE/],
    ['drain x', /drain takes no argument, found 1/],
    [`drain --config ${memory}`, /--config/],
    ['migrate', /migrate: found nothing; allowed: --print/],
  ]
  for (const [line, says] of cases) {
    const words = line === '' ? [] : line.split(' ').map((word) => word.replaceAll('~', ' '))
    const { code, out, err } = await command(words)
    t.strictSame([code, out], [2, ''], line)
    t.match(err, says)
    t.match(err, /Try --help/)
    t.notMatch(err, /my-secret-key/)
  }
})

void t.test('check and serve list all errors at once, with file, line and column, exit 1', async (t) => {
  const dir = tempDir(t)
  const file = filesIn(dir)
  const retry = 'defaults: { onLeaseExpired: retry }'
  const good = file('good.yaml', `upstream: { url: "http://127.0.0.1:3000" }\n${retry}\n`)
  const warned = { code: 0, out: `${good}: fine\n`, err: /warning: .*onLeaseExpired retry/ }
  t.match(await command(['check', good]), warned)
  t.match(await command(['check', '--config', good]), warned)
  const wrong = 'stor: { url: "memory:" }\ndefaults: { lease: 1ms, profil: strict }\n'
  const bad = file('bad.yaml', `upstream: { url: "ftp://x" }\n${wrong}`)
  const tls = file('tls.yaml', `upstream: { url: "https://127.0.0.1:1", tls: { ca: ${dir}/none.pem } }\n`)
  for (const ways of [['check'], ['--config'], ['serve', '--config']]) {
    const { code, out, err } = await command([...ways, bad])
    t.strictSame([code, out], [1, ''], ways.join(' '))
    for (const found of ['1:18: upstream.url', '2:1: stor', '3:20: defaults.lease', '3:25: defaults.profil'])
      t.ok(err.includes(`${bad}:${found}: found `), found)
    t.match(await command([...ways, tls]), { code: 1, out: '', err: /none\.pem/ })
    for (const none of [join(dir, 'none.yaml'), dir]) {
      const said = await command([...ways, none])
      t.match(said, { code: 1, out: '', err: /found (no such file|a directory)/ }, none)
      t.notMatch(said.err, /\n\s+at /, 'no stack')
    }
  }
})

void t.test('V02 on a shared store without a service all commands say one sentence, exit 1', async (t) => {
  const file = join(tempDir(t), 'proxy.yaml')
  writeFileSync(file, 'upstream: { url: "http://127.0.0.1:3000" }\nstore: { url: "redis://127.0.0.1:1" }\n')
  const sentence =
    /^\S+: store\.url: found a store that other services can share, and no `service` .*; write `service: NAME`, or give --service NAME, a name that no other API on this store has\n$/
  for (const name of ['serve', 'check', 'doctor', 'list'])
    t.match(await command([name, '--config', file]), { code: 1, out: '', err: sentence }, name)
  const flags = ['--upstream', 'http://127.0.0.1:3000', '--store', 'redis://127.0.0.1:1']
  t.match(await command(flags), { code: 1, err: /^--store: store\.url: found a store that other services/ })
  t.match(await command(['check', file, '--service', 'payments']), { code: 0, out: /: fine\n$/ })
})

void t.test('an error names the flag that npm kept for itself', async (t) => {
  const npm = { npm_lifecycle_event: 'start' }
  const url = 'http://127.0.0.1:1'
  const says = async (words: string[], env: Record<string, string>): Promise<string> =>
    (await command(words, undefined, env)).err
  const took = 'npm took the flag: write npm start -- --upstream …'
  const one = await says([url], { ...npm, npm_config_upstream: 'true' })
  t.match(one, `unknown command "${url}"; ${took}\n`)
  const both = { ...npm, npm_config_upstream: url, npm_config_store: 'memory:' }
  const nothing = 'nothing to serve: give --config FILE or --upstream URL'
  t.match(await says([], both), `${nothing}; ${took} --store …\n`)
  t.match(await says(['serve', url], both), `unexpected argument "${url}"; npm took the flag`)
  for (const env of [npm, {}, { npm_config_upstream: 'true' }])
    t.match(await says([url], env), `unknown command "${url}"; known are serve, check`)
})

void t.test('a record id may begin with a dash, like an option', async (t) => {
  const store = ['--store', 'sqlite:none.db']
  for (const id of [`-${'a'.repeat(42)}`, `--${'a'.repeat(41)}`, `-w${'-'.repeat(41)}`]) {
    for (const words of [
      ['inspect', id, ...store],
      ['inspect', ...store, id],
      ['inspect', ...store, '--', id],
    ])
      t.match(await command(words), { code: 1, err: /there is no file at/ }, words.join(' '))
    const resolve = ['resolve', id, '--retryable', '--reason', 'x', '--yes']
    t.match(await command([...resolve, ...store]), { code: 2, err: /found --store alone/ })
  }
  const key = ['--', '-key']
  const late = await command(['inspect', ...key, '--route', 'r', ...store])
  t.match(late, { code: 2, err: /takes one id or key/ })
  const last = await command(['inspect', '--route', 'r', ...store, ...key])
  t.match(last, { code: 1, err: /there is no file at/ })
})

void t.test('a configuration or a store that cannot be used is reported and exits 1', async (t) => {
  const dir = tempDir(t)
  const bad = join(dir, 'bad.yaml')
  writeFileSync(bad, 'stor: {}\nupstream: { url: "ftp://x" }\n')
  for (const name of ['list', 'report', 'doctor']) {
    const told = await command([name, '--config', bad])
    t.strictSame([told.code, told.out], [1, ''])
    t.match(told.err, /bad\.yaml:1:1: stor: found .*\n.*bad\.yaml:2:18: upstream.url: found/)
    const lost = await command([name, '--store', `sqlite:${dir}/none.db`])
    t.equal(lost.code, 1, `${name} creates no store`)
    t.match(lost.err, /there is no file at .*none\.db; a proxy creates it at startup/)
  }
  writeFileSync(join(dir, 'other.db'), 'no database, and long enough to be one'.repeat(30))
  t.match(await command(['list', '--store', `sqlite:${dir}/other.db`]), { code: 1, err: /other\.db/ })
  const unreachable = ['list', '--store', 'redis://user:hush@127.0.0.1:1']
  const down = await command([...unreachable, '--service', 'test'])
  t.match(down, { code: 1, err: /the store redis:\/\/\*\*\*@127.0.0.1:1: store_unavailable: .*ECONNREFUSED/ })
  t.notMatch(down.err, /hush/)
})
