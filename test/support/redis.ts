import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { mkdtempSync, rmSync } from 'node:fs'
import { createServer } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { Redis } from 'ioredis'
import type { Test } from 'tap'

export interface RedisOptions {
  /** Further arguments of `redis-server`. */
  readonly args?: readonly string[]
  /** Folder with `cert.pem` and `key.pem`: the port then speaks TLS only. */
  readonly tls?: string
}

/** A real Redis on a free port of loopback with a folder of its own. Durable: `appendonly yes`. */
export class RedisServer {
  readonly port: number
  readonly url: string
  readonly #args: readonly string[]
  readonly #dir = mkdtempSync(join(tmpdir(), 'redis-'))
  #process: ChildProcess | null = null

  private constructor(port: number, { args = [], tls }: RedisOptions) {
    this.port = port
    this.url = `${tls === undefined ? 'redis' : 'rediss'}://127.0.0.1:${port}`
    const listen =
      tls === undefined
        ? ['--port', String(port)]
        : `--port 0 --tls-port ${port} --tls-auth-clients no`
            .split(' ')
            .concat('--tls-cert-file', join(tls, 'cert.pem'), '--tls-key-file', join(tls, 'key.pem'))
    const durable = ['--dir', this.#dir, '--appendonly', 'yes', '--save', '']
    this.#args = ['--bind', '127.0.0.1', ...listen, ...durable, ...args]
  }

  static async start(options: RedisOptions = {}): Promise<RedisServer> {
    const server = new RedisServer(await freePort(), options)
    await server.start()
    return server
  }

  /** Resolves when it accepts connections. */
  async start(): Promise<void> {
    const child = spawn(process.env['REDIS_SERVER'] ?? 'redis-server', this.#args, {
      // Not inherited: a server that outlives a test that was killed would keep the runner waiting.
      stdio: ['ignore', 'pipe', 'pipe'],
    })
    child.stderr.on('data', (text: Buffer) => process.stderr.write(text))
    this.#process = child
    for await (const line of createInterface({ input: child.stdout }))
      if (line.includes('Ready to accept connections')) {
        child.stdout.resume()
        return
      }
    throw new Error(`redis-server ended with ${child.exitCode}`)
  }

  /** SIGTERM, and the end of the process. */
  stop(): Promise<void> {
    return this.#end('SIGTERM')
  }

  kill(): Promise<void> {
    return this.#end('SIGKILL')
  }

  async restart(): Promise<void> {
    await this.stop()
    await this.start()
  }

  /** It hangs: connections are accepted by the kernel, nothing answers. */
  pause(): void {
    this.#process?.kill('SIGSTOP')
  }

  resume(): void {
    this.#process?.kill('SIGCONT')
  }

  /** One command on a connection of its own. */
  async command(name: string, ...args: (string | number | Buffer)[]): Promise<unknown> {
    const client = new Redis(this.port, '127.0.0.1', { lazyConnect: true })
    client.on('error', () => {})
    try {
      return await client.call(name, args)
    } finally {
      client.disconnect()
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill()
    rmSync(this.#dir, { recursive: true, force: true })
  }

  async #end(signal: 'SIGTERM' | 'SIGKILL'): Promise<void> {
    const child = this.#process
    this.#process = null
    if (child === null) return
    const exited = once(child, 'exit')
    child.kill(signal)
    // A paused process takes SIGTERM only when it runs again.
    child.kill('SIGCONT')
    await exited
  }
}

/** A server for the tests of one file: empty before each, ended with the last. */
export async function emptyRedis(t: Test): Promise<RedisServer> {
  const server = await RedisServer.start()
  t.teardown(() => server[Symbol.asyncDispose]())
  t.beforeEach(async () => void (await server.command('FLUSHALL')))
  return server
}

export async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1')
  await once(server, 'listening')
  const address = server.address()
  server.close()
  await once(server, 'close')
  if (address === null || typeof address === 'string') throw new Error('no port')
  return address.port
}
