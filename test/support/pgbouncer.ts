import { type ChildProcess, spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { chownSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import type { PostgresServer } from './postgres.ts'
import { freePort } from './redis.ts'

/** Debian installs it in a folder that is not on every PATH. */
const BINARY = ['pgbouncer', '/usr/sbin/pgbouncer'].find(
  (binary) => spawnSync(binary, ['--version'], { stdio: 'ignore' }).status === 0,
)

/** For tests that need it: false, or why they are skipped. */
export const NO_PGBOUNCER =
  BINARY === undefined && 'there is no PgBouncer here: install the package pgbouncer'

/** A real PgBouncer in transaction mode before the database `records` of the server, with few connections to it. */
export class PgBouncer {
  readonly url: string
  readonly #child: ChildProcess
  readonly #dir: string

  private constructor(port: number, child: ChildProcess, dir: string) {
    this.url = `postgres://owner@127.0.0.1:${port}/records`
    this.#child = child
    this.#dir = dir
  }

  static async start(server: PostgresServer, connections: number): Promise<PgBouncer> {
    const { uid, gid } = server.user
    const dir = mkdtempSync(join(tmpdir(), 'pgbouncer-'))
    const port = await freePort()
    const file = join(dir, 'pgbouncer.ini')
    writeFileSync(
      file,
      `[databases]
records = host=127.0.0.1 port=${server.port} user=owner
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = ${port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = ${connections}
`,
    )
    // It refuses to run as root.
    if (uid !== undefined && gid !== undefined) for (const path of [dir, file]) chownSync(path, uid, gid)
    const child = spawn(BINARY ?? '', [file], {
      ...server.user,
      cwd: dir,
      stdio: ['ignore', 'ignore', 'pipe'],
    })
    for await (const line of createInterface({ input: child.stderr }))
      if (line.includes('process up')) {
        child.stderr.resume()
        return new PgBouncer(port, child, dir)
      }
    throw new Error(`pgbouncer ended with ${child.exitCode}`)
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const exited = once(this.#child, 'exit')
    this.#child.kill('SIGKILL')
    await exited
    rmSync(this.#dir, { recursive: true, force: true })
  }
}
