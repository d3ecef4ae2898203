/**
 * Starts everything: a broker, PostgreSQL with an outbox, its sender, two consumers, the proxy, and the service that does the work. Run as
 * a program, it orders something, says what becomes of it, and stays up until Ctrl-C. See README.md.
 */
import { spawnSync } from 'node:child_process'
import { randomUUID } from 'node:crypto'
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { parseArgs } from 'node:util'
import { NO_POSTGRES, PostgresServer } from '../../test/support/postgres.ts'
import { type Command, freePort, Part, PROXY, until } from '../parts.ts'
import type { Broker } from './broker.ts'
import { openBroker } from './open.ts'

export const BROKERS = ['nats', 'rabbitmq'] as const
export type BrokerKind = (typeof BROKERS)[number]

const HERE = import.meta.dirname
/** Debian's own command runs it as another user, on that user's files. */
const RABBITMQ = '/usr/lib/rabbitmq/bin/rabbitmq-server'
const NATS = ['nats-server', '/usr/sbin/nats-server'].find(
  (one) => spawnSync(one, ['--version']).status === 0,
)

/** Why it cannot be started here; false: it can. */
export function lack(broker: BrokerKind): string | false {
  if (NO_POSTGRES) return NO_POSTGRES
  if (broker === 'nats') return NATS === undefined && 'there is no NATS here: install the package nats-server'
  return !existsSync(RABBITMQ) && 'there is no RabbitMQ here: install the package rabbitmq-server'
}

export interface Row {
  readonly action: string
  /** The message id. */
  readonly about: string
  readonly status: number
}

export class World implements AsyncDisposable {
  readonly postgres: PostgresServer
  readonly parts = new Map<string, Part>()
  readonly brokerUrl: string
  readonly #service: string
  readonly #folder: string

  private constructor(postgres: PostgresServer, brokerUrl: string, service: string, folder: string) {
    this.postgres = postgres
    this.brokerUrl = brokerUrl
    this.#service = service
    this.#folder = folder
  }

  /** `waits`: how soon somebody silent is given up. */
  static async start(broker: BrokerKind, waits: Readonly<Record<string, string>> = {}): Promise<World> {
    const why = lack(broker)
    if (why !== false) throw new Error(why)
    const folder = mkdtempSync(join(tmpdir(), 'queue-'))
    const [port, distribution, names, service, proxy] = (await Promise.all(
      Array.from({ length: 5 }, () => freePort()),
    )) as [number, number, number, number, number]
    const scheme = broker === 'nats' ? 'nats' : 'amqp'
    const world = new World(
      await PostgresServer.start(),
      `${scheme}://127.0.0.1:${port}`,
      `http://127.0.0.1:${service}`,
      folder,
    )
    const add = (name: string, command: Command): void => void world.parts.set(name, new Part(name, command))
    if (broker === 'nats') add('broker', nats(folder, port))
    else for (const [name, command] of rabbitMq(folder, port, distribution, names)) add(name, command)
    const node = (file: string, env: Record<string, string>, ready?: RegExp): Command => ({
      run: [process.execPath, join(HERE, file)],
      env: { BROKER_URL: world.brokerUrl, ...env, ...waits },
      ...(ready && { ready }),
    })
    add(
      'service',
      node('../workflow/service.ts', { STEP: 'orders', PORT: `${service}`, DB: `${folder}/orders.db` }),
    )
    add('proxy', {
      run: [...PROXY, join(HERE, 'proxy.yaml')],
      env: {
        PROXY_LISTEN: `127.0.0.1:${proxy}`,
        PROXY_ADMIN_LISTEN: 'none',
        PROXY_UPSTREAM: world.#service,
        PROXY_STORE: `sqlite:${folder}/records.db`,
        ...waits,
      },
    })
    add('outbox', node('outbox.ts', { DATABASE_URL: world.postgres.url }, /^ready/))
    for (const name of ['consumer', 'other consumer'])
      add(name, node('consumer.ts', { PROXY_URL: `http://127.0.0.1:${proxy}/orders` }, /^ready/))
    try {
      await world.postgres.sql(readFileSync(join(HERE, 'outbox.sql'), 'utf8'))
      for (const part of world.parts.values()) await part.start()
    } catch (error) {
      await world[Symbol.asyncDispose]()
      throw error
    }
    return world
  }

