/**
 * A charges API that cooperates with the proxy in front of it: it keeps the highest `Idempotency-Fence` of every
 * `Idempotency-Record` in its own database, refuses older attempts, and says in `Idempotency-Outcome` what it did where
 * the status does not. See README.md beside it and docs/cooperative-upstreams.md.
 */
import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { DatabaseSync } from 'node:sqlite'
import { json as jsonOf } from 'node:stream/consumers'
import { parseArgs } from 'node:util'

/** What became of one attempt. */
export interface LogLine {
  readonly msg: 'attempt'
  /** The same id as in the proxy's log, its problem answers and its store. */
  readonly record: string
  readonly fence: number
  readonly result: 'charged' | 'found' | 'stale' | 'refused'
}

export interface CooperativeUpstream extends AsyncDisposable {
  readonly url: string
  readonly log: readonly LogLine[]
  /** Resolves with the first line (past or future) that is accepted. */
  logged(accept: (line: LogLine) => boolean): Promise<LogLine>
  /** How many charges there are. */
  charges(): number
  /** The next attempt stands still there until the promise settles; the result resolves when it has arrived. */
  pauseNext(where: 'before the commit' | 'after the commit', until: Promise<void>): Promise<void>
}

export async function startCooperativeUpstream(
  port = 0,
  file = ':memory:',
  write: (line: string) => void = () => {},
): Promise<CooperativeUpstream> {
  const db = new DatabaseSync(file)
  db.exec(`
    CREATE TABLE IF NOT EXISTS attempts (record TEXT PRIMARY KEY, fence INTEGER NOT NULL, charge TEXT);
    CREATE TABLE IF NOT EXISTS charges (id TEXT PRIMARY KEY, amount INTEGER NOT NULL, record TEXT NOT NULL)`)
  const enter = db.prepare(`
    INSERT INTO attempts (record, fence) VALUES (?, ?)
    ON CONFLICT (record) DO UPDATE SET fence = excluded.fence WHERE fence < excluded.fence`)
  const found = db.prepare('SELECT charge FROM attempts WHERE record = ? AND charge IS NOT NULL')
  const finish = db.prepare(
    'UPDATE attempts SET charge = ? WHERE record = ? AND fence = ? AND charge IS NULL',
  )
  const insert = db.prepare('INSERT INTO charges (id, amount, record) VALUES (?, ?, ?)')
  const count = db.prepare('SELECT count(*) AS n FROM charges')

  const log: LogLine[] = []
  const watching: { accept: (line: LogLine) => boolean; resolve: (line: LogLine) => void }[] = []
  const pauses: { where: string; until: Promise<void>; arrived: () => void }[] = []

  async function pause(where: string): Promise<void> {
    if (pauses[0]?.where !== where) return
    const next = pauses.shift()
    next?.arrived()
    await next?.until
  }

  async function charge(req: IncomingMessage, res: ServerResponse): Promise<void> {
    const { amount } = (await jsonOf(req)) as { amount: number }
    const record = String(req.headers['idempotency-record'] ?? '')
    const fence = Number(req.headers['idempotency-fence'] ?? 0)
    const demo = req.headers['x-demo']
    const tell = (result: LogLine['result']): void => {
      const line: LogLine = { msg: 'attempt', record, fence, result }
      log.push(line)
      write(`${JSON.stringify(line)}\n`)
      for (const { accept, resolve } of watching) if (accept(line)) resolve(line)
    }

    if (record === '' || !(fence > 0)) {
      tell('refused')
      return answer(res, 400, { error: 'this API is called through its proxy' }, 'not-applied')
    }
    // 1. The highest number enters, first of all: an older attempt can do nothing from here on, wherever it is now.
    if (enter.run(record, fence).changes === 0) {
      tell('stale')
      return answer(res, 409, { error: 'a newer attempt exists' }, 'not-applied')
    }
    // 2. An earlier attempt may have been finished and its answer lost.
    const earlier = found.get(record) as { charge: string } | undefined
    if (earlier !== undefined) {
      tell('found')
      return answer(res, 201, JSON.parse(earlier.charge) as object)
    }
    // Nothing has been done, and no older attempt will: that is what makes `not-applied` true.
    if (demo === 'maintenance') {
      tell('refused')
      return answer(res, 503, { error: 'maintenance' }, 'not-applied')
    }
    if (demo === 'locked') {
      tell('refused')
      return answer(res, 409, { error: 'the account is locked' }, 'not-applied')
    }

    const made = { id: `ch_${randomBytes(9).toString('base64url')}`, amount }
    await pause('before the commit')

    // 3. The work and the right to do it are one transaction: who was overtaken meanwhile does nothing.
    db.exec('BEGIN IMMEDIATE')
    if (finish.run(JSON.stringify(made), record, fence).changes === 0) {
      db.exec('ROLLBACK')
      tell('stale')
      return answer(res, 409, { error: 'a newer attempt exists' }, 'not-applied')
    }
    insert.run(made.id, made.amount, record)
    db.exec('COMMIT')
    tell('charged')

    await pause('after the commit')
    // The money has moved, the rest has not worked: without the header nobody could tell.
    if (demo === 'receipt-fails')
      return answer(res, 500, { ...made, error: 'no receipt was sent' }, 'applied')
    answer(res, 201, made)
  }

  const server = createServer((req, res) => {
    if (req.method === 'POST' && req.url === '/v1/charges') charge(req, res).catch(() => res.destroy())
    else if (req.method === 'GET' && req.url === '/v1/charges') answer(res, 200, { charges: count.get()?.n })
    else answer(res, 404, { error: 'no such resource' })
  })
  server.listen(port, '127.0.0.1')
  await once(server, 'listening')
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    log,
    logged(accept) {
      const already = log.find(accept)
      return already === undefined
        ? new Promise((resolve) => watching.push({ accept, resolve }))
        : Promise.resolve(already)
    },
    charges: () => Number(count.get()?.n),
    pauseNext: (where, until) =>
      new Promise((resolve) => pauses.push({ where, until, arrived: () => resolve() })),
    async [Symbol.asyncDispose]() {
      server.closeAllConnections()
      await new Promise((resolve) => server.close(resolve))
      db.close()
    },
  }
}

function answer(
  res: ServerResponse,
  status: number,
  body: object,
  outcome?: 'applied' | 'not-applied',
): void {
  const bytes = Buffer.from(JSON.stringify(body))
  res.writeHead(status, {
    'Content-Type': 'application/json',
    'Content-Length': bytes.length,
    ...(outcome === undefined ? {} : { 'Idempotency-Outcome': outcome }),
  })
  res.end(bytes)
}

if (import.meta.main) {
  const { values: flags } = parseArgs({
    options: {
      port: { type: 'string', default: process.env.PORT ?? '3000' },
      db: { type: 'string', default: process.env.DATABASE ?? 'charges.db' },
    },
  })
  const upstream = await startCooperativeUpstream(
    Number(flags.port),
    flags.db,
    (line) => void process.stdout.write(line),
  )
  process.stdout.write(`${JSON.stringify({ msg: 'listening', url: upstream.url })}\n`)
  for (const signal of ['SIGTERM', 'SIGINT'] as const)
    process.once(signal, () => void upstream[Symbol.asyncDispose]())
}
