import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { commandHelp } from '../../src/commands/command.ts'
import { COMMANDS } from '../../src/commands/dispatch.ts'
import { command } from '../support/commands.ts'
import { tempDir } from '../support/e2e.ts'

const ID = 'A'.repeat(43)

void t.test(
  'every command answers --help and -h with all its flags, on standard output, and exits 0',
  async (t) => {
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
    const { code, out } = await command(['--help'])
    t.equal(code, 0)
    for (const name of Object.keys(COMMANDS)) t.ok(out.includes(name), `the general help names ${name}`)
  },
)

void t.test('docs/cli.md has the help of every command, word for word', async (t) => {
  const text = readFileSync(new URL('../../docs/cli.md', import.meta.url), 'utf8')
  const blocks = [...text.matchAll(/```text\n(idempotency-proxy .*?)```/gs)].map(([, block]) => block)
  const helps = await Promise.all(Object.values(COMMANDS).map(async (load) => commandHelp(await load())))
  t.strictSame(new Set(blocks), new Set(helps), 'as --help prints it: node src/cli.ts COMMAND --help')
})

void t.test('migrate --print prints the PostgreSQL schema, and migrate alone is refused', async (t) => {
  const { code, out, err } = await command(['migrate', '--print'])
  t.strictSame([code, err], [0, ''])
  t.match(out, /^BEGIN;.*CREATE SCHEMA idempotency;.*^COMMIT;\n$/ms)
  t.match(await command(['migrate']), { code: 2, err: /migrate: found nothing; allowed: --print/ })
})

void t.test('check --against names what a reload refuses, and then exits 1', async (t) => {
  const dir = tempDir(t)
  const file = (name: string, content: string): string => {
    writeFileSync(join(dir, name), `upstream: { url: "http://127.0.0.1:3000" }\n${content}\n`)
    return join(dir, name)
  }
  const old = file('old.yaml', 'routes: [{ name: pay, match: { path: /pay } }]')
  const live = file('live.yaml', 'routes: [{ name: pay, match: { path: /pay }, ttl: 48h, ttlFailed: 1h }]')
  t.match(await command(['check', live, '--against', old]), {
    code: 0,
    out: [
      `${live}: fine; a reload applies all of it`,
      '  routes[pay].ttl: 24h → 48h',
      '  routes[pay].ttlFailed: 24h → 1h',
      '',
    ].join('\n'),
  })
  const other = file(
    'other.yaml',
    'drain: { delay: 1s }\nroutes: [{ name: pay, match: { path: /pay }, key: ignored }]',
  )
  t.match(await command(['check', other, '--against', old]), {
    code: 1,
    out: [
      'routes[pay].key.presence: optional → ignored: changes which record a request finds: restart, after waiting out ttl',
      'drain.delay: 0s → 1s: needs a restart',
      '',
    ].join('\n'),
  })
  const broken = file('broken.yaml', 'nonsense: 1')
  for (const words of [
    [old, '--against', broken],
    [broken, '--against', old],
  ]) {
    const said = await command(['check', ...words])
    t.strictSame([said.code, said.out], [1, ''])
    t.match(said.err, 'broken.yaml:2:1: nonsense: found the unknown property')
  }
  t.match(
    await command(['check', old, '--against', old, '--upstream', 'http://127.0.0.1:1']),
    { code: 0 },
    'flags override both',
  )
})

