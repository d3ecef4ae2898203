import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { chmodSync, existsSync, readFileSync, writeFileSync } from 'node:fs'
import { createServer, type Server } from 'node:http'
import type { AddressInfo } from 'node:net'
import { join } from 'node:path'
import { text } from 'node:stream/consumers'
import { fileURLToPath } from 'node:url'
import t, { type Test } from 'tap'
import { configFile, newKey, send, tempDir } from './support/e2e.ts'
import { proxyProcess } from './support/proxy.ts'
import { upstreamStub } from './support/upstream.ts'

// Some thirty processes are started, one after the other, on a machine that may do other things.
t.setTimeout(300_000)

const CLI = fileURLToPath(new URL('../src/cli.ts', import.meta.url))

interface Run {
  readonly code: number | null
  readonly out: string
  readonly err: string
}

async function run(
  args: readonly string[],
  options: { cwd?: string; env?: Record<string, string> } = {},
): Promise<Run> {
  const child = spawn(process.execPath, [CLI, ...args], {
    ...(options.cwd === undefined ? {} : { cwd: options.cwd }),
    env: { ...process.env, NODE_V8_COVERAGE: '', ...options.env },
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  const ended = once(child, 'close')
  const [out, err] = await Promise.all([text(child.stdout), text(child.stderr)])
  const [code] = (await ended) as [number | null]
  return { code, out, err }
}

void t.test(
  '--help names the commands and options, and works after a command too (test/commands/usage.test.ts)',
  async (t) => {
    const ways = [['--help'], ['-h'], ['serve', '--help'], ['check', '--help'], ['--config', 'x', '--help']]
    const runs = await Promise.all(ways.map(async (args) => ({ args, ...(await run(args)) })))
    for (const { args, code, out, err } of runs) {
      t.strictSame([code, err], [0, ''], args.join(' '))
      for (const word of ['--config', '--upstream', '--listen', '--store'])
        t.ok(out.includes(word), `${args.join(' ')} mentions ${word}`)
    }
    for (const word of [
      'check',
      'schema',
      'doctor',
      'list',
      'inspect',
      'resolve',
      'report',
      'drain',
      'Exit codes',
    ])
      t.ok(runs[0]?.out.includes(word), word)
  },
)

void t.test('--version prints the version of package.json', async (t) => {
  const { version } = JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8'))
  t.strictSame(await run(['--version']), { code: 0, out: `${version}\n`, err: '' })
})

void t.test('a usage error exits 2, names what is wrong and points at --help', async (t) => {
  const cases: [string[], RegExp][] = [
    [[], /--config FILE or --upstream URL/],
    [['serve'], /--config FILE or --upstream URL/],
    [['nonsense'], /unknown command "nonsense".*serve.*check.*schema/],
    [['--nonsense'], /--nonsense/],
    [['check', '--nonsense'], /--nonsense/],
    [['schema', '--nonsense'], /--nonsense/],
    [['schema', 'extra'], /extra/],
    [['check'], /needs a file/],
    [['check', 'a.yaml', 'b.yaml'], /one file/],
    [['--upstream'], /--upstream/],
    [['serve', '--upstream', 'http://127.0.0.1:1', 'extra'], /unexpected argument "extra"/],
    [['--upstream', 'http://127.0.0.1:1', 'extra'], /unexpected argument "extra"/],
  ]
  const runs = await Promise.all(cases.map(async ([args, says]) => ({ args, says, ...(await run(args)) })))
  for (const { args, says, code, out, err } of runs) {
    t.strictSame([code, out], [2, ''], args.join(' ') || 'nothing')
    t.match(err, says)
    t.match(err, /--help/)
  }
})

void t.test('schema prints the published JSON Schema', async (t) => {
  const { code, out, err } = await run(['schema'])
  t.strictSame([code, err], [0, ''])
  t.match(JSON.parse(out), { type: 'object', properties: { upstream: {}, routes: {} } })
})

const BROKEN = `upstream: { url: "ftp://x" }
stor: { url: "memory:" }
defaults: { lease: 1ms, profil: strict }
`

void t.test('check lists all errors at once, each with file, line and column, and exits 1', async (t) => {
  const dir = tempDir(t)
  const good = join(dir, 'good.yaml')
  const bad = join(dir, 'bad.yaml')
  writeFileSync(good, 'upstream: { url: "http://127.0.0.1:3000" }\ndefaults: { onLeaseExpired: retry }\n')
  writeFileSync(bad, BROKEN)
  const fine = await run(['check', good])
  t.strictSame([fine.code, fine.out], [0, `${good}: fine\n`])
  t.match(fine.err, /warning: .*onLeaseExpired retry/)
  t.equal((await run(['check', '--config', good])).code, 0)
  for (const args of [
    ['check', bad],
    ['--config', bad],
    ['serve', '--config', bad],
  ]) {
    const { code, out, err } = await run(args)
    t.strictSame([code, out], [1, ''], args.join(' '))
    for (const place of ['1:', '2:', '3:']) t.ok(err.includes(`${bad}:${place}`), `an error in line ${place}`)
    for (const word of ['upstream.url', 'stor', 'defaults.lease', 'defaults.profil'])
      t.ok(err.includes(word), word)
  }
  const missing = await run(['check', join(dir, 'none.yaml')])
  t.equal(missing.code, 1)
  t.match(missing.err, /none\.yaml/)
  t.notMatch(missing.err, /\n\s+at /, 'no stack')
  t.equal((await run(['--config', dir])).code, 1, 'a folder is not a file')
})

async function listener(t: Test): Promise<number> {
  const server: Server = createServer().listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => server.close())
  return (server.address() as AddressInfo).port
}

/** The one fatal line of a process that could not start. */
function fatal(t: Test, { code, out, err }: Run): string {
  t.equal(code, 1)
  t.equal(err, '')
  const lines = out
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line) as { level: string; msg: string })
  const last = lines.at(-1)
  t.equal(last?.level, 'fatal')
  t.match(last?.msg, /^cannot start: /)
  return last?.msg ?? ''
}

