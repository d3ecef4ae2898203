/**
 * Sends what a transaction wrote into the outbox, under the row's id. Killed between the sending and the commit, it sends again, and the
 * consumer's proxy recognises the id. See README.md.
 */
import { setTimeout as sleep } from 'node:timers/promises'
import pg from 'pg'
import { openBroker } from './open.ts'

const PAUSE = 100

/** `DEMO=SIGKILL outbox read`: where this process dies; or stops, while its sender kills something else. */
function at(point: string): void {
  const [signal, ...rest] = (process.env.DEMO ?? '').split(' ')
  if (rest.join(' ') === `outbox ${point}`) process.kill(process.pid, signal)
}

try {
  const broker = await openBroker(process.env.BROKER_URL ?? 'amqp://127.0.0.1')
  const client = new pg.Client({ connectionString: process.env.DATABASE_URL ?? 'postgres://127.0.0.1/shop' })
  // The next query tells.
  client.on('error', () => {})
  await client.connect().catch((error: Error) => {
    throw new Error(`PostgreSQL refuses: ${error.message}`)
  })
  process.stdout.write('ready\n')
  for (;;) {
    await client.query('BEGIN')
    // Another sender takes other rows.
    const { rows } = await client.query<{ id: string; body: string }>(
      'SELECT id, body::text FROM outbox WHERE sent_at IS NULL ORDER BY created_at LIMIT 10 FOR UPDATE SKIP LOCKED',
    )
    if (rows.length > 0) at('read')
    for (const { id, body } of rows) await broker.publish('orders', { id, body: Buffer.from(body) })
    if (rows.length > 0) at('published')
    await client.query('UPDATE outbox SET sent_at = now() WHERE id = ANY($1)', [rows.map(({ id }) => id)])
    if (rows.length > 0) at('updated')
    await client.query('COMMIT')
    if (rows.length > 0) at('committed')
    else await sleep(PAUSE)
  }
} catch (error) {
  process.stderr.write(`${(error as Error).message}\n`)
  process.exit(1)
}
