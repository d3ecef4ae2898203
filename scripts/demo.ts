/**
 * `npm run demo`: an example payments API, the proxy on its embedded store, and real HTTP between them. Every
 * line that claims something is checked while it is printed; the exit code is 1 if any of them is not true.
 * Both then stay up for you to try; `--once` stops them.
 */
import { type ChildProcess, type ChildProcessByStdio, spawn } from 'node:child_process'
import { createHash, randomUUID } from 'node:crypto'
import { once } from 'node:events'
import { mkdtempSync, rmSync } from 'node:fs'
import { type IncomingHttpHeaders, request } from 'node:http'
import { createServer } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import type { Readable } from 'node:stream'
import { setTimeout as sleep } from 'node:timers/promises'
import { parseArgs, styleText } from 'node:util'

const USAGE = `Usage: npm run demo [-- --once] [-- --port N]

  --once     end after the story; the exit code is 1 if any line of it was not true
  --keep     leave the API and the proxy running until Ctrl-C (the default)
  --port N   the proxy's port (default: 8080 where it is free, else any)
`
/** A child that has not logged "listening" by then never will. */
const START_LIMIT = 20_000
/** How long the charge of a client that hung up may take to show in the database. */
const CHARGE_LIMIT = 3_000
/** How long a child may take to end before it is killed. */
const STOP_LIMIT = 5_000

const { values: flags } = parseArgs({
  options: {
    once: { type: 'boolean', default: false },
    keep: { type: 'boolean', default: false },
    port: { type: 'string' },
    help: { type: 'boolean', short: 'h', default: false },
  },
})

const root = join(import.meta.dirname, '..')
const children: { name: string; process: ChildProcess; stderr: string[] }[] = []
let directory: string | null = null
let stopping = false
let checked = 0
let broken = 0
/** The demo has finished: from now on Ctrl-C is the way out, not an interruption. */
let told = false

// ---------------------------------------------------------------------------------------- printing

function style(format: Parameters<typeof styleText>[0], text: string): string {
  return styleText(format, text, { stream: process.stdout })
}

function print(line = ''): void {
  process.stdout.write(`${line}\n`)
}

function heading(text: string): void {
  print()
  print(style('bold', text))
}

/** Prints one aligned line: the action and its result. */
function tell(left: string, right: string): void {
  print(`  ${left.padEnd(46)}${right}`)
}

/** The same, with a claim about the result; a false claim fails the demo. */
function claim(left: string, right: string, holds: boolean): void {
  checked += 1
  if (!holds) broken += 1
  const mark = holds ? style('green', 'ok') : style(['red', 'bold'], 'NOT TRUE')
  print(`  ${left.padEnd(46)}${right.padEnd(32)}  ${mark}`)
}

// -------------------------------------------------------------------------------------------- HTTP

interface Answer {
  readonly status: number
  readonly statusText: string
  readonly headers: IncomingHttpHeaders
  readonly body: Buffer
}

interface Charge {
  readonly key?: string
  readonly amount: number
  readonly delay?: string
}

const sent = new Map<string, number>()

/** One request on its own connection. Null if `hangUpAfter` cut it short, as an impatient client does. */
function send(url: string, charge?: Charge, hangUpAfter?: number): Promise<Answer | null> {
  return new Promise((resolve, reject) => {
    const body = charge === undefined ? null : JSON.stringify({ amount: charge.amount, currency: 'eur' })
    if (charge?.key !== undefined) sent.set(charge.key, (sent.get(charge.key) ?? 0) + 1)
    const req = request(url, {
      agent: false,
      method: body === null ? 'GET' : 'POST',
      headers: {
        ...(body === null
          ? {}
          : { 'Content-Type': 'application/json', 'Content-Length': Buffer.byteLength(body) }),
        ...(charge?.key === undefined ? {} : { 'Idempotency-Key': charge.key }),
        ...(charge?.delay === undefined ? {} : { 'X-Demo-Delay': charge.delay }),
      },
    })
    let hungUp = false
    if (hangUpAfter !== undefined)
      setTimeout(() => {
        hungUp = true
        req.destroy()
      }, hangUpAfter)
    req.once('error', (error) => (hungUp ? resolve(null) : reject(error)))
    req.once('response', (res) => {
      const chunks: Buffer[] = []
      res.on('data', (chunk: Buffer) => chunks.push(chunk))
      res.once('error', (error) => (hungUp ? resolve(null) : reject(error)))
      res.once('end', () =>
        resolve({
          status: res.statusCode ?? 0,
          statusText: `${res.statusCode} ${res.statusMessage}`,
          headers: res.headers,
          body: Buffer.concat(chunks),
        }),
      )
    })
    req.end(body ?? undefined)
  })
}

