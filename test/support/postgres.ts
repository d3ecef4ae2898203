import { type ChildProcess, execFile, execFileSync, type StdioOptions, spawn } from 'node:child_process'
import { createHash } from 'node:crypto'
import { once } from 'node:events'
import {
  appendFileSync,
  chownSync,
  existsSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statfsSync,
  statSync,
  writeFileSync,
} from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { setTimeout as wait } from 'node:timers/promises'
import { promisify } from 'node:util'
import pg from 'pg'
import { postgresBinaries } from './postgres-binaries.ts'
import { freePort } from './redis.ts'

const NOBODY = 'nobody'

const BIN = postgresBinaries()
const run = promisify(execFile)

/** For tests that need a server: false, or why they are skipped. */
export const NO_POSTGRES =
  BIN === null &&
  'there is no PostgreSQL here: install the package postgresql, or set POSTGRES_BIN to its folder'

interface User {
  readonly uid?: number
  readonly gid?: number
}

/** PostgreSQL refuses to run as root. */
function userFor(): User {
  if (process.getuid?.() !== 0) return {}
  const id = (flag: string) => Number(execFileSync('id', [flag, NOBODY], { encoding: 'utf8' }))
  return { uid: id('-u'), gid: id('-g') }
}

const INITDB = '-D data -U owner -A trust -E UTF8 --no-locale --no-sync --wal-segsize=1'.split(' ')
/** Two databases are all that a test needs: its own, and one to make others from. */
const DATABASES = `ALTER DATABASE postgres RENAME TO records
UPDATE pg_database SET datistemplate = false WHERE datname = 'template0'
DROP DATABASE template0
`

/** For data folders: in memory if there is room, which makes a server start ten times as fast. */
const SCRATCH = hasRoom('/dev/shm') ? '/dev/shm' : tmpdir()

function hasRoom(folder: string): boolean {
  if (!existsSync(folder)) return false
  const { bavail, bsize } = statfsSync(folder)
  return bavail * bsize > 1 << 30
}

/** Makes the folder `data` in `dir`, with a new identity. */
function initialise(dir: string, user: User): void {
  const options = { ...user, cwd: dir }
  execFileSync(join(BIN ?? '', 'initdb'), INITDB, { ...options, stdio: 'ignore' })
  const single = ['--single', '-D', 'data', '-c', 'fsync=off', 'template1']
  const stdio: StdioOptions = ['pipe', 'ignore', 'ignore']
  execFileSync(join(BIN ?? '', 'postgres'), single, { ...options, input: DATABASES, stdio })
}

/** An archive of a data folder, made once per machine, version of PostgreSQL and recipe. It appears whole or not at all. */
function template(user: User): string {
  const binary = join(BIN ?? '', 'postgres')
  const { mtimeMs, size } = statSync(binary)
  const recipe = JSON.stringify([binary, mtimeMs, size, INITDB, DATABASES])
  const name = createHash('sha256').update(recipe).digest('hex').slice(0, 16)
  const uid = user.uid ?? process.getuid?.()
  const file = join(SCRATCH, `postgres-template-${uid}-${name}.tar`)
  if (statSync(file, { throwIfNoEntry: false })?.uid !== uid) {
    const dir = folderFor(user)
    initialise(dir, user)
    execFileSync('tar', ['-cf', 'template.tar', 'data'], { ...user, cwd: dir })
    renameSync(join(dir, 'template.tar'), file)
    rmSync(dir, { recursive: true })
  }
  return file
}

/** Has the process in its name: what a killed one left is removed by the next. */
function folderFor({ uid, gid }: User): string {
  for (const name of readdirSync(SCRATCH)) {
    const [, pid] = /^postgres-data-(\d+)-/.exec(name) ?? []
    if (pid !== undefined && !isAlive(Number(pid)))
      rmSync(join(SCRATCH, name), { recursive: true, force: true })
  }
  const dir = mkdtempSync(join(SCRATCH, `postgres-data-${process.pid}-`))
  if (uid !== undefined && gid !== undefined) chownSync(dir, uid, gid)
  return dir
}

/** One database of a server. */
export interface Database {
  /** As a superuser. */
  readonly url: string
  /** Runs SQL on a new connection; returns rows as lists of text. */
  sql(text: string): Promise<(string | null)[][]>
  client(): Promise<pg.Client>
}

