/**
 * The service of one step. `POST /charge` does its work, `POST /undo-charge` takes it back; both would do it again if they were asked
 * again. It writes down the `Idempotency-Record` of its proxy, which asks by it after a crash. See README.md.
 */
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { DatabaseSync } from 'node:sqlite'
import { json } from 'node:stream/consumers'

const name = process.env.STEP ?? 'charge'
const db = new DatabaseSync(process.env.DB ?? `${name}.db`)
db.exec(`PRAGMA journal_mode = WAL;
  CREATE TABLE IF NOT EXISTS work (id INTEGER PRIMARY KEY, record TEXT, action TEXT, about TEXT, status INTEGER)`)
const insert = db.prepare('INSERT INTO work (record, action, about, status) VALUES (?, ?, ?, ?)')
const byRecord = db.prepare('SELECT id, record, status FROM work WHERE record = ?')
const all = db.prepare('SELECT id, action, about, status FROM work ORDER BY id')

interface Order {
  readonly booking?: string
  /** The step that says no. */
  readonly refuse?: string
  /** What is undone. */
  readonly id?: number
}

async function work(action: string, request: IncomingMessage, response: ServerResponse): Promise<void> {
  const { booking, refuse, id } = (await json(request)) as Order
  const demo = request.headers['x-demo']
  /** `X-Demo: SIGSTOP charge received`: this process stops there, and whoever sent it kills something. */
  const at = (where: string): void => {
    if (demo === `SIGSTOP ${action} ${where}`) process.kill(process.pid, 'SIGSTOP')
  }
  at('received')
  const status = refuse === action ? 402 : 201
  const record = String(request.headers['idempotency-record'])
  const { lastInsertRowid } = insert.run(record, action, String(booking ?? id), status)
  process.stdout.write(`done ${action}\n`)
  at('done')
  answer(response, status, { id: Number(lastInsertRowid) })
}

/** What became of a record, for the proxy. */
function find(record: string, response: ServerResponse): void {
  const found = byRecord.get(record) as { id: number; status: number } | undefined
  if (found === undefined) return answer(response, 404, { error: 'nothing was done under this record' })
  answer(response, 200, { record, status: found.status, answer: { id: found.id } })
}

function answer(response: ServerResponse, status: number, body: object): void {
  response.writeHead(status, { 'Content-Type': 'application/json' }).end(JSON.stringify(body))
}

const server = createServer((request, response) => {
  const { pathname, searchParams } = new URL(request.url ?? '/', 'http://service')
  const action = pathname.slice(1)
  const record = searchParams.get('record')
  if (request.method === 'POST' && [name, `undo-${name}`].includes(action))
    work(action, request, response).catch(() => answer(response, 400, { error: 'the body is no JSON' }))
  else if (action === 'work' && record !== null) find(record, response)
  else if (action === 'work') answer(response, 200, all.all())
  else answer(response, 404, { error: 'no such resource' })
})
server.listen(Number(process.env.PORT ?? 3000), '127.0.0.1', () =>
  process.stdout.write(`listening on http://127.0.0.1:${(server.address() as AddressInfo).port}\n`),
)
