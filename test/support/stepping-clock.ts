import { createHash } from 'node:crypto'
import { once } from 'node:events'
import { readdirSync, readFileSync } from 'node:fs'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'

/** A relay to a real Redis whose clock then runs `skew` milliseconds ahead for every client of the relay. */
export interface SteppingClock extends AsyncDisposable {
  readonly port: number
  skew: number
}

const LUA = new URL('../../src/store/lua/', import.meta.url)
const SHIFTED_TIME = "local t = redis.call('TIME') return {tostring(t[1] + math.floor(ARGV[1] / 1000)), t[2]}"

/** The argument of each script that takes the skew added to the server's time, as in the scripts' headers. */
const SKEW_ARG = new Map<string, number>()
/** Not a script by itself: it is put before those that grant executions. */
const EPOCH = 'epoch.lua'
const sourceOf = (name: string): string => readFileSync(new URL(name, LUA), 'utf8')
for (const name of readdirSync(LUA).filter((name) => name !== EPOCH)) {
  const source = sourceOf(name)
  const at = Number(/(\d+) skew/.exec(source)?.[1])
  if (!(at > 0)) throw new Error(`${name} does not say which argument is the skew`)
  for (const whole of [source, sourceOf(EPOCH) + source])
    for (const text of [whole, `#!lua flags=allow-oom\n${whole}`]) {
      SKEW_ARG.set(text, at)
      SKEW_ARG.set(createHash('sha1').update(text).digest('hex'), at)
    }
}

export async function steppingClock(redisPort: number): Promise<SteppingClock> {
  const sockets = new Set<Socket>()
  const self = { port: 0, skew: 0 }
  const listener = createServer((client) => {
    const server = connect(redisPort, '127.0.0.1')
    let rest: Buffer = Buffer.alloc(0)
    client.on('data', (bytes: Buffer) => {
      const { commands, left } = parsed(Buffer.concat([rest, bytes]))
      rest = left
      for (const command of commands) server.write(encoded(shifted(command, self.skew)))
    })
    server.pipe(client)
    for (const socket of [client, server]) {
      sockets.add(socket)
      socket
        .on('error', () => {})
        .on('close', () => {
          client.destroy()
          server.destroy()
        })
    }
  }).listen(0, '127.0.0.1')
  await once(listener, 'listening')
  return Object.assign(self, {
    port: (listener.address() as AddressInfo).port,
    async [Symbol.asyncDispose]() {
      for (const socket of sockets) socket.destroy()
      await new Promise((closed) => listener.close(closed))
    },
  })
}

function shifted(command: readonly Buffer[], skew: number): readonly Buffer[] {
  const [name, script, keys] = command.map(String)
  if (name?.toLowerCase() === 'time')
    return ['EVAL', SHIFTED_TIME, '0', `${skew}`].map((part) => Buffer.from(part))
  const at = SKEW_ARG.get(script ?? '')
  if (at === undefined || !/^eval(sha)?$/i.test(name ?? '')) return command
  return command.with(2 + Number(keys) + at, Buffer.from(`${skew}`))
}

/** Whole commands (arrays of bulk strings) and the unfinished rest. */
function parsed(bytes: Buffer): { commands: Buffer[][]; left: Buffer } {
  const commands: Buffer[][] = []
  let at = 0
  const line = (): string | null => {
    const end = bytes.indexOf('\r\n', at)
    if (end < 0) return null
    const text = bytes.toString('latin1', at, end)
    at = end + 2
    return text
  }
  for (;;) {
    const begin = at
    const count = Number(line()?.slice(1) ?? Number.NaN)
    const parts: Buffer[] = []
    while (parts.length < count) {
      const length = Number(line()?.slice(1) ?? Number.NaN)
      if (!(at + length + 2 <= bytes.length)) break
      parts.push(bytes.subarray(at, at + length))
      at += length + 2
    }
    if (parts.length !== count) return { commands, left: bytes.subarray(begin) }
    commands.push(parts)
  }
}

function encoded(parts: readonly Buffer[]): Buffer {
  const head = Buffer.from(`*${parts.length}\r\n`)
  const bulks = parts.flatMap((part) => [Buffer.from(`$${part.length}\r\n`), part, Buffer.from('\r\n')])
  return Buffer.concat([head, ...bulks])
}
