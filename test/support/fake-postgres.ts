import { once } from 'node:events'
import { type AddressInfo, createServer, type Socket } from 'node:net'
import type { PostgresAddress } from '../../src/store/postgres-url.ts'

type Column = string | null

/** A statement that the client has sent, and waits for. */
export interface Asked {
  /** With its comment. */
  readonly text: string
  readonly args: readonly Column[]
  /** Of the connection, counted from 1. */
  readonly connection: number
  answer(...rows: readonly (readonly Column[])[]): void
  fail(code: string, message?: string): void
}

/** Speaks enough of PostgreSQL's protocol, and knows nothing: a test answers each statement when and as it likes. */
export interface FakePostgres extends AsyncDisposable {
  readonly port: number
  /** As a store is given it. */
  readonly address: PostgresAddress
  /** Called with each statement. */
  onAsked: (asked: Asked) => void
  /** False: connections are accepted, and their beginning is not answered until {@link welcomeAll}. */
  welcomes: boolean
  welcomeAll(): void
  /** What the connections gave as their password. */
  readonly passwords: readonly string[]
  /** Sends a notification on each connection. */
  notify(channel: string, payload: string): void
  /** Connections that are open. */
  readonly open: ReadonlyMap<number, Socket>
  /** Connections that were ever opened. */
  readonly opened: number
}

export async function fakePostgres(): Promise<FakePostgres> {
  const open = new Map<number, Socket>()
  let opened = 0
  const unwelcome: (() => void)[] = []
  const passwords: string[] = []
  const self = {
    port: 0,
    get address() {
      return { host: '127.0.0.1', port: self.port, user: 'u', password: 'p', database: 'd', tls: null }
    },
    onAsked: (_asked: Asked) => {},
    welcomes: true,
    welcomeAll() {
      for (const welcome of unwelcome.splice(0)) welcome()
    },
    passwords,
    open,
    notify(channel: string, payload: string) {
      for (const socket of open.values()) socket.write(message('A', `\0\0\0\0${channel}\0${payload}\0`))
    },
    get opened() {
      return opened
    },
    async [Symbol.asyncDispose]() {
      for (const socket of open.values()) socket.destroy()
      await new Promise((resolve) => listener.close(resolve))
    },
  }
  const listener = createServer((socket) => {
    const connection = ++opened
    open.set(connection, socket)
    socket.on('error', () => {}).on('close', () => open.delete(connection))
    let unread = Buffer.alloc(0)
    let isWelcome = false
    let text = ''
    let args: Column[] = []
    const read = (type: string, body: Buffer): void => {
      if (type === 'p') {
        passwords.push(body.toString('utf8', 0, body.length - 1))
        socket.write(Buffer.concat([message('R', '\0\0\0\0'), READY]))
      } else if (type === 'P') text = body.toString('utf8', 1, body.indexOf(0, 1))
      else if (type === 'Q') [text, args] = [body.toString('utf8', 0, body.length - 1), []]
      else if (type === 'B') args = argumentsIn(body)
      if (type === 'S' || type === 'Q')
        self.onAsked({
          text,
          args,
          connection,
          answer: (...rows) => {
            socket.write(Buffer.concat([...rows.map(rowOf), message('C', 'SELECT\0'), READY]))
          },
          fail: (code, words = 'because') => {
            const fields = `SERROR\0C${code}\0M${words}\0\0`
            socket.write(Buffer.concat([message('E', fields), READY]))
          },
        })
    }
    socket.on('data', (bytes: Buffer) => {
      unread = Buffer.concat([unread, bytes])
      const start = (): number => (isWelcome ? 1 : 0)
      while (unread.length >= start() + 4) {
        const end = start() + unread.readUInt32BE(start())
        if (unread.length < end) return
        const [type, body] = [unread.toString('latin1', 0, start()), unread.subarray(start() + 4, end)]
        unread = unread.subarray(end)
        if (isWelcome) read(type, body)
        else {
          isWelcome = true
          // A password in clear.
          const welcome = () => socket.write(message('R', '\0\0\0\x03'))
          if (self.welcomes) welcome()
          else unwelcome.push(welcome)
        }
      }
    })
  })
  listener.listen(0, '127.0.0.1')
  await once(listener, 'listening')
  return Object.defineProperty(self, 'port', { value: (listener.address() as AddressInfo).port })
}

function message(type: string, body: string | Buffer): Buffer {
  const bytes = Buffer.from(body as string)
  const head = Buffer.from(`${type}\0\0\0\0`)
  head.writeUInt32BE(bytes.length + 4, 1)
  return Buffer.concat([head, bytes])
}

const READY = message('Z', 'I')

function rowOf(columns: readonly Column[]): Buffer {
  const count = Buffer.alloc(2)
  count.writeUInt16BE(columns.length)
  const names = columns.map(() => Buffer.concat([Buffer.from('c\0'), Buffer.alloc(18)]))
  const values = columns.map((column) => {
    const bytes = Buffer.from(column ?? '')
    const length = Buffer.alloc(4)
    length.writeInt32BE(column === null ? -1 : bytes.length)
    return Buffer.concat([length, bytes])
  })
  return Buffer.concat([
    message('T', Buffer.concat([count, ...names])),
    message('D', Buffer.concat([count, ...values])),
  ])
}

/** Of a Bind message: two names, the formats of the arguments, the arguments, of which some are bytes. */
function argumentsIn(body: Buffer): Column[] {
  let at = body.indexOf(0, body.indexOf(0) + 1) + 1
  at += 2 + 2 * body.readUInt16BE(at)
  const count = body.readUInt16BE(at)
  at += 2
  return Array.from({ length: count }, () => {
    const length = body.readInt32BE(at)
    at += 4
    if (length < 0) return null
    const from = at
    at += length
    return body.toString('latin1', from, at)
  })
}
