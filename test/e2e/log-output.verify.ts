import { type ChildProcess, execFileSync, spawn } from 'node:child_process'
import { once } from 'node:events'
import { closeSync, constants, openSync } from 'node:fs'
import { connect, Socket } from 'node:net'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import t, { type Test } from 'tap'
import { adminYaml, ask } from '../support/admin.ts'
import { configFile, newKey, send, tempDir, until } from '../support/e2e.ts'
import { upstreamStub } from '../support/upstream.ts'

const CLI = fileURLToPath(new URL('../../src/cli.ts', import.meta.url))

interface Reader {
  readonly stdout: number | 'pipe'
  readonly of: (child: ChildProcess) => Socket
}

/** A pipe as a container runtime or a shell makes one; Node's own `pipe` is a pair of sockets. */
function fifo(t: Test): Reader {
  const path = join(tempDir(t), 'log')
  execFileSync('mkfifo', [path])
  const reading = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK)
  return {
    stdout: openSync(path, constants.O_WRONLY),
    of: () => new Socket({ fd: reading, readable: true, writable: false }),
  }
}

function socketPair(): Reader {
  return { stdout: 'pipe', of: (child) => child.stdout as Socket }
}

/** A proxy, with the log lines that were read so far. */
async function logging(t: Test, reader: Reader) {
  const upstream = await upstreamStub((_, response) => void response.writeHead(201).end('ok'))
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const yaml = `${adminYaml(t)}\nupstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\nroutes: [{ name: r, match: { path: /pay }, key: required }]`
  const child = spawn(process.execPath, [CLI, '--config', configFile(tempDir(t), yaml)], {
    stdio: ['ignore', reader.stdout, 'inherit'],
    env: { ...process.env, NODE_V8_COVERAGE: '' },
  })
  t.teardown(() => child.kill('SIGKILL'))
  if (reader.stdout !== 'pipe') closeSync(reader.stdout)
  const lines: Record<string, unknown>[] = []
  const output = reader.of(child)
  let rest = ''
  output.on('error', () => {})
  output.on('data', (chunk: Buffer) => {
    const parts = (rest + chunk.toString()).split('\n')
    rest = parts.pop() as string
    for (const part of parts) lines.push(JSON.parse(part) as Record<string, unknown>)
  })
  const exited = once(child, 'exit')
  await until(() => lines.some(({ msg }) => msg === 'listening'))
  const told = lines.find(({ msg }) => msg === 'listening') as { url: string; admin: string }
  const proxy = { url: told.url, adminUrl: told.admin }
  return {
    ...proxy,
    proxy,
    lines,
    output,
    child,
    exited,
    async dropped(): Promise<number> {
      const text = await (await fetch(`${proxy.adminUrl}/metrics`)).text()
      return Number(/^idempotency_log_lines_dropped_total (\d+)$/m.exec(text)?.[1])
    },
  }
}

type Logging = Awaited<ReturnType<typeof logging>>

/** Causes refusals, each with a log line, until lines are dropped. */
async function fill(on: Logging): Promise<void> {
  const head = 'POST /pay HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n'
  await until(async () => {
    const client = connect(Number(new URL(on.url).port), '127.0.0.1')
    let got = ''
    client.on('data', (chunk: Buffer) => {
      got += chunk.toString('latin1')
    })
    client.write(head.repeat(200))
    await until(() => got.split('HTTP/1.1 400').length > 200)
    client.destroy()
    return (await on.dropped()) > 0
  })
}

for (const [kind, make] of [
  ['a pipe', fifo],
  ['a socket', socketPair],
] as const) {
  void t.test(`V11 nobody reads standard output (${kind}): requests, /livez and admin go on`, async (t) => {
    const on = await logging(t, make(t))
    on.output.pause()
    await fill(on)
    t.equal((await fetch(`${on.adminUrl}/livez`)).status, 200)
    const key = newKey()
    t.equal((await send(on.proxy, key)).status, 201)
    t.equal((await send(on.proxy, key)).replayed, true)
    const unwritten = await ask(on.proxy, '/v1/drain', { method: 'POST', body: { by: 'refused' } })
    t.equal(unwritten.code, 'audit_unavailable', 'a change that cannot be audited is not made')
    t.equal((await fetch(`${on.adminUrl}/readyz`)).status, 200)

    const dropped = await on.dropped()
    on.output.resume()
    await until(() => on.lines.some((line) => 'dropped' in line))
    t.equal(on.lines.find((line) => 'dropped' in line)?.dropped, dropped)
    await send(on.proxy, newKey())
    await until(() => on.lines.at(-1)?.outcome === 'executed')
    t.equal((await ask(on.proxy, '/v1/drain', { method: 'POST', body: { by: 'made' } })).status, 200)
    await until(() => on.lines.some(({ audit }) => audit !== undefined))
    const audits = on.lines.filter(({ audit }) => audit !== undefined).map(({ audit }) => audit as object)
    t.match(audits, [{ what: 'drain', who: { by: 'made' }, prev: /^0+$/ }])
    on.child.kill('SIGTERM')
    t.strictSame(await on.exited, [0, null])
    await until(() => on.lines.some(({ msg }) => msg === 'stopped'))
  })

  void t.test(`V11 nobody reads standard output (${kind}): SIGTERM ends the process`, async (t) => {
    const on = await logging(t, make(t))
    on.output.pause()
    await fill(on)
    on.child.kill('SIGTERM')
    t.strictSame(await on.exited, [0, null])
  })

  void t.test(`V11 the reader of standard output is gone (${kind}): requests go on`, async (t) => {
    const on = await logging(t, make(t))
    on.output.destroy()
    await once(on.output, 'close')
    for (let n = 0; n < 3; n++) t.equal((await send(on.proxy, newKey())).status, 201)
    t.equal((await ask(on.proxy, '/v1/drain', { method: 'POST', body: {} })).code, 'audit_unavailable')
    on.child.kill('SIGTERM')
    t.strictSame(await on.exited, [0, null])
  })
}