  part(name: string): Part {
    return this.parts.get(name) as Part
  }

  broker(): Promise<Broker> {
    return openBroker(this.brokerUrl)
  }

  /** An order and the message about it, in one transaction. Returns the message id. */
  async order(refuse = ''): Promise<string> {
    const id = randomUUID()
    await this.postgres.sql(`BEGIN;
      INSERT INTO orders (id, amount) VALUES ('${id}', 42);
      INSERT INTO outbox (id, body) VALUES ('${id}', '${bodyOf(id, refuse)}');
      COMMIT`)
    return id
  }

  /** Rows that the outbox has yet to send, or may send again. */
  async unsent(): Promise<number> {
    const [row] = await this.postgres.sql('SELECT count(*) FROM outbox WHERE sent_at IS NULL')
    return Number(row?.[0])
  }

  /** All that the service has done. */
  async work(): Promise<Row[]> {
    return (await (await fetch(`${this.#service}/work`)).json()) as Row[]
  }

  /** As a supervisor does: starts again whatever has ended, except these. */
  async supervise(...except: readonly Part[]): Promise<void> {
    for (const part of this.parts.values())
      if (!part.isRunning && !except.includes(part)) await part.start().catch(() => {})
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await Promise.all([...this.parts.values()].map((part) => part.kill()))
    // Ctrl-C has ended it already.
    await this.postgres[Symbol.asyncDispose]().catch(() => {})
    rmSync(this.#folder, { recursive: true, force: true })
  }
}

/** With `refuse` the service says no. */
export function bodyOf(id: string, refuse: string): string {
  return JSON.stringify({ booking: id, refuse })
}

function nats(folder: string, port: number): Command {
  const run = [NATS ?? '', '-a', '127.0.0.1', '-p', `${port}`, '-js', '-sd', join(folder, 'nats')]
  return { run, env: {}, ready: /Server is ready/ }
}

/** A node of its own, beside any that the machine has. */
function rabbitMq(folder: string, port: number, distribution: number, names: number): [string, Command][] {
  const home = join(folder, 'rabbitmq')
  mkdirSync(home)
  writeFileSync(join(home, 'plugins'), '[].')
  const env = {
    HOME: home,
    ERL_EPMD_PORT: `${names}`,
    ERL_EPMD_ADDRESS: '127.0.0.1',
    RABBITMQ_CONF_ENV_FILE: '/dev/null',
    RABBITMQ_CONFIG_FILE: join(home, 'none'),
    RABBITMQ_ENABLED_PLUGINS_FILE: join(home, 'plugins'),
    RABBITMQ_MNESIA_BASE: join(home, 'data'),
    RABBITMQ_LOG_BASE: join(home, 'log'),
    RABBITMQ_LOGS: '-',
    RABBITMQ_NODENAME: 'queue@localhost',
    RABBITMQ_NODE_IP_ADDRESS: '127.0.0.1',
    RABBITMQ_NODE_PORT: `${port}`,
    RABBITMQ_DIST_PORT: `${distribution}`,
    RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS: '+S 1:1',
  }
  return [
    // The broker would leave one behind.
    ['names of nodes', { run: ['epmd', '-d'], env, ready: /running/ }],
    ['broker', { run: [RABBITMQ], env, ready: /Server startup complete/ }],
  ]
}

if (import.meta.main) {
  const { values: flags } = parseArgs({ options: { broker: { type: 'string', default: 'nats' } } })
  try {
    const world = await World.start(flags.broker === 'rabbitmq' ? 'rabbitmq' : 'nats')
    for (const signal of ['SIGINT', 'SIGTERM'] as const)
      process.once(signal, () => void world[Symbol.asyncDispose]())
    const ids = [await world.order(), await world.order('orders')]
    let rows: Row[] = []
    await until(async () => (rows = await world.work()).length === ids.length)
    for (const { about, status } of rows) process.stdout.write(`order ${about}: ${status}\n`)
    process.stdout.write(`${world.brokerUrl} and ${world.postgres.url} stay up until Ctrl-C\n`)
  } catch (error) {
    process.stderr.write(`${(error as Error).message}\n`)
    process.exitCode = 1
  }
}
