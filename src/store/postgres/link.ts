import type { Socket } from 'node:net'
import type { Client, Notification } from 'pg'
import type { Millis } from '../../core/record.ts'
import { MAX_U48 } from '../record/binary.ts'
import { RecordLocked, StoreFull, StoreUnavailable } from '../register.ts'
import type { PostgresAddress } from './url.ts'

export const CONNECT_TIMEOUT: Millis = 2000
const KEEP_ALIVE: Millis = 10_000
/** How long to wait for a server that does not close the connection. */
const DISCONNECT_TIMEOUT: Millis = 250
const APPLICATION = 'idempotency-proxy'

export type SqlArg = string | number | boolean | Buffer | null | readonly (string | number | Buffer)[]
/** Columns are text, whatever their type; null is NULL. */
export type SqlRow = readonly (string | null)[]

export function isNumber(text: string | null | undefined, most: number): text is string {
  return text != null && /^\d{1,15}$/.test(text) && Number(text) <= most
}

/** @throws {StoreUnavailable} */
export function sqlNumber(text: string | null | undefined): number {
  if (isNumber(text, MAX_U48)) return Number(text)
  throw nonsense(`${JSON.stringify(text)} is not a number`)
}

/** A reply that the functions of this schema never give. */
export function nonsense(what: string): StoreUnavailable {
  return new StoreUnavailable(`invalid reply from PostgreSQL: ${what}`, true)
}

/** An error reported by PostgreSQL itself, with its SQLSTATE. */
export interface PostgresError extends Error {
  readonly code: string
}

const AS_TEXT = { getTypeParser: () => (text: string) => text }

/** Parts of the client that its types omit. */
interface Inner {
  readonly connectionParameters: { options?: string; replication?: string }
  readonly connection: { attachListeners(stream: Socket): void; readonly stream: Socket }
}

export interface LinkOptions {
  /** Prefix of each statement: the server shows it in pg_stat_activity. */
  readonly comment: string
  /** Timeout for connecting. */
  readonly timeoutMs: Millis
}

/** One connection with one statement at a time: replies cannot be mixed up, and a failure affects one statement. */
export class PostgresLink {
  readonly #client: Client
  readonly #comment: string
  readonly #ended: Promise<void>
  #isOver = false
  /** The last statement has committed without the standby that it should have waited for. */
  #unreplicated: Error | null = null

  /**
   * Rejects if there is no connection in time. `onEnd`: the connection has ended for any reason; called after its statement has failed.
   */
  static async open(
    address: PostgresAddress,
    onEnd: (why: string) => void,
    { comment, timeoutMs }: LinkOptions = { comment: '', timeoutMs: CONNECT_TIMEOUT },
  ): Promise<PostgresLink> {
    // Loaded on first use.
    const { default: pg } = await import('pg')
    const { tls, password, ...where } = address
    const client = new pg.Client({
      ...where,
      // A function, since an empty password would be looked up in the environment and in files.
      password: () => password,
      ssl: tls?.() ?? false,
      client_encoding: 'utf8',
      sslnegotiation: 'postgres',
      application_name: APPLICATION,
      connectionTimeoutMillis: timeoutMs,
      keepAlive: true,
      keepAliveInitialDelayMillis: KEEP_ALIVE,
    })
    // Overrides PGOPTIONS and PGREPLICATION: only store.url counts.
    const { connectionParameters } = client as unknown as Inner
    delete connectionParameters.options
    delete connectionParameters.replication
    const link = new PostgresLink(client, onEnd, comment)
    try {
      await client.connect()
    } catch (error) {
      link.destroy()
      throw error
    }
    return link
  }