void t.test('an address in use fails the start with a clear sentence, exit 1', async (t) => {
  const dir = tempDir(t)
  const port = await listener(t)
  const settings = 'upstream: { url: "http://127.0.0.1:3000" }\nstore: { url: "memory:" }\n'
  for (const [name, listen] of Object.entries({
    traffic: `listen: 127.0.0.1:${port}\nadmin: { listen: none }`,
    admin: `listen: 127.0.0.1:0\nadmin: { listen: 127.0.0.1:${port} }`,
    ops: `listen: 127.0.0.1:0\nadmin: { listen: none }\nops: { listen: 127.0.0.1:${port} }`,
  })) {
    const file = join(dir, `${name}.yaml`)
    writeFileSync(file, `${settings}${listen}\n`)
    t.match(
      fatal(t, await run(['--config', file])),
      new RegExp(`${name === 'traffic' ? '' : `${name}.`}listen: .*${port}`),
      name,
    )
  }
})

void t.test(
  'V02 on a shared store without a service every command fails with the same sentence, exit 1',
  async (t) => {
    const file = join(tempDir(t), 'proxy.yaml')
    writeFileSync(file, 'upstream: { url: "http://127.0.0.1:3000" }\nstore: { url: "redis://127.0.0.1:1" }\n')
    const sentence =
      /store\.url: found a store that other services can share, and no `service` .*; write `service: payments`, or give --service payments\n$/
    for (const words of [['serve'], ['check'], ['doctor'], ['list']]) {
      const said = await run([...words, '--config', file])
      t.match(said, { code: 1, out: '', err: sentence }, words.join(' '))
      t.equal(said.err.split('\n').length, 2, 'one line')
    }
    const flags = ['--upstream', 'http://127.0.0.1:3000', '--store', 'redis://127.0.0.1:1']
    t.match(await run(flags), { code: 1, err: /^--store: store\.url: found a store that other services/ })
    t.match(await run(['check', file, '--service', 'payments']), { code: 0, out: /: fine\n$/ })
  },
)

void t.test('an unopenable embedded store fails the start with a clear sentence, exit 1', async (t) => {
  const dir = tempDir(t)
  const serve = (store: string) =>
    run(['--upstream', 'http://127.0.0.1:3000', '--listen', '127.0.0.1:0', '--store', store], { cwd: dir })
  t.match(fatal(t, await serve('sqlite:none/x.db')), /none/)
  t.match(fatal(t, await serve(`sqlite:${dir}`)), /cannot open the store/)
  writeFileSync(join(dir, 'other.db'), 'this is no database, and it is long enough to be one'.repeat(20))
  t.match(fatal(t, await serve('sqlite:other.db')), /other\.db/)
  const locked = join(dir, 'locked.db')
  writeFileSync(locked, '')
  chmodSync(locked, 0o444)
  // Permissions do not bind root.
  if (process.getuid?.() !== 0) t.match(fatal(t, await serve('sqlite:locked.db')), /locked\.db/)
})

