import type pg from 'pg'
import type { Test } from 'tap'
import { layoutScript } from '../../src/store/postgres-layout.ts'
import { PostgresServer } from './postgres.ts'

export type Columns = Record<string, string | null>

/** Some columns of a row. Not `t.match`: for that, '10' is in '100'. */
export function has(
  t: Test,
  row: Columns | null | undefined,
  expected: Readonly<Record<string, string | null | RegExp>>,
  message = '',
): void {
  const found = Object.entries(expected).map(([name, value]) => {
    const column = row?.[name] ?? null
    return [name, value instanceof RegExp && value.test(column ?? '') ? value : column]
  })
  t.strictSame(Object.fromEntries(found), expected, message)
}

export interface Written {
  readonly service?: string
  readonly schema?: number
  readonly state?: number
  readonly fence?: number
  readonly token?: string
  readonly createdAt?: number
  readonly head?: Buffer
  readonly dueIn?: number
  readonly dropIn?: number
  readonly entry?: number
  readonly grace?: number
  readonly seen?: number
}

export const [IN_PROGRESS, COMPLETED, RETRYABLE, UNKNOWN, EXPIRED] = [1, 2, 3, 4, 5]
export const T = 1_000_000
/** Its fifth byte has the flags. */
export const head = (flags: number, more = 0) =>
  Buffer.concat([Buffer.from([0, 0, 0, 1 + more, flags]), Buffer.alloc(more)])
export const HEAD = head(0, 3)
export const BODY_ENDS = head(4)

/** The functions of the schema, on a server of its own whose clock for them stands still at the instant that each call gives. */
export async function sqlFunctions(t: Test) {
  const server = await PostgresServer.start('fsync=off')
  t.teardown(() => server[Symbol.asyncDispose]())
  const client: pg.Client = await server.client()
  t.teardown(() => client.end())
  await client.query(layoutScript())
  const { rows: clocks } = await client.query(
    'SELECT abs(idempotency.now(5000) - 5000 - extract(epoch FROM clock_timestamp()) * 1000) < 1000 AS is_right',
  )
  const isClockRight = clocks[0]?.is_right === true
  await client.query(
    `CREATE OR REPLACE FUNCTION idempotency.now(_skew bigint) RETURNS bigint LANGUAGE sql AS 'SELECT _skew'`,
  )
  const types = { getTypeParser: () => (value: string) => value }
  const rows = async (text: string, values: readonly unknown[] = []): Promise<Columns[]> =>
    (await client.query({ text, values: [...values], types })).rows as Columns[]
  const call = async (name: string, ...args: readonly unknown[]): Promise<Columns> => {
    const places = args.map((_, n) => `$${n + 2}`).join(', ')
    const [row = {}] = await rows(`SELECT f.* FROM idempotency.${name}($1, ${places}) f`, [77, ...args])
    const { number, ...columns } = row
    if (number !== '77') throw new Error(`${name} does not give back its number but ${number}`)
    return columns
  }
  t.beforeEach(async () => {
    await client.query(
      `TRUNCATE idempotency.unresolved, idempotency.notes, idempotency.buckets, idempotency.waits, idempotency.epochs, idempotency.graces;
       DELETE FROM idempotency.records; UPDATE idempotency.pruning SET page = 0, done_at = 0`,
    )
  })

  const put = (id: string, at: number, over: Written = {}): Promise<Columns> => {
    const {
      service = 'pay',
      schema = 1,
      state = IN_PROGRESS,
      fence = 0,
      token = 'mine',
      createdAt = 0,
    } = over
    const { head = HEAD, dueIn = 10, dropIn = 100, entry = 0, grace = 0, seen = 0 } = over
    const record = [
      schema,
      state,
      fence,
      Buffer.from(token),
      createdAt,
      head,
      Buffer.from('p'),
      dueIn,
      dropIn,
    ]
    return call('put', service, id, at, 1000, ...record, entry, grace, seen)
  }
  const swap = (
    id: string,
    at: number,
    condition: { version?: number; token?: string; states?: number[] },
    over: Written & { more?: number } = {},
  ): Promise<Columns> => {
    const { service = 'pay', schema = 1, state = IN_PROGRESS, fence = 0, token = 'mine', more = 0 } = over
    const { head = HEAD, dueIn = 10, dropIn = 100, grace = 0, seen = 0 } = over
    const { version = null, token: own, states = null } = condition
    const expected = [version, own === undefined ? null : Buffer.from(own), states]
    const record = [schema, state, fence, Buffer.from(token), head, Buffer.from('q'), dueIn, dropIn, more]
    return call('swap', service, id, at, 1000, ...expected, ...record, grace, seen)
  }
  const get = (id: string, at: number, service = 'pay') => call('get', service, id, at, 1000)
  const isThere = async (id: string, at: number, service = 'pay') =>
    /[^(),]/.test((await get(id, at, service))['stored'] ?? '')
  const stored = async (id: string, service = 'pay'): Promise<Columns> =>
    (
      await rows(
        `SELECT version, fence, created_at, updated_at, due, drop_at, schema, state, convert_from(token, 'UTF8') AS token,
          encode(head, 'hex') AS head, convert_from(payload, 'UTF8') AS payload
         FROM idempotency.stored WHERE id = $1 AND service = $2`,
        [id, service],
      )
    )[0] ?? {}
  const lease = async (id: string, service = 'pay'): Promise<Columns | null> =>
    (
      await rows(
        `SELECT due, drop_at, renewals, state, convert_from(token, 'UTF8') AS token FROM idempotency.unresolved
         WHERE id = $1 AND service = $2`,
        [id, service],
      )
    )[0] ?? null
  const numbers = (columns: Record<string, number | string>): Columns =>
    Object.fromEntries(Object.entries(columns).map(([name, value]) => [name, String(value)]))
  const waits = (id: string, service: string, ...channels: string[]) =>
    rows('INSERT INTO idempotency.waits SELECT 1, $1, $2, c FROM unnest($3::text[]) c', [
      id,
      service,
      channels,
    ])

  const held = (at: number, entry: number, seen = 0, service = 'pay', grace = 1000) =>
    rows('SELECT remaining, since FROM idempotency.held($1, $2, $3, $4, $5)', [
      service,
      at,
      entry,
      grace,
      seen,
    ]).then(([row]) => [row?.['remaining'], row?.['since']].map((one) => (one == null ? null : Number(one))))
  const promoted = (service = 'pay') =>
    rows("UPDATE idempotency.epochs SET started = 'epoch' WHERE service = $1", [service])

  return {
    isClockRight,
    server,
    client,
    rows,
    call,
    put,
    swap,
    get,
    isThere,
    stored,
    lease,
    numbers,
    waits,
    held,
    promoted,
  }
}
