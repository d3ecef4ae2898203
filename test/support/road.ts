/**
 * What a request passes through: the modules of src/ with a function that runs for a first execution on Redis, as V8 counts calls.
 * `node test/support/road.ts` prints them.
 */
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { Agent, request } from 'node:http'
import type { Profiler } from 'node:inspector'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { text } from 'node:stream/consumers'
import { setTimeout as wait } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { type ChildProxy, proxyProcess } from './proxy.ts'
import { freePort, RedisServer } from './redis.ts'
import { upstreamStub } from './upstream.ts'

const SRC = new URL('../../src/', import.meta.url).href
/** A timer may fire during one request, but not during each of this many. */
const REQUESTS = 5

export interface Passed {
  /** Below src/, as `core/record.ts`. */
  readonly path: string
  readonly functions: readonly PassedFunction[]
}

export interface PassedFunction {
  readonly name: string
  readonly isAsync: boolean
}

/** The road of a POST with a new key through the real command line, warm, with the default configuration. */
export async function firstExecution(): Promise<Passed[]> {
  await using redis = await RedisServer.start()
  await using upstream = await upstreamStub(
    (_seen, response) => void response.writeHead(201).end('{"paid":true}'),
  )
  const inspected = await freePort()
  await using proxy = await started(
    `listen: 127.0.0.1:0\nservice: road\nupstream: { url: "${upstream.url}" }\nstore: { url: "${redis.url}" }\n`,
    { NODE_OPTIONS: `--inspect=127.0.0.1:${inspected}` },
  )
  const client = new Agent({ keepAlive: true })
  while ((await post(proxy.url, client)) !== 201) await wait(100)
  using inspector = await Inspector.at(inspected)
  await inspector.call('Profiler.enable')
  await inspector.call('Profiler.startPreciseCoverage', { callCount: true, detailed: false })
  const runs: Map<string, PassedFunction & { readonly path: string }>[] = []
  for (let n = 0; n < REQUESTS; n++) {
    // Each call takes the counts so far and resets them.
    await inspector.call('Profiler.takePreciseCoverage')
    const status = await post(proxy.url, client)
    if (status !== 201) throw new Error(`answered ${status}`)
    const { result } = (await inspector.call('Profiler.takePreciseCoverage')) as {
      result: Profiler.ScriptCoverage[]
    }
    runs.push(new Map(result.filter(({ url }) => url.startsWith(SRC)).flatMap(calledIn)))
  }
  client.destroy()
  const [first, ...others] = runs as [(typeof runs)[number], ...typeof runs]
  const always = [...first].filter(([id]) => others.every((run) => run.has(id))).map(([, one]) => one)
  const byPath = Map.groupBy(always, ({ path }) => path)
  return [...byPath]
    .map(([path, functions]) => ({ path, functions }))
    .sort((a, b) => (a.path < b.path ? -1 : 1))
}

/** The functions of a script that ran, by where they begin. */
function calledIn({
  url,
  functions,
}: Profiler.ScriptCoverage): [string, PassedFunction & { path: string }][] {
  const source = readFileSync(fileURLToPath(url), 'utf8')
  const path = url.slice(SRC.length)
  return functions.flatMap(({ functionName, ranges }) => {
    const [range] = ranges
    if (range === undefined || range.count === 0) return []
    const isAsync = /^(?:static\s+)?async\b/.test(source.slice(range.startOffset, range.endOffset))
    const line = source.slice(0, range.startOffset).split('\n').length
    return [[`${path}:${range.startOffset}`, { path, name: functionName || `line ${line}`, isAsync }]]
  })
}

async function post(url: string, agent: Agent): Promise<number | undefined> {
  const { promise, resolve, reject } = Promise.withResolvers<number | undefined>()
  const headers = { 'content-type': 'application/json', 'idempotency-key': crypto.randomUUID() }
  request(`${url}/payments`, { method: 'POST', agent, headers })
    .on('error', reject)
    .on('response', (response) => void text(response).then(() => resolve(response.statusCode), reject))
    .end('{"amount":100}')
  return promise
}

async function started(yaml: string, env: Readonly<Record<string, string>>): Promise<ChildProxy> {
  const folder = mkdtempSync(join(tmpdir(), 'road-'))
  try {
    writeFileSync(join(folder, 'proxy.yaml'), yaml)
    return await proxyProcess(join(folder, 'proxy.yaml'), [], env)
  } finally {
    rmSync(folder, { recursive: true })
  }
}

/** The inspector of a process, by its protocol. */
class Inspector implements Disposable {
  readonly #socket: WebSocket
  readonly #calls: ((result: unknown) => void)[] = []

  private constructor(socket: WebSocket) {
    this.#socket = socket
    socket.addEventListener('message', ({ data }) => {
      const { id, result, error } = JSON.parse(data as string) as Record<string, unknown>
      if (error !== undefined) throw new Error(JSON.stringify(error))
      this.#calls[id as number]?.(result)
    })
  }

  static async at(port: number): Promise<Inspector> {
    const targets = await (await fetch(`http://127.0.0.1:${port}/json/list`)).json()
    const [{ webSocketDebuggerUrl }] = targets as [{ webSocketDebuggerUrl: string }]
    const socket = new WebSocket(webSocketDebuggerUrl)
    await new Promise((resolve, reject) => {
      socket.addEventListener('open', resolve)
      socket.addEventListener('error', reject)
    })
    return new Inspector(socket)
  }

  call(method: string, params: Record<string, unknown> = {}): Promise<unknown> {
    const { promise, resolve } = Promise.withResolvers<unknown>()
    const id = this.#calls.push(resolve) - 1
    this.#socket.send(JSON.stringify({ id, method, params }))
    return promise
  }

  [Symbol.dispose](): void {
    this.#socket.close()
  }
}

if (import.meta.main) {
  const modules = await firstExecution()
  const lines = modules.map(
    ({ path, functions }) =>
      `${path}: ${functions.map(({ name, isAsync }) => (isAsync ? `async ${name}` : name)).join(', ')}`,
  )
  const asyncs = modules.flatMap(({ functions }) => functions.filter(({ isAsync }) => isAsync))
  lines.push(`${modules.length} modules, ${asyncs.length} async functions`, '')
  process.stdout.write(lines.join('\n'))
}
