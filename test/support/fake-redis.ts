import { once } from 'node:events'
import { type AddressInfo, createServer, type Socket } from 'node:net'
import { createServer as createTlsServer } from 'node:tls'
import type { Test } from 'tap'
import { BATCH, BATCH_THOUGH_FULL } from '../../src/store/redis/batch.ts'
import { ADMIT } from '../../src/store/redis/epochs.ts'
import type { Script } from '../../src/store/redis/resp.ts'
import { repliesTo } from './replies.ts'

export type Answer = (command: string[], socket: Socket) => string | Buffer | null

/** A server that answers what the test says, or not at all (null); over TLS if it has a certificate. */
export async function fake(t: Test, answer: Answer, tls?: { readonly cert: Buffer; readonly key: Buffer }) {
  const sockets: Socket[] = []
  const take = (socket: Socket): void => {
    sockets.push(socket.setNoDelay())
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

/** The operations of a batch, by the letter of their head. */
const OPERATIONS: Readonly<Record<string, string>> = {
  p: 'put',
  s: 'swap',
  g: 'get',
  r: 'renew',
  d: 'remove',
  u: 'due',
  t: 'throttle',
  n: 'note',
  h: 'notes',
  i: 'places',
  l: 'places',
}

function isOf(what: Script, word: string, text: string): boolean {
  return word === 'eval' ? text === what.source : word === 'evalsha' && text === what.sha
}

/** The result of an operation in the reply of its batch. */
function resultOf(name: string, said: string | readonly string[]): readonly string[] {
  if (typeof said === 'string') return [int(3), bulk(said.slice(1, -2))]
  const [first = '', ...more] = said
  if (/^(put|swap)/.test(name)) return [first, ...more.slice(1)]
  if (name === 'get') return [int(0), ...more]
  if (name === 'throttle') return [int(6), first]
  if (/^(notes|places)/.test(name)) return [int(7), int(said.length), ...said]
  return [int(first === int(1) ? 4 : 5)]
}

/** The server's clock, in what an operation says. */
function nowIn(name: string, said: string | readonly string[]): string {
  if (typeof said !== 'string' && /^(put|swap)/.test(name)) return said[1] as string
  return typeof said !== 'string' && name === 'get' ? (said[0] as string) : int(1)
}

/** What an operation alone fails with; any other refusal is one of the whole batch. */
const FAILS_ALONE = /^-(ERR|WRONGTYPE|OOM) /

/** Bytes; no answer (null); the reply of `admit` without its number; or that of an operation, with the clock where it tells it. */
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
    places: [],
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
    const isThoughFull = isOf(BATCH_THOUGH_FULL, word, second)
    const isBatch = isThoughFull || isOf(BATCH, word, second)
    const ask = (name: string, both: string, one: string[], identity: readonly string[] = []) => {
      const said = both in says ? says[both] : name in says ? says[name] : OK
      if (!GREETS.has(name) && !GREETS.has(both)) {
        asked.push(word === 'eval' ? `${name} in full` : name)
        commands.push([name, ...one.slice(word.startsWith('eval') ? 2 : 1)])
      }
      return typeof said === 'function' ? said([...one, ...identity], socket) : (said ?? null)
    }
    const number = int(Number(command.at(-1)))
    if (!isBatch) {
      const name = isOf(ADMIT, word, second) ? 'admit' : word
      const reply = ask(name, `${word} ${second}`, command)
      return typeof reply === 'string' || reply === null ? reply : array(...reply, number)
    }
    const count = (command.length - 6 - Number(command[2])) / 2
    const first = 4 + Number(command[2])
    const results = Array.from({ length: count }, (_, n): [string, Said] => {
      const [key = '', head = '', body = ''] = [
        command[3 + n],
        command[first + 2 * n],
        command[first + 2 * n + 1],
      ]
      const name = `${OPERATIONS[head[0] as string]}${isThoughFull ? ' though full' : ''}`
      return [name, ask(name, name, [word, second, '1', key, head, body], command.slice(-2, -1))]
    })
    const whole = results.find(
      ([, said]) => said === null || (typeof said === 'string' && !FAILS_ALONE.test(said)),
    )
    if (whole !== undefined) return whole[1] as string | null
    const told = results as [string, string | readonly string[]][]
    const now = nowIn(...(told[0] as [string, string | readonly string[]]))
    return array(now, ...told.flatMap(([name, said]) => resultOf(name, said)), number)
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