  private constructor(client: Client, onEnd: (why: string) => void, comment: string) {
    this.#client = client
    this.#comment = comment
    survivingNonsense(client)
    let why = 'the connection ended'
    client.on('notice', ({ routine, message }) => {
      // The one field that is always in English.
      if (routine === 'SyncRepWaitForLSN') this.#unreplicated = new Error(message)
    })
    client.on('error', (error) => {
      why = error.message
      this.destroy()
    })
    this.#ended = new Promise((ended) => {
      client.once('end', () => {
        this.#isOver = true
        ended()
        onEnd(why)
      })
    })
  }

  get isOver(): boolean {
    return this.#isOver
  }

  /** @param done gets the rows, or the error. Must not throw. */
  query(
    text: string,
    args: readonly SqlArg[],
    done: (error: Error | null, rows: readonly SqlRow[]) => void,
  ): void {
    this.#unreplicated = null
    const statement = {
      text: this.#comment + text,
      values: [...args],
      rowMode: 'array' as const,
      types: AS_TEXT,
    }
    this.#client.query<(string | null)[]>(statement, (error: Error | null, result) =>
      // After an error there is no result, despite the types.
      done(error ?? this.#unreplicated, error === null ? result.rows : []),
    )
  }

  ask(text: string, args: readonly SqlArg[] = []): Promise<readonly SqlRow[]> {
    return new Promise((resolve, reject) =>
      this.query(text, args, (error, rows) => (error === null ? resolve(rows) : reject(error))),
    )
  }

  /** Runs several statements at once, without arguments. */
  async execute(script: string): Promise<void> {
    await this.#client.query(this.#comment + script)
  }

  onNotification(heard: (message: string) => void): void {
    this.#client.on('notification', ({ payload }: Notification) => heard(String(payload)))
  }

  /** Closes the connection, whose statement fails if it is not done; resolves when it has ended. */
  async end(): Promise<void> {
    this.#client.end(() => {})
    const force = this.destroyAfter(DISCONNECT_TIMEOUT)
    await this.#ended
    clearTimeout(force)
  }

  readonly destroy = (): void => {
    ;(this.#client as unknown as Inner).connection.stream.destroy()
  }

  /** Unless the timer is cleared. */
  destroyAfter(time: Millis): NodeJS.Timeout {
    return setTimeout(this.destroy, time)
  }
}

/** The connection reports such failures itself. */
export function ignore(): void {}

/** An unreadable reply ends the connection; if left to the client, it would end the process. */
function survivingNonsense(client: Client): void {
  const { connection } = client as unknown as Inner
  const attach = connection.attachListeners.bind(connection)
  connection.attachListeners = (stream) => {
    attach(stream)
    for (const read of stream.listeners('data')) {
      stream.off('data', read as (bytes: Buffer) => void)
      stream.on('data', (bytes: Buffer) => {
        try {
          ;(read as (bytes: Buffer) => void)(bytes)
        } catch (error) {
          stream.destroy(error as Error)
        }
      })
    }
  }
}

/**
 * SQLSTATE classes that prove a rollback. Others prove nothing, such as a shutdown (57P01), a pooler whose server is gone (08) or an I/O
 * error (58).
 */
const ROLLED_BACK = /^(?:0A|2[1-8]|3[89DF]|40(?!003)|42|5[345]|57014|P0|IP001)/
/** The disk is full, or the primary is read-only: managed servers make it so shortly before the disk is full. */
const FULL = ['53100', '25006']
/** Another transaction, perhaps an upstream's, holds a lock that this one needs. */
const LOCKED = '55P03'
/** Errors raised by the functions. */
export const STANDBY = 'IP001'

/** Nothing was applied, and a retry may succeed at once. */
export function isWorthAnother(error: Error): boolean {
  return /^40(?:001|P01)$/.test(sqlState(error))
}

/** Nothing was applied, and perhaps because of one of several records: a lock, a conflict, a value, or that it is new where nothing fits. */
export function isOfOne(error: Error): boolean {
  return /^(?:2[1-3]|25006|40(?!003)|53100|55|P0)/.test(sqlState(error))
}

/** An AggregateError for several addresses has a code and no message. */
export function reasonOf(error: Error): string {
  return error.message || sqlState(error)
}

export function sqlState(error: Error): string {
  return (error as Partial<PostgresError>).code ?? ''
}

export function postgresFailure(error: Error): StoreUnavailable {
  const code = sqlState(error)
  // In Node's own errors, `code` is a name.
  if (!/^[0-9A-Z]{5}$/.test(code))
    return new StoreUnavailable(`no answer from PostgreSQL: ${error.message}`, true)
  if (code === LOCKED) return new RecordLocked(`PostgreSQL refuses: ${error.message} (${code})`)
  if (FULL.includes(code)) return new StoreFull(`PostgreSQL is full: ${error.message}`)
  return new StoreUnavailable(`PostgreSQL refuses: ${error.message} (${code})`, !ROLLED_BACK.test(code))
}
