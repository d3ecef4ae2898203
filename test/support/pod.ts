import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { connect, createServer, type Socket } from 'node:net'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { DatabaseSync } from 'node:sqlite'
import { fileURLToPath } from 'node:url'
import { configFile } from './e2e.ts'
import { type ChildProxy, proxyProcess } from './proxy.ts'

const APP = fileURLToPath(new URL('../../examples/payments/server.ts', import.meta.url))

/** The example API and the proxy in front of it: two processes that start and stop like the containers of a pod. */
export class Pod implements AsyncDisposable {
  readonly proxy: ChildProxy
  readonly #app: ChildProcess
  readonly #appExited: Promise<unknown>
  readonly #database: string

  private constructor(app: ChildProcess, database: string, proxy: ChildProxy) {
    this.#app = app
    this.#appExited = app.exitCode === null ? once(app, 'exit') : Promise.resolve()
    this.#database = database
    this.proxy = proxy
  }

  /** Resolves when both are ready. `yaml` configures the proxy, except for its upstream. */
  static async start(dir: string, name: string, yaml: string): Promise<Pod> {
    const database = join(dir, `${name}.db`)
    const app = spawn(process.execPath, [APP, '--port', '0', '--db', database], {
      stdio: ['ignore', 'pipe', 'pipe'],
      env: { ...process.env, NODE_V8_COVERAGE: '' },
    })
    app.stderr.on('data', (text: Buffer) => process.stderr.write(text))
    let url = ''
    for await (const line of createInterface({ input: app.stdout })) {
      url = (JSON.parse(line) as { url: string }).url
      break
    }
    app.stdout.resume()
    try {
      const file = configFile(dir, `upstream: { url: "${url}", timeout: 10s }\n${yaml}`)
      return new Pod(app, database, await proxyProcess(file))
    } catch (error) {
      app.kill('SIGKILL')
      throw error
    }
  }

  /** Sends SIGTERM; requests in progress finish. */
  stopApp(signal: 'SIGTERM' | 'SIGKILL' = 'SIGTERM'): Promise<unknown> {
    this.#app.kill(signal)
    return this.#appExited
  }

  kill(): void {
    this.proxy.kill('SIGKILL')
    this.#app.kill('SIGKILL')
  }

  /** How often each key was charged; works after the pod has ended, too. */
  charges(): Map<string, number> {
    const db = new DatabaseSync(this.#database, { readOnly: true })
    try {
      const rows = db.prepare('SELECT key, count(*) AS n FROM payments GROUP BY key').all()
      return new Map(rows.map(({ key, n }) => [String(key), Number(n)]))
    } finally {
      db.close()
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.kill()
    await Promise.all([this.#appExited, this.proxy.exited])
  }
}

/** Like kube-proxy: new connections go to the endpoints in turn; existing ones stay where they are. */
export class Service implements AsyncDisposable {
  readonly #endpoints: number[] = []
  readonly #sockets = new Set<Socket>()
  #turn = 0
  readonly #server = createServer((client) => {
    const port = this.#endpoints[this.#turn++ % this.#endpoints.length]
    if (port === undefined) return void client.destroy()
    const pod = connect(port, '127.0.0.1')
    for (const [one, other] of [
      [client, pod],
      [pod, client],
    ] as const) {
      this.#sockets.add(one)
      one.setNoDelay()
      one.on('error', () => other.destroy())
      one.once('close', () => {
        this.#sockets.delete(one)
        other.destroySoon()
      })
    }
    client.pipe(pod).pipe(client)
  })

  static async open(): Promise<Service> {
    const service = new Service()
    service.#server.listen(0, '127.0.0.1')
    await once(service.#server, 'listening')
    return service
  }

  get url(): string {
    const address = this.#server.address()
    if (address === null || typeof address === 'string') throw new Error('no port')
    return `http://127.0.0.1:${address.port}`
  }

  add({ proxy }: Pod): void {
    this.#endpoints.push(proxy.port)
  }

  remove({ proxy }: Pod): void {
    this.#endpoints.splice(this.#endpoints.indexOf(proxy.port), 1)
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const socket of this.#sockets) socket.destroy()
    this.#server.close()
    await once(this.#server, 'close')
  }
}