async function answered(url: string, charge?: Charge): Promise<Answer> {
  const answer = await send(url, charge)
  if (answer === null) throw new Error(`${url} gave no answer`)
  return answer
}

/** A client that honours Retry-After: while the first request is still running, it comes back later. */
async function retry(url: string, charge: Charge): Promise<{ answer: Answer; waited: number }> {
  for (let waited = 0; ; ) {
    const answer = await answered(url, charge)
    const seconds = Number(answer.headers['retry-after'])
    if (answer.status !== 409 || !(seconds > 0) || waited + seconds > 30) return { answer, waited }
    await sleep(seconds * 1000)
    waited += seconds
  }
}

function object(text: string): Record<string, unknown> {
  const value: unknown = JSON.parse(text)
  return typeof value === 'object' && value !== null ? { ...value } : {}
}

function member(answer: Answer, name: string): string {
  try {
    return String(object(answer.body.toString('utf8'))[name])
  } catch {
    return '(no JSON)'
  }
}

function sha256(bytes: Buffer): string {
  return createHash('sha256').update(bytes).digest('hex')
}

function short(hash: string): string {
  return `${hash.slice(0, 20)}…`
}

// --------------------------------------------------------------------------------------- processes

/** Starts a server and resolves with the URL in its line `{"msg":"listening","url":…}`. */
async function start(
  name: string,
  args: readonly string[],
  env: Record<string, string> = {},
): Promise<string> {
  const child = spawn(process.execPath, ['--import', './scripts/with-parent.ts', ...args], {
    cwd: root,
    env: { ...process.env, ...env },
    stdio: ['ignore', 'pipe', 'pipe', 'ipc'],
  }) as ChildProcessByStdio<null, Readable, Readable>
  const entry = { name, process: child, stderr: [] as string[] }
  children.push(entry)
  child.stderr.setEncoding('utf8').on('data', (text: string) => entry.stderr.push(text))
  const listening = new Promise<string>((resolve) => {
    createInterface({ input: child.stdout }).on('line', (line) => {
      const url = listeningUrl(line)
      if (url !== null) resolve(url)
    })
  })
  const gone = once(child, 'exit').then(() => {
    if (stopping) return new Promise<never>(() => {})
    throw new Error(`${name} ended by itself`)
  })
  gone.catch((error: unknown) => void abandon(error))
  return Promise.race([
    listening,
    gone,
    sleep(START_LIMIT, undefined, { ref: false }).then(() => {
      throw new Error(`${name} did not listen within ${START_LIMIT / 1000} s\n${entry.stderr.join('')}`)
    }),
  ])
}

function listeningUrl(line: string): string | null {
  if (!line.includes('"listening"')) return null
  try {
    const { msg, url, address } = object(line)
    if (msg !== 'listening') return null
    if (typeof url === 'string') return url.replace(/\/$/, '')
    return typeof address === 'string' ? `http://${address.replace(/^http:\/\//, '')}` : null
  } catch {
    return null
  }
}

async function stop(): Promise<void> {
  if (stopping) return
  stopping = true
  await Promise.all(
    children.map(async ({ process: child }) => {
      if (child.exitCode !== null || child.signalCode !== null) return
      const exit = once(child, 'exit')
      child.kill('SIGTERM')
      const timer = setTimeout(() => child.kill('SIGKILL'), STOP_LIMIT)
      await exit
      clearTimeout(timer)
    }),
  )
  if (directory !== null) rmSync(directory, { recursive: true, force: true })
}

