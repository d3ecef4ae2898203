import { type ChildProcess, spawn } from 'node:child_process'
import { randomInt } from 'node:crypto'
import { once } from 'node:events'
import { copyFileSync, mkdtempSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs'
import { createServer } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { type RedisOptions as ClientOptions, Redis } from 'ioredis'
import type { Test } from 'tap'

export interface RedisOptions {
  /** A free one by default. */
  readonly port?: number
  /** Further arguments of `redis-server`. */
  readonly args?: readonly string[]
  /** Folder with `cert.pem` and `key.pem`; the port then accepts TLS only. */
  readonly tls?: string
  /** Clients, too, must have a certificate that `cert.pem` has signed. */
  readonly mutual?: boolean
  /** Lines of its configuration; they make it a Sentinel. */
  readonly sentinel?: readonly string[]
}

/** A real Redis on a free loopback port with its own folder. Durable: `appendonly yes`. */
export class RedisServer {
  readonly port: number
  readonly url: string
  readonly #args: readonly string[]
  readonly #ready: string
  readonly #tls: Pick<ClientOptions, 'tls'>
  readonly #dir = mkdtempSync(join(tmpdir(), 'redis-'))
  #process: ChildProcess | null = null

  private constructor(port: number, { args = [], tls, mutual = false, sentinel }: RedisOptions) {
    this.port = port
    this.url = `${tls === undefined ? 'redis' : 'rediss'}://127.0.0.1:${port}`
    const own = (name: string) => join(tls ?? '', name)
    const listen =
      tls === undefined
        ? [`port ${port}`]
        : [
            'port 0',
            `tls-port ${port}`,
            `tls-auth-clients ${mutual ? 'yes' : 'no'}`,
            `tls-cert-file ${own('cert.pem')}`,
            `tls-key-file ${own('key.pem')}`,
            ...(mutual
              ? [`tls-ca-cert-file ${own('cert.pem')}`, 'tls-replication yes', 'tls-cluster yes']
              : []),
          ]
    this.#tls =
      tls === undefined
        ? {}
        : {
            tls: {
              ca: readFileSync(own('cert.pem')),
              cert: readFileSync(own('cert.pem')),
              key: readFileSync(own('key.pem')),
            },
          }
    this.#ready = sentinel === undefined ? 'Ready to accept connections' : 'Sentinel ID is'
    if (sentinel === undefined) {
      const durable = ['--dir', this.#dir, '--appendonly', 'yes', '--save', '']
      this.#args = [
        '--bind',
        '127.0.0.1',
        ...listen.flatMap((line) => `--${line}`.split(' ')),
        ...durable,
        ...args,
      ]
    } else {
      // A Sentinel writes what it learns into its configuration.
      const file = join(this.#dir, 'sentinel.conf')
      writeFileSync(file, ['bind 127.0.0.1', ...listen, `dir ${this.#dir}`, ...sentinel, ''].join('\n'))
      this.#args = [file, '--sentinel']
    }
  }

  static async start(options: RedisOptions = {}): Promise<RedisServer> {
    const server = new RedisServer(options.port ?? (await freePort()), options)
    await server.start()
    return server
  }

  get pid(): number | undefined {
    return this.#process?.pid
  }

  /** Resolves when it accepts connections; at once if it was never ended. */
  async start(...more: string[]): Promise<void> {
    if (this.#process !== null) return
    const child = spawn(process.env['REDIS_SERVER'] ?? 'redis-server', [...this.#args, ...more], {
      // Not inherited: a server that outlives a killed test would keep the runner waiting.
      stdio: ['ignore', 'pipe', 'pipe'],
    })
    child.stderr.on('data', (text: Buffer) => process.stderr.write(text))
    this.#process = child
    for await (const line of createInterface({ input: child.stdout }))
      if (line.includes(this.#ready)) {
        child.stdout.resume()
        return
      }
    throw new Error(`redis-server ended with ${child.exitCode}`)
  }

  /** Sends SIGTERM and waits for the end of the process. */
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

  /** Takes a snapshot; the result kills the server and starts it with the snapshot alone. */
  async copy(): Promise<() => Promise<void>> {
    const [own, copy] = ['dump.rdb', 'copy.rdb'].map((name) => join(this.#dir, name)) as [string, string]
    await this.command('SAVE')
    copyFileSync(own, copy)
    return async () => {
      await this.kill()
      renameSync(copy, own)
      await this.start('--appendonly', 'no')
      await this.command('CONFIG', 'SET', 'appendonly', 'yes')
    }
  }

  async isReplicaOf(master: RedisServer): Promise<boolean> {
    const info = String(await this.command('INFO', 'replication').catch(() => ''))
    return info.includes(`master_port:${master.port}`) && info.includes('master_link_status:up')
  }

  /** As a replica, it receives nothing more from its master before {@link hear}: it cannot log in. */
  async deafen(): Promise<void> {
    await this.command('CONFIG', 'SET', 'masterauth', 'wrong')
    await this.command('CLIENT', 'KILL', 'TYPE', 'master')
  }

  async hear(): Promise<void> {
    await this.command('CONFIG', 'SET', 'masterauth', '')
  }

  /** Stops the process: the kernel still accepts connections, but nothing answers. */
  pause(): void {
    this.#process?.kill('SIGSTOP')
  }

  resume(): void {
    this.#process?.kill('SIGCONT')
  }

  /** Runs one command on a new connection. */
  async command(name: string, ...args: (string | number | Buffer)[]): Promise<unknown> {
    const client = new Redis(this.port, '127.0.0.1', { lazyConnect: true, ...this.#tls })
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
    // A stopped process handles SIGTERM only after it continues.
    child.kill('SIGCONT')
    await exited
  }
}

/** A server for the tests of one file, emptied before each and ended after the last. */
export async function emptyRedis(t: Test): Promise<RedisServer> {
  const server = await RedisServer.start()
  t.teardown(() => server[Symbol.asyncDispose]())
  t.beforeEach(async () => void (await server.command('FLUSHALL')))
  return server
}

/** Of this process: a server that is starting has not taken its port yet. */
const given = new Set<number>()

/**
 * A free port of 127.0.0.1. Neither it nor the one 10,000 above, a cluster node's bus, is ever given to an outgoing connection (Linux gives
 * them ports from 32768), so nobody takes it before the server listens.
 */
export async function freePort(): Promise<number> {
  for (;;) {
    const port = randomInt(12_000, 22_000)
    if (given.has(port)) continue
    given.add(port)
    const server = createServer().listen(port, '127.0.0.1')
    try {
      await once(server, 'listening')
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code === 'EADDRINUSE') continue
      throw error
    }
    server.close()
    await once(server, 'close')
    return port
  }
}