void t.test('an unreadable TLS file fails the start with a clear sentence, exit 1', async (t) => {
  const dir = tempDir(t)
  const file = configFile(dir, `upstream: { url: "https://127.0.0.1:1", tls: { ca: ${dir}/none.pem } }`)
  const { code, out, err } = await run(['--config', file])
  t.equal(code, 1)
  t.match(`${out}${err}`, /none\.pem/)
  t.notMatch(`${out}${err}`, /\n\s+at /)
})

void t.test('with only --upstream it runs on the embedded store; flags override the file', async (t) => {
  const upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end('done'))
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const dir = tempDir(t)
  const flags = ['--upstream', upstream.url, '--listen', '127.0.0.1:0']
  const child = spawn(process.execPath, [CLI, ...flags], {
    cwd: dir,
    env: { ...process.env, NODE_V8_COVERAGE: '' },
    stdio: ['ignore', 'pipe', 'ignore'],
  })
  t.teardown(() => child.kill('SIGKILL'))
  let log = ''
  const listening = await new Promise<{ url: string; store: string }>((resolve) =>
    child.stdout.on('data', (chunk: Buffer) => {
      log += chunk.toString()
      const line = log.split('\n').find((one) => one.includes('"msg":"listening"'))
      if (line !== undefined) resolve(JSON.parse(line))
    }),
  )
  t.equal(listening.store, 'sqlite')
  // The signal that people send for a reload must not end it in mid-request.
  child.kill('SIGHUP')
  const key = newKey()
  t.equal((await send(listening, key)).status, 201)
  t.ok((await send(listening, key)).replayed)
  t.ok(existsSync(join(dir, 'idempotency.db')), 'in the working directory')
  t.match(log, 'SIGHUP does nothing')
  const exited = once(child, 'exit')
  child.kill('SIGINT')
  t.strictSame(await exited, [0, null])

  const file = configFile(
    dir,
    'upstream: { url: "http://127.0.0.1:1" }\nstore: { url: "redis://127.0.0.1:1" }\n',
  )
  await using proxy = await proxyProcess(file, ['--upstream', upstream.url, '--store', 'memory:'])
  t.match(
    proxy.log.find(({ msg }) => msg === 'listening'),
    { store: 'memory', upstream: upstream.url },
  )
  t.equal((await send(proxy, newKey())).status, 201)
})

void t.test('the log has one JSON line per protected request, with what happened to it', async (t) => {
  const upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end('done'))
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const file = configFile(tempDir(t), `upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\n`)
  await using proxy = await proxyProcess(file)
  const key = newKey()
  const trace = '4bf92f3577b34da6a3ce929d0e0e4736'
  const headers = { traceparent: `00-${trace}-00f067aa0ba902b7-01` }
  await send(proxy, key, { headers })
  await send(proxy, key)
  const misuse = await send(proxy, key, { body: '{"amount":2}' })
  await send(proxy, null)
  await send(proxy, '""', { method: 'PATCH' })
  const lines = () => proxy.log.filter(({ msg }) => msg === 'request')
  await proxy.logged(({ outcome }) => outcome === 'key_invalid')
  t.match(lines(), [
    {
      method: 'POST',
      outcome: 'executed',
      before: 'absent',
      after: 'completed',
      status: 201,
      traceId: trace,
    },
    { outcome: 'replayed', before: 'completed', after: 'completed', status: 201 },
    { outcome: 'misuse', status: 422 },
    { method: 'PATCH', outcome: 'key_invalid', status: 400, record: null },
  ])
  t.equal(lines().length, 4, 'a pass-through request has no such line')
  const { instance } = JSON.parse(misuse.body) as { instance: string }
  for (const line of lines().slice(0, 3)) {
    t.equal(line['record'], instance.slice(0, 12))
    t.strictSame([line['route'], line['level']], ['default', 'info'])
    for (const member of ['ms', 'upstreamMs', 'storeMs']) t.type(line[member], 'number')
    t.match(line['time'], /^\d{4}-\d\d-\d\dT/)
  }
  t.type(lines()[0]?.['fence'], 'number')
})