async function abandon(error: unknown): Promise<void> {
  if (stopping) return
  process.exitCode = 1
  // Report the dead server, not the refused connection that follows from it.
  await sleep(200)
  const dead = children.filter(
    ({ process: { exitCode, signalCode } }) => exitCode !== null || signalCode !== null,
  )
  const why = dead.map(
    ({ name, process: { exitCode, signalCode }, stderr }) =>
      `${name} ended by itself (${signalCode ?? exitCode})\n${stderr.join('')}`,
  )
  if (stopping) return
  process.stderr.write(
    `\ndemo: ${why.join('\n') || (error instanceof Error ? error.message : String(error))}\n`,
  )
  await stop()
  process.exit(1)
}

/** 8080 if it is free, so that the curl commands match the documentation; otherwise any free port. */
async function choosePort(): Promise<string> {
  if (flags.port !== undefined) return flags.port
  if (flags.once) return '0'
  const probe = createServer()
  const free = await new Promise<boolean>((resolve) => {
    probe.once('error', () => resolve(false))
    probe.listen(8080, '127.0.0.1', () => resolve(true))
  })
  if (free) await new Promise<void>((resolve) => probe.close(() => resolve()))
  return free ? '8080' : '0'
}

// ----------------------------------------------------------------------------------------- the story

async function story(api: string, proxy: string): Promise<void> {
  const charges = async (key: string): Promise<number> => {
    for (const began = performance.now(); ; await sleep(20)) {
      const made = Number(member(await answered(`${api}/v1/payments?key=${key}`), 'charges'))
      if (made !== 0 || performance.now() - began > CHARGE_LIMIT) return made
    }
  }
  const at = `${proxy}/v1/payments`
  const first = `order-${randomUUID()}`
  const second = `order-${randomUUID()}`
  const without = `order-${randomUUID()}`

  heading('Without the proxy')
  await send(`${api}/v1/payments`, { key: without, amount: 4200, delay: '700ms' }, 300)
  tell('charge 42.00, the client hangs up after 0.3 s', 'no answer')
  const twice = await answered(`${api}/v1/payments`, { key: without, amount: 4200 })
  tell('the client tries again', twice.statusText)
  const paid = await charges(without)
  claim('charges for this order', String(paid), paid === 2)

  heading('1  A charge whose answer is lost')
  const lost = await send(at, { key: first, amount: 4200, delay: '700ms' }, 300)
  claim(
    'charge 42.00, the client hangs up after 0.3 s',
    lost === null ? 'no answer' : lost.statusText,
    lost === null,
  )
  const made = await charges(first)
  claim('charges for this key', String(made), made === 1)

  heading('2  The retry')
  await sleep(700)
  const { answer: again, waited } = await retry(at, { key: first, amount: 4200 })
  if (waited > 0) tell('the first is still running', `409, Retry-After: ${waited}`)
  claim('same key, same request, 0.7 s later', again.statusText, again.status === 201)
  const marker = again.headers['idempotent-replayed']
  claim('Idempotent-Replayed', String(marker ?? '(none)'), marker === 'true')
  const third = await answered(at, { key: first, amount: 4200 })
  const original = await answered(`${api}/v1/payments/${member(again, 'id')}`)
  claim('sha256 of its body', short(sha256(again.body)), again.body.length > 0)
  claim('sha256 of one more retry', short(sha256(third.body)), third.body.equals(again.body))
  claim(
    "sha256 of the payment in the API's database",
    short(sha256(original.body)),
    original.body.equals(again.body),
  )
  const remade = await charges(first)
  claim('charges for this key', String(remade), remade === 1)

  heading('3  The double click')
  const clicks = await Promise.all([
    answered(at, { key: second, amount: 1999, delay: '400ms' }),
    answered(at, { key: second, amount: 1999, delay: '400ms' }),
  ])
  clicks.sort((a, b) => a.status - b.status)
  const [winner, loser] = clicks
  claim('two identical requests at once: one is', winner?.statusText ?? '', winner?.status === 201)
  const replayed = loser?.headers['idempotent-replayed'] === 'true' && loser.status === 201
  const postponed = loser?.status === 409 && Number(loser.headers['retry-after']) > 0
  claim(
    'and the other',
    replayed
      ? '201, replayed'
      : `${loser?.statusText ?? ''}, Retry-After: ${loser?.headers['retry-after'] ?? '(none)'}`,
    replayed || postponed,
  )
  const clicked = await charges(second)
  claim('charges for this key', String(clicked), clicked === 1)

  heading('4  A key used again for something else')
  const misuse = await answered(at, { key: first, amount: 9900 })
  claim('first key, but 99.00', misuse.statusText, misuse.status === 422)
  const type = misuse.headers['content-type'] ?? '(none)'
  claim('Content-Type', type, type.startsWith('application/problem+json'))
  claim('code', member(misuse, 'code'), member(misuse, 'code') === 'idempotency_key_reused')
  const intact = await answered(at, { key: first, amount: 4200 })
  claim('the good request is still answered', intact.statusText, intact.body.equals(again.body))

  heading('The counter')
  const [one, two] = [await charges(first), await charges(second)]
  claim(`first key, ${sent.get(first)} requests, charges`, String(one), one === 1)
  claim(`second key, ${sent.get(second)} requests, charges`, String(two), two === 1)
}