void t.test('a usage error exits 2 and says what was found and what is allowed', async (t) => {
  const dir = tempDir(t)
  const file = (name: string, content: string): string => {
    writeFileSync(join(dir, name), content)
    return join(dir, name)
  }
  const token = file('token', 'right-token\n')
  const memory = file('memory.yaml', 'upstream: { url: "http://127.0.0.1:1" }\nstore: { url: "memory:" }\n')
  const good = file('good.json', '{"status":200}')
  const store = ['--store', 'sqlite:none.db']
  const by = ['--reason', 'why', '--yes', ...store]
  const cases: [string[], RegExp][] = [
    [['list', '--nonsense'], /: unknown option --nonsense\n/],
    [['--upsteam', 'http://127.0.0.1:1'], /: unknown option --upsteam; did you mean --upstream\?\n/],
    [['list', '-z'], /: unknown option -z\n/],
    [['list', 'extra', ...store], /list takes no argument, found 1/],
    [['list', '--limit', '0', ...store], /--limit: found "0"; allowed: a whole number from 1/],
    [['list', '--limit', '1', '--limit', '2', ...store], /--limit is given more than once; allowed: once/],
    [['list'], /no source given: use --admin URL --token-file FILE, --config FILE, or --store URL/],
    [['list', '--admin', 'http://127.0.0.1:1', ...store], /found --admin and --store; allowed: --admin, or/],
    [['list', '--admin', 'http://127.0.0.1:1'], /--admin needs --token-file FILE/],
    [['list', '--token-file', token], /found --token-file without --admin URL/],
    [
      ['inspect', ID, '--store', 'redis://127.0.0.1:1'],
      /: --service NAME is required: several services may share this store\n/,
    ],
    [['list', '--config', memory], /memory:, which only its own process can see; allowed: --admin URL/],
    [['list', '--store', 'memory:'], /memory:, which only its own process can see; allowed: --admin URL/],
    ...['127.0.0.1:9464', 'ftp://h', 'http://h/path', 'http://u:p@h', 'http://h?q'].map(
      (url): [string[], RegExp] => [
        ['list', '--admin', url, '--token-file', token],
        /--admin: found "[^"]*"; allowed: http:\/\/host:port or https:\/\/host:port, no path/,
      ],
    ),
    [
      ['list', '--admin', 'http://127.0.0.1:1', '--token-file', join(dir, 'none')],
      /--token-file: found no such file at ".*none"; allowed: a readable file/,
    ],
    [
      ['list', '--admin', 'http://127.0.0.1:1', '--token-file', file('blank', 'two words\n')],
      /--token-file: found no token in ".*blank"; allowed: one line of printable ASCII/,
    ],
    [['inspect', ...store], /inspect needs the id of a record, or a key/],
    [['inspect', 'a', 'b', ...store], /inspect takes one id or key, found 2 arguments/],
    [
      ['inspect', 'my-secret-key!', ...store],
      /found neither a record id nor the first 8 or more characters of one .* a key needs --method/,
    ],
    [['inspect', 'k', '--caller', 'no line', ...store], /--caller: found neither "Name: value", nor/],
    [['inspect', 'k', '--caller', '{"sub": [1]}', ...store], /--caller: found no JSON object of strings/],
    [['inspect', 'k', '--caller', '{', ...store], /--caller: found no JSON object of strings/],
    [
      ['inspect', 'k', '--caller', `@${dir}/none`, ...store],
      /--caller: found a file that cannot be read at ".*none"/,
    ],
    [['resolve', ...by], /resolve needs a whole record id of 43 characters; inspect finds it/],
    [
      ['resolve', 'a-key', ...by],
      /resolve needs a whole record id of 43 characters, which this is not; inspect finds it/,
    ],
    [['resolve', ID, ID, ...by], /resolve takes one record id, found 2 arguments/],
    [['resolve', ID, ...by], /found neither; allowed: --completed FILE or --retryable/],
    [
      ['resolve', ID, '--retryable', '--completed', good, ...by],
      /found both; allowed: --completed FILE or --retryable/,
    ],
    [['delete', ...by], /delete needs a whole record id of 43 characters/],
    [['delete', ID, '--yes', ...store], /--reason is required; it goes into the audit log/],
    [['resolve', ID, '--retryable', '--yes', ...store], /--reason is required; it goes into the audit log/],
    [['resolve', ID, '--retryable', '--reason', ' ', '--yes', ...store], /--reason is required/],
    [
      ['resolve', ID, '--retryable', '--version', 'v1', ...by],
      /--version: found "v1"; allowed: a whole number/,
    ],
    [['resolve', ID, '--retryable', '--reason', 'x', ...store], /no terminal to confirm at: add --yes/],
    [
      ['resolve', ID, '--retryable', ...by],
      /found --store alone; allowed: with --config FILE, or --admin URL/,
    ],
    [
      ['resolve', ID, '--completed', join(dir, 'none'), ...by],
      /--completed: ".*none": found ENOENT.*allowed: \{"status"/,
    ],
    [
      ['resolve', ID, '--completed', file('t.json', 'x'), ...by],
      /"[^"]*t.json": found no JSON in UTF-8; allowed/,
    ],
    [['resolve', ID, '--completed', file('u.json', '\xff'), ...by], /found no JSON in UTF-8/],
    [
      ['resolve', ID, '--completed', file('e.json', '{}'), ...by],
      /e.json": \/response: must have required properties status/,
    ],
    [
      ['resolve', ID, '--completed', file('s.json', '{"status":99}'), ...by],
      /s.json": \/response\/status: must be >= 200/,
    ],
    [
      ['resolve', ID, '--completed', file('o.json', '{"status":200,"headers":{"a":"b"}}'), ...by],
      /o.json": \/response\/headers: must be array, such as \[\["Content-Type","application\/json"\]\];/,
    ],
    [
      ['resolve', ID, '--completed', file('m.json', '{"status":200,"more":1}'), ...by],
      /m.json": \/response\/more: .*; allowed: \{"status", "headers"/,
    ],
    [
      ['resolve', ID, '--completed', file('b.json', '{"status":200,"body":"","bodyBase64":""}'), ...by],
      /b.json": \/response: found body and bodyBase64; allowed: one of them/,
    ],
    [
      ['resolve', ID, '--completed', file('h.json', '{"status":200,"headers":[["a b","c"]]}'), ...by],
      /h.json": \/response\/headers\/0: not a header line/,
    ],
    [['report', 'x', ...store], /report takes no argument, found 1/],
    [['report', '--format', 'xml', ...store], /--format: found "xml"; allowed: text, json, csv, markdown/],
    [['report', '--format', 'csv', '--json', ...store], /found --json and --format; allowed: one of them/],
    [['doctor'], /nothing to check: give --config FILE or --store URL, or --admin URL --token-file FILE/],
    [['doctor', 'x', ...store], /doctor takes no argument, found 1/],
    [['doctor', '--token-file', token, ...store], /found --token-file without --admin URL/],
    [['drain'], /drain needs the running proxy: --admin URL --token-file FILE/],
    [['drain', 'x'], /drain takes no argument, found 1/],
    [['drain', '--config', memory], /--config/],
  ]
  for (const [words, says] of cases) {
    const { code, out, err } = await command(words)
    t.strictSame([code, out], [2, ''], words.join(' '))
    t.match(err, says)
    t.match(err, /Try --help/)
    t.notMatch(err, /my-secret-key/)
  }
})

void t.test('an error names the flag that npm kept for itself', async (t) => {
  const npm = { npm_lifecycle_event: 'start' }
  const url = 'http://127.0.0.1:1'
  const says = async (words: string[], env: Record<string, string>): Promise<string> =>
    (await command(words, undefined, env)).err
  t.match(
    await says([url], { ...npm, npm_config_upstream: 'true' }),
    `unknown command "${url}"; npm took the flag: write npm start -- --upstream …\n`,
  )
  const both = { ...npm, npm_config_upstream: url, npm_config_store: 'memory:' }
  t.match(
    await says([], both),
    'nothing to serve: give --config FILE or --upstream URL; npm took the flag: write npm start -- --upstream … --store …\n',
  )
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
  t.match(await command(['inspect', '--', '-key', '--route', 'r', ...store]), {
    code: 2,
    err: /takes one id or key/,
  })
  t.match(await command(['inspect', '--route', 'r', ...store, '--', '-key']), {
    code: 1,
    err: /there is no file at/,
  })
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
