import { createHash } from 'node:crypto'
import { once } from 'node:events'
import { type AddressInfo, createServer, type Socket } from 'node:net'
import { createServer as createTlsServer } from 'node:tls'
import type { Test } from 'tap'
import { admittingScript, script } from '../../src/store/redis-connection.ts'
import { repliesTo } from './replies.ts'

export type Answer = (command: string[], socket: Socket) => string | Buffer | null

/** A server that answers what the test says, or not at all (null); over TLS if it has a certificate. */
export async function fake(t: Test, answer: Answer, tls?: { readonly cert: Buffer; readonly key: Buffer }) {
  const sockets: Socket[] = []
  const take = (socket: Socket): void => {
    sockets.push(socket)
    socket.on('error', () => {})
    const read = repliesTo((command) => {
      const reply = answer((command as Buffer[]).map(String), socket)
      if (reply !== null) socket.write(reply)
    })
    socket.on('data', read)
  }
  const server = (tls === undefined ? createServer(take) : createTlsServer(tls, take)).listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => {
    server.close()
    for (const socket of sockets) socket.destroy()
  })
  const { port } = server.address() as AddressInfo
  return { port, url: `redis://127.0.0.1:${port}`, sockets }
}

/** Greets as Redis does, and leaves the rest to `answer`. */
export const greeting =
  (answer: Answer): Answer =>
  (command, socket) =>
    command[0] === 'ping' ? '+PONG\r\n' : command[0] === 'client' ? '+OK\r\n' : answer(command, socket)

export const bulk = (text: string): string => `$${Buffer.byteLength(text)}\r\n${text}\r\n`
export const int = (n: number): string => `:${n}\r\n`
export const array = (...parts: readonly string[]): string => `*${parts.length}\r\n${parts.join('')}`
export const words = (...texts: readonly string[]): string => array(...texts.map(bulk))
export const NULL = '$-1\r\n'
export const OK = '+OK\r\n'

/** What `ROLE` answers. */
export const master = (replicas = 0): string =>
  array(bulk('master'), int(0), array(...Array.from({ length: replicas }, () => int(0))))

/** What `CLUSTER SLOTS` answers: the master of each range, and its replicas. */
export const slots = (...ranges: readonly (readonly [first: number, last: number, ...ports: number[]])[]) =>
  array(
    ...ranges.map(([first, last, ...ports]) =>
      array(int(first), int(last), ...ports.map((port) => array(bulk('127.0.0.1'), int(port)))),
    ),
  )
export const LAST_SLOT = 16_383

/** By their SHA-1. */
const SCRIPTS = new Map(
  ['get', 'renew', 'remove', 'due', 'throttle', 'note', 'notes']
    .map((name) => [name, script(name)] as const)
    .concat(['put', 'swap', 'admit'].map((name) => [name, admittingScript(name)]))
    .concat(
      ['put', 'swap'].map((name) => [
        `${name} though full`,
        admittingScript(name, '#!lua flags=allow-oom\n'),
      ]),
    )
    .map(([name, { source }]) => [createHash('sha1').update(source).digest('hex'), name]),
)

/** Bytes; no answer (null); or a script's reply without the number of its call. */
type Said = string | null | readonly string[]
type Saying = Said | ((command: readonly string[], socket: Socket) => Said)
/** By the name of a script or command, or by its first two words. */
export type Says = Record<string, Saying>

export const DONE = [1, 100, 101, 102, 103].map(int)
/** Commands of a greeting. */
const GREETS = new Set(['ping', 'client', 'info server', 'role'])

/** A Redis that knows the store's scripts by name, and says what the test wants. It is a master, and by itself a whole cluster. */
export async function scripted(t: Test, more: Says = {}) {
  const says: Says = {
    ping: '+PONG\r\n',
    role: master(),
    info: bulk('run_id:abc\r\nrole:master\r\n'),
    time: words('1', '0'),
    zrangebyscore: '*0\r\n',
    wait: int(1),
    'cluster slots': () => slots([0, LAST_SLOT, server.port]),
    ssubscribe: ([kind = '', channel = '']) => array(bulk(kind), bulk(channel), int(1)),
    sunsubscribe: ([kind = '', channel = '']) => array(bulk(kind), bulk(channel), int(0)),
    get: [int(1), NULL],
    put: DONE,
    swap: DONE,
    'put though full': DONE,
    'swap though full': DONE,
    admit: ([, , count]) => Array.from({ length: 2 * Number(count) }, (_, n) => int(n % 2 ? 9 : 0)),
    ...more,
  }
  /** Names of scripts and commands, without those of greetings. */
  const asked: string[] = []
  const commands: string[][] = []
  const server = await fake(t, (command, socket) => {
    const [word = '', second = ''] = command
    const sha = word === 'eval' ? createHash('sha1').update(second).digest('hex') : second
    const own = word.startsWith('eval') ? SCRIPTS.get(sha) : undefined
    const name = own ?? word
    const both = `${word} ${second}`
    const said = both in says ? says[both] : name in says ? says[name] : OK
    if (!GREETS.has(name) && !GREETS.has(both)) {
      asked.push(word === 'eval' ? `${name} in full` : name)
      commands.push([name, ...command.slice(own === undefined ? 1 : 2)])
    }
    const reply = typeof said === 'function' ? said(command, socket) : (said ?? null)
    return typeof reply === 'string' || reply === null ? reply : array(...reply, int(Number(command.at(-1))))
  })
  return {
    ...server,
    says,
    asked,
    commands,
    name: `127.0.0.1:${server.port}`,
    cluster: `redis+cluster://127.0.0.1:${server.port}`,
    /** Ends all its connections. */
    hangUp() {
      for (const socket of server.sockets) socket.destroy()
    },
    /** As if it were a reply, on the connection that was opened last. */
    write: (bytes: string) => void server.sockets.at(-1)?.write(bytes),
  }
}

export type Scripted = Awaited<ReturnType<typeof scripted>>

export const isLeft = ({ sockets }: { readonly sockets: readonly Socket[] }): boolean =>
  sockets.every(({ readableEnded, destroyed }) => readableEnded || destroyed)