function farewell(api: string, proxy: string): void {
  heading('Try it')
  print(`
  curl -i ${proxy}/v1/payments \\
    -H 'Content-Type: application/json' -H 'Idempotency-Key: my-first-key' \\
    -d '{"amount": 4200, "currency": "eur"}'

  Once more: the same bytes, and Idempotent-Replayed: true. With another amount: 422.
  How often it was charged:

  curl '${api}/v1/payments?key=my-first-key'

  A charge that answers after 5 s. Press Ctrl-C before that, then send it again: 409 while it runs, its answer
  afterwards.

  curl -i ${proxy}/v1/payments -H 'X-Demo-Delay: 5s' \\
    -H 'Content-Type: application/json' -H 'Idempotency-Key: my-second-key' \\
    -d '{"amount": 1999, "currency": "eur"}'

  ${style('dim', 'Ctrl-C ends both and removes their files.')}`)
}

async function main(): Promise<void> {
  if (flags.help) {
    process.stdout.write(USAGE)
    return
  }
  // In a terminal, Ctrl-C also reaches the children, which drain by themselves; `stop` waits for them.
  const interrupted = new Promise<void>((resolve) => {
    // SIGHUP: the terminal was closed. The proxy itself would only reload its configuration.
    for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP']) process.once(signal, resolve)
  })
  process.once('exit', () => {
    for (const child of children) child.process.kill('SIGKILL')
  })
  void interrupted.then(async () => {
    print()
    await stop()
    process.exit(broken > 0 ? 1 : told ? 0 : 130)
  })

  directory = mkdtempSync(join(tmpdir(), 'idempotency-demo-'))
  const began = performance.now()
  const api = await start('payments API', [
    'examples/payments/server.ts',
    '--port=0',
    `--db=${join(directory, 'payments.db')}`,
  ])
  const store = join(directory, 'idempotency.db')
  const proxy = await start('proxy', ['src/cli.ts', '--config', 'examples/payments/proxy.yaml'], {
    PROXY_LISTEN: `127.0.0.1:${await choosePort()}`,
    PROXY_ADMIN_LISTEN: '127.0.0.1:0',
    PROXY_UPSTREAM: api,
    PROXY_STORE: `sqlite:${store}`,
  })
  heading('idempotency-proxy demo')
  tell('payments API, counts every charge it makes', api)
  tell('proxy, embedded store, in front of it', proxy)
  await story(api, proxy)
  told = true
  print()
  const seconds = ((performance.now() - began) / 1000).toFixed(1)
  if (broken > 0) {
    print(style(['red', 'bold'], `${broken} of ${checked} statements were not true`))
    process.exitCode = 1
  } else print(style('green', `${checked} checks passed, in ${seconds} s.`))

  if (flags.once) {
    await stop()
    return
  }
  farewell(api, proxy)
  await interrupted
}

main().catch(abandon)
