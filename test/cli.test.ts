import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync } from 'node:fs'
import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { join } from 'node:path'
import { text } from 'node:stream/consumers'
import { fileURLToPath } from 'node:url'
import { pino } from 'pino'
import t, { type Test } from 'tap'
import { start } from '../src/main.ts'
import { load } from './config/support.ts'
import { operated } from './support/commands.ts'
import { configFile, newKey, send, tempDir } from './support/e2e.ts'
import { upstreamStub } from './support/upstream.ts'

/*
 * The program as a process: its streams, exit codes and signals. What its commands say is in test/commands/.
 */

t.setTimeout(300_000)

const CLI = fileURLToPath(new URL('../src/cli.ts', import.meta.url))
const ENV = { ...process.env, NODE_V8_COVERAGE: '' }

interface Run {
  readonly code: number | null
  readonly out: string
  readonly err: string
}

async function run(program: string, ...args: readonly string[]): Promise<Run> {
  const child = spawn(program, args, { env: ENV, stdio: ['ignore', 'pipe', 'pipe'] })
  const ended = once(child, 'close')
  const [out, err] = await Promise.all([text(child.stdout), text(child.stderr)])
  const [code] = (await ended) as [number | null]
  return { code, out, err }
}

void t.test('output and errors have their own streams, and a closed pipe is a quiet end', async (t) => {
  const { where } = await operated(t, 'memory:')
  const node = process.execPath
  t.strictSame(await run(node, CLI, 'list', ...where.admin), { code: 0, out: 'no records\n', err: '' })
  const resolve = ['resolve', 'A'.repeat(43), '--retryable', '--reason', 'x', ...where.admin]
  t.match(await run(node, CLI, ...resolve), { code: 2, out: '', err: /no terminal for the confirmation/ })
  const { out, err } = await run('sh', '-c', '"$0" "$1" schema | head -c 10', node, CLI)
  t.strictSame([out.length, err], [10, ''])
})

async function usedPort(t: Test, port = 0): Promise<number> {
  const server = createServer().listen(port, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => server.close())
  return (server.address() as AddressInfo).port
}

void t.test('a proxy that cannot start says why in one fatal line, exit 1', async (t) => {
  const listen = `127.0.0.1:${await usedPort(t)}`
  const yaml = 'upstream: { url: "http://127.0.0.1:1" }\nstore: { url: "memory:" }\nadmin: { listen: none }\n'
  const flags = ['--config', configFile(tempDir(t), yaml), '--listen', listen]
  const { code, out, err } = await run(process.execPath, CLI, ...flags)
  t.strictSame([code, err], [1, ''])
  const last = JSON.parse(out.trim().split('\n').at(-1) ?? '') as object
  t.match(last, { level: 'fatal', msg: /^cannot start: listen: .*\d/, time: /^\d{4}-\d\d-\d\dT/ })
})

void t.test('an address in use or an unusable store fails the start with a clear sentence', async (t) => {
  const at = `127.0.0.1:${await usedPort(t)}`
  const free = 'listen: 127.0.0.1:0'
  for (const [name, yaml] of Object.entries({
    listen: `listen: ${at}\nadmin: { listen: none }`,
    'admin.listen': `${free}\nadmin: { listen: "${at}" }`,
    'ops.listen': `${free}\nadmin: { listen: none }\nops: { listen: "${at}" }`,
  }))
    await t.rejects(
      start(
        load(`upstream: { url: "http://127.0.0.1:1" }\nstore: { url: "memory:" }\n${yaml}`),
        pino({ level: 'silent' }),
      ),
      { message: new RegExp(`^${name}: .*${at.split(':')[1]}; give .${name}. another address`) },
    )
  // What cannot be a database is in test/store/sqlite.test.ts.
  const none = `upstream: { url: "http://127.0.0.1:1" }\nstore: { url: "sqlite:${tempDir(t)}/none/x.db" }\n${free}`
  await t.rejects(start(load(none), pino({ level: 'silent' })), { message: /none/ })
})

void t.test('with only --upstream it runs on the embedded store; SIGINT ends it, not SIGHUP', async (t) => {
  // Somebody else's proxy may have the default address of the admin listener.
  const isFree = await fetch('http://127.0.0.1:9464').then(
    () => false,
    () => true,
  )
  if (!isFree) return void t.pass('127.0.0.1:9464 is in use on this machine', { skip: true })
  const upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end('done'))
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const dir = tempDir(t)
  const args = [CLI, '--upstream', upstream.url, '--listen', '127.0.0.1:0']
  const child = spawn(process.execPath, args, { cwd: dir, env: ENV, stdio: ['ignore', 'pipe', 'ignore'] })
  t.teardown(() => child.kill('SIGKILL'))
  let log = ''
  const listening = await new Promise<{ url: string; store: string }>((resolve) =>
    child.stdout.on('data', (chunk: Buffer) => {
      log += chunk.toString()
      const line = log.split('\n').find((one) => one.includes('"msg":"listening"'))
      if (line?.endsWith('}')) resolve(JSON.parse(line))
    }),
  )
  t.match(listening, { store: 'sqlite', level: 'info', time: /^\d{4}-\d\d-\d\dT/ })
  // The signal that people send for a reload must not end it in mid-request.
  child.kill('SIGHUP')
  const key = newKey()
  t.equal((await send(listening, key)).status, 201)
  t.ok((await send(listening, key)).replayed)
  t.ok(existsSync(join(dir, 'idempotency.db')), 'in the working directory')
  const exited = once(child, 'close')
  child.kill('SIGINT')
  t.strictSame(await exited, [0, null])
  t.match(log, 'SIGHUP does nothing')
})