/** A real PostgreSQL on a free loopback port with its own folder. Durable, as it comes. */
export class PostgresServer implements Database {
  readonly port: number
  /** URL of the database `records`, as a superuser. */
  readonly url: string
  readonly #dir: string
  readonly #user: User
  readonly #settings: readonly string[]
  #process: ChildProcess | null = null
  #databases = 0

  private constructor(port: number, settings: readonly string[]) {
    this.port = port
    this.url = `postgres://owner:secret@127.0.0.1:${port}/records`
    this.#settings = settings
    this.#user = userFor()
    this.#dir = folderFor(this.#user)
  }

  /** `settings`: as `name=value`. */
  static async start(...settings: string[]): Promise<PostgresServer> {
    const server = new PostgresServer(await freePort(), settings)
    execFileSync('tar', ['-xf', template(server.#user)], { ...server.#user, cwd: server.#dir })
    await server.start()
    return server
  }

  /** A server with an identity of its own; the others are copies of one template. */
  static async unrelated(): Promise<PostgresServer> {
    const server = new PostgresServer(await freePort(), [])
    initialise(server.#dir, server.#user)
    await server.start()
    return server
  }

  /** Copies the running server; the result restores the copy, without a new timeline. */
  async copy(): Promise<() => Promise<void>> {
    const copy = join(this.#dir, 'copy')
    await this.#baseBackup(copy, this.port)
    return async () => {
      await this.kill()
      rmSync(this.data, { recursive: true })
      renameSync(copy, this.data)
      await this.start()
    }
  }

  /** A hot standby of this one, which it reaches at `port`. */
  async standby(port = this.port): Promise<PostgresServer> {
    const server = new PostgresServer(await freePort(), this.#settings)
    await server.#baseBackup(server.data, port, '-R')
    await server.start()
    return server
  }

  /** Starts over as a standby of the server at `port`, with a copy of its data. */
  async follow(port: number): Promise<void> {
    await this.kill()
    rmSync(this.data, { recursive: true, force: true })
    await this.#baseBackup(this.data, port, '-R')
    await this.start()
  }

  async #baseBackup(to: string, port: number, ...more: string[]): Promise<void> {
    const from = ['-h', '127.0.0.1', '-p', String(port), '-U', 'owner', '-D', to, '-c', 'fast', ...more]
    await run(join(BIN ?? '', 'pg_basebackup'), from, { ...this.#user, cwd: this.#dir })
  }

  get data(): string {
    return join(this.#dir, 'data')
  }

  /** All its processes. */
  get pids(): readonly number[] {
    const pid = this.#process?.pid
    return pid === undefined ? [] : [...childrenOf(pid), pid]
  }

  get user(): User {
    return this.#user
  }

  /** Resolves when it accepts connections. */
  async start(): Promise<void> {
    const settings = [
      `port=${this.port}`,
      'listen_addresses=127.0.0.1',
      `unix_socket_directories=${this.#dir}`,
      'shared_buffers=16MB',
      'lc_messages=C',
      ...this.#settings,
    ]
    const args = ['-D', this.data, ...settings.flatMap((setting) => ['-c', setting])]
    const child = spawn(join(BIN ?? '', 'postgres'), args, {
      ...this.#user,
      cwd: this.#dir,
      stdio: ['ignore', 'ignore', 'pipe'],
    })
    this.#process = child
    const end = (): void => {
      this.#signal('SIGCONT')
      child.kill('SIGQUIT')
    }
    process.once('exit', end)
    child.once('exit', () => process.off('exit', end))
    const said: string[] = []
    for await (const line of createInterface({ input: child.stderr })) {
      said.push(line)
      if (/database system is ready to accept/.test(line)) {
        child.stderr.resume()
        return
      }
    }
    throw new Error(`postgres ended with ${child.exitCode}: ${said.join('\n')}`)
  }

  /** A fast shutdown: a smart one would wait for the clients. */
  stop(): Promise<void> {
    return this.#end('SIGINT')
  }

  /** Kills all its processes at once. */
  async kill(): Promise<void> {
    await this.#end('SIGKILL')
  }

  async restart(): Promise<void> {
    await this.stop()
    await this.start()
  }

  /** It hangs: connections are accepted by the kernel, nothing answers. */
  pause(): void {
    this.#signal('SIGSTOP')
  }

  resume(): void {
    this.#signal('SIGCONT')
  }

  /** Adds a line to `pg_hba.conf`, before all others. */
  async allow(line: string): Promise<void> {
    const file = join(this.data, 'pg_hba.conf')
    writeFileSync(file, `${line}\n${readFileSync(file, 'utf8')}`)
    await this.sql('SELECT pg_reload_conf()')
  }

  /** Resolves when commits wait for a synchronous standby; there is none. */
  async requireStandby(): Promise<void> {
    await this.sql('CREATE TABLE IF NOT EXISTS probe (n int)')
    await this.sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    await this.sql('SELECT pg_reload_conf()')
    // Sessions may know it before the checkpointer makes commits wait.
    const cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    for (let cancelled = 0; cancelled === 0; ) {
      const write = this.sql('INSERT INTO probe VALUES (1)').then(() => true)
      do cancelled += (await this.sql(cancel)).length
      while (!(await Promise.race([write, wait(10, false)])))
    }
  }

  async requireNoStandby(): Promise<void> {
    await this.sql('ALTER SYSTEM RESET synchronous_standby_names')
    await this.sql('SELECT pg_reload_conf()')
  }

  /** Takes effect at the next start. */
  useTls(key: Buffer, certificate: Buffer): void {
    const { uid, gid } = this.#user
    for (const [name, bytes] of [
      ['server.key', key],
      ['server.crt', certificate],
    ] as const) {
      const file = join(this.data, name)
      writeFileSync(file, bytes, { mode: 0o600 })
      if (uid !== undefined && gid !== undefined) chownSync(file, uid, gid)
    }
    appendFileSync(join(this.data, 'postgresql.conf'), 'ssl = on\n')
  }

  async promote(): Promise<void> {
    const args = ['-D', this.data, 'promote', '-w']
    await run(join(BIN ?? '', 'pg_ctl'), args, { ...this.#user, cwd: this.#dir })
  }

  /** A new database, for a test that changes what is in the schema, or its settings. */
  async database(): Promise<Database & { readonly name: string }> {
    const name = `d${++this.#databases}`
    await this.sql(`CREATE DATABASE ${name}`)
    return {
      name,
      url: this.url.replace(/records$/, name),
      sql: (text) => this.sql(text, name),
      client: () => this.client(name),
    }
  }

  async sql(text: string, database = 'records'): Promise<(string | null)[][]> {
    const client = await this.client(database)
    try {
      const types = { getTypeParser: () => (value: string) => value }
      const { rows } = await client.query({ text, rowMode: 'array', types })
      return rows as (string | null)[][]
    } finally {
      await client.end()
    }
  }

  async client(database = 'records'): Promise<pg.Client> {
    const client = new pg.Client({ host: '127.0.0.1', port: this.port, user: 'owner', database })
    client.on('error', () => {})
    await client.connect()
    return client
  }

  /** At once, but not by SIGKILL, which would leave shared memory behind. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.#end('SIGQUIT')
    rmSync(this.#dir, { recursive: true, force: true })
  }

  /** Signals all its processes, each of which is its own process group; first stops the one that would start more. */
  #signal(signal: NodeJS.Signals): readonly number[] {
    const pid = this.#process?.pid
    if (pid === undefined) return []
    process.kill(pid, 'SIGSTOP')
    // Until it has stopped, it may still start a process that is not listed.
    while (!isStopped(pid));
    const all = this.pids
    for (const one of all) process.kill(one, signal)
    return all
  }

  async #end(signal: 'SIGINT' | 'SIGQUIT' | 'SIGKILL'): Promise<void> {
    const child = this.#process
    if (child === null) return
    const exited = once(child, 'exit')
    if (signal !== 'SIGKILL') {
      this.#signal('SIGCONT')
      child.kill(signal)
    }
    const killed = signal === 'SIGKILL' ? this.#signal(signal) : []
    this.#process = null
    await exited
    // When it starts again, no old process may still have its shared memory.
    while (killed.some(isAlive)) await new Promise((next) => setTimeout(next, 5))
  }
}

function childrenOf(pid: number): number[] {
  const children = readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8')
  return children.trim().split(' ').filter(Boolean).map(Number)
}

function isStopped(pid: number): boolean {
  const stat = readFileSync(`/proc/${pid}/stat`, 'utf8')
  // "pid (name) state": Z has ended already.
  return /[TZ]/.test(stat.charAt(stat.lastIndexOf(')') + 2))
}

function isAlive(pid: number): boolean {
  try {
    return readFileSync(`/proc/${pid}/cmdline`, 'utf8') !== ''
  } catch {
    return false
  }
}
