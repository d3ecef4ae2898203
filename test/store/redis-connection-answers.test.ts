import { createHash } from 'node:crypto'
import { once } from 'node:events'
import { readFileSync } from 'node:fs'
import { type AddressInfo, createServer } from 'node:net'
import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import {
  admittingScript,
  askAll,
  type ConnectionEvents,
  exactly,
  RedisConnection,
  type RedisTarget,
  runIdOf,
  script,
  Unanswered,
} from '../../src/store/redis-connection.ts'
import type { RedisAddress } from '../../src/store/redis-link.ts'
import type { RespReply } from '../../src/store/resp.ts'
import { fake } from '../support/fake-redis.ts'
import { until } from './fixtures.ts'

/* What a server may answer to a greeting, from one that says what the test wants. Real ones: redis-connection.test.ts. */

const PATIENT: Millis = 10_000
const NOT_APPLIED = { name: 'StoreUnavailable', maybeApplied: false }
const same = (reply: RespReply) => reply
const bulk = (text: string) => `$${text.length}\r\n${text}\r\n`
const ask = (connection: RedisConnection, name = 'get') => connection.ask<RespReply>(name, ['a'], same)

type Says = Record<string, string | null>

/** A master that accepts everything, unless told otherwise; null: no answer. */
async function master(t: Test, more: Says = {}) {
  const says: Says = {
    ping: '+PONG\r\n',
    role: `*3\r\n${bulk('master')}:0\r\n*0\r\n`,
    info: bulk('# Server\r\nrun_id:0a1b\r\n'),
    ...more,
  }
  const asked: string[] = []
  const server = await fake(t, (command, socket) => {
    const name = command[0] as string
    asked.push(command.join(' '))
    if (says[name] !== 'hang up') return says[name] === undefined ? '+OK\r\n' : says[name]
    socket.destroy()
    return null
  })
  const address: RedisAddress = { host: '127.0.0.1', port: server.port, username: '', password: '', db: 0 }
  return { says, asked, address, name: `127.0.0.1:${server.port}`, ...server }
}

function connectionTo(
  t: Test,
  target: RedisTarget | RedisAddress,
  { timeoutMs = PATIENT, ...more }: Partial<ConnectionEvents> & { timeoutMs?: Millis } = {},
) {
  const events: string[] = []
  const counts = { ready: 0, lost: 0 }
  const connection = new RedisConnection('find' in target ? target : { find: () => target }, timeoutMs, {
    onEvent: (kind, detail) => void events.push(`${kind}: ${detail}`),
    onReady: () => void counts.ready++,
    onLost: () => void counts.lost++,
    ...more,
  })
  t.teardown(() => connection.close())
  return { connection, events, counts }
}

void t.test('a greeting asks for what the address and the caller need', async (t) => {
  const last = ['ping', 'client setname idempotency-proxy']
  const cases: [Partial<RedisAddress>, { isMaster?: boolean; grace?: Millis }, string[]][] = [
    [{}, {}, last],
    [{}, { isMaster: false, grace: 0 }, last],
    [{ password: 'secret' }, {}, ['auth secret', ...last]],
    [{ username: 'app', password: 'secret' }, {}, ['auth app secret', ...last]],
    [{ username: 'app' }, {}, ['auth app ', ...last]],
    [{ db: 1 }, {}, ['select 1', ...last]],
    [{}, { isMaster: true }, ['role', ...last]],
    [{}, { grace: 5000 }, ['ping', 'info server', 'client setname idempotency-proxy']],
  ]
  for (const [over, { isMaster, grace }, commands] of cases) {
    const { address, asked, name } = await master(t)
    const target = { find: () => ({ ...address, ...over }), ...(isMaster === undefined ? {} : { isMaster }) }
    const { connection, events } = connectionTo(t, target, grace === undefined ? {} : { grace })
    await connection.open()
    t.strictSame(events, [`connected: ${name}`])
    t.strictSame(asked, commands)
    t.equal(connection.isReady, true)
    t.equal(connection.leadsTo, name)
  }
})

void t.test('a server that may be used is told from one that may not', async (t) => {
  const needed = { username: '', password: 'secret', db: 1 }
  const cases: [says: Says, why: string | null][] = [
    [{ auth: '-ERR Client sent AUTH, but no password is set\r\n' }, null],
    [
      {
        auth: '-ERR AUTH <password> called without any password configured for the default user. Are you sure?\r\n',
      },
      null,
    ],
    [{ ping: '-NOPERM ping\r\n' }, null],
    [{ info: '-NOPERM info\r\n' }, null],
    [{ client: '-NOPERM client\r\n' }, null],
    [{ client: '-ERR no\r\n' }, null],
    [{ auth: '-WRONGPASS no\r\n' }, 'Redis refuses: WRONGPASS no'],
    [{ auth: '-NOPERM auth\r\n' }, 'Redis refuses: NOPERM auth'],
    [{ select: '-ERR DB index is out of range\r\n' }, 'Redis refuses: ERR DB index is out of range'],
    [{ role: '-NOPERM role\r\n' }, 'Redis refuses: NOPERM role'],
    [{ ping: '-LOADING\r\n' }, 'Redis refuses: LOADING'],
    [{ info: '-ERR no\r\n' }, 'Redis refuses: ERR no'],
    [{ role: `*1\r\n${bulk('slave')}` }, '{name} is a replica, not a master (its ROLE is slave)'],
    [{ role: '+OK\r\n' }, '{name} is a replica, not a master (its ROLE is undefined)'],
    ...['auth', 'select', 'ping', 'info'].map((one): [Says, string] => [
      { [one]: '+QUEUED\r\n' },
      'replies do not match their commands',
    ]),
  ]
  for (const [says, why] of cases) {
    const { address, name } = await master(t, says)
    const target = { find: () => ({ ...address, ...needed }), isMaster: true }
    const { connection, events, counts } = connectionTo(t, target, { grace: 5000 })
    await connection.open()
    const reason = why?.replace('{name}', name)
    t.strictSame(
      events,
      [reason === undefined ? `connected: ${name}` : `error: ${reason}`],
      JSON.stringify(says),
    )
    t.equal(counts.ready, reason === undefined ? 1 : 0)
    if (reason !== undefined)
      await t.rejects(ask(connection), { ...NOT_APPLIED, message: `Redis is not connected: ${reason}` })
    await connection.close()
  }
})

void t.test('a reply that is none to the name of the client ends the connection', async (t) => {
  const { address } = await master(t, { client: '+QUEUED\r\n' })
  const { connection, events } = connectionTo(t, address)
  await connection.open()
  await until(() => events.includes('error: replies do not match their commands'))
})

void t.test('with a grace, scripts that admit are sent the identity of the process', async (t) => {
  const { address, asked, says } = await master(t, { evalsha: '*1\r\n:1\r\n' })
  const put = admittingScript('put')
  const sent = async (grace: Millis) => {
    const { connection } = connectionTo(t, address, { grace })
    await connection.open()
    await connection.run(put, [1, 'a'], same)
    return asked.at(-1)
  }
  const sha = createHash('sha1').update(put.source).digest('hex')
  t.equal(await sent(5000), `evalsha ${sha} 1 a 0a1b 1`)
  t.equal(await sent(0), `evalsha ${sha} 1 a  1`)
  says['info'] = bulk('# Server\r\nredis_version:7.4.0\r\n')
  t.equal(await sent(5000), `evalsha ${sha} 1 a  1`)
})

void t.test('a script is its file, after the check of the epoch where it admits', async (t) => {
  const textOf = (name: string) =>
    readFileSync(new URL(`../../src/store/lua/${name}.lua`, import.meta.url), 'utf8')
  const get = script('get')
  t.match(get, { source: textOf('get'), admits: false })
  t.equal(get.source.length, textOf('get').length)
  t.equal(script('get', '-- x\n').source, `-- x\n${textOf('get')}`)
  t.equal(admittingScript('put').source, textOf('epoch') + textOf('put'))
  t.equal(admittingScript('put').admits, true)
  t.equal(admittingScript('put', '-- x\n').source, `-- x\n${textOf('epoch')}${textOf('put')}`)
})

void t.test('it tells whether it is trying, ready or lost', async (t) => {
  const { address, name, sockets } = await master(t)
  const seen: boolean[] = []
  const { connection, events, counts } = connectionTo(t, address, {
    onLost: () => {
      counts.lost++
      seen.push(connection.isTrying, connection.isReady)
    },
  })
  connection.reconnect()
  t.strictSame([connection.isTrying, connection.isReady, connection.leadsTo], [false, false, ''])
  const opened = connection.open()
  t.strictSame([connection.isTrying, connection.isReady], [true, false])
  await t.rejects(ask(connection), { ...NOT_APPLIED, message: 'Redis is not connected: connecting' })
  await t.rejects(connection.run(script('get'), [], same), NOT_APPLIED)
  await opened
  t.strictSame([connection.isTrying, connection.isReady, connection.leadsTo], [false, true, name])
  t.strictSame([counts, seen], [{ ready: 1, lost: 0 }, []])
  sockets[0]?.destroy()
  await until(() => counts.ready === 2)
  t.strictSame([counts.lost, seen], [1, [false, false]])
  t.equal(connection.isTrying, false)
  connection.reconnect()
  await t.rejects(ask(connection), NOT_APPLIED, 'it takes nothing more')
  await until(() => counts.ready === 3)
  t.equal(await ask(connection), 'OK')
  t.strictSame(events, [
    `connected: ${name}`,
    `disconnected: ${name}`,
    `connected: ${name}`,
    `disconnected: ${name}`,
    `connected: ${name}`,
  ])
})

void t.test('why it is lost is told once, whatever happens to the next attempts', async (t) => {
  const { address, name, says, sockets } = await master(t, { get: '+a\r\n+more\r\n' })
  const { connection, events, counts } = connectionTo(t, address)
  await connection.open()
  const told = async (expected: string[], attempts: number) => {
    const lost = counts.lost + attempts
    await until(() => counts.lost >= lost)
    t.strictSame(events.splice(0), expected)
  }
  says['ping'] = 'hang up'
  const nonsense = told([`connected: ${name}`, 'error: an unexpected reply'], 2)
  t.equal(await ask(connection), 'a')
  await nonsense
  says['ping'] = '-LOADING\r\n'
  await told(['error: Redis refuses: LOADING'], 2)
  says['ping'] = '-BUSY\r\n'
  await told(['error: Redis refuses: BUSY'], 1)
  says['ping'] = '+PONG\r\n'
  await until(() => connection.isReady)
  says['ping'] = 'hang up'
  const closed = 'error: no answer from Redis: Connection is closed.'
  const silent = told([`connected: ${name}`, `disconnected: ${name}`, closed], 3)
  sockets.at(-1)?.destroy()
  await silent
})

void t.test('a server that says too much while it greets is never ready', async (t) => {
  const { address } = await master(t, { ping: null, client: '+PONG\r\n+OK\r\n+more\r\n' })
  const { connection, events, counts } = connectionTo(t, address)
  await connection.open()
  await until(() => counts.lost === 2)
  t.strictSame(events, ['error: an unexpected reply'])
  t.equal(counts.ready, 0)
})

void t.test('a target that is not found is looked for again', async (t) => {
  const { address, name } = await master(t)
  let failures = 0
  const find = async (): Promise<RedisAddress> => {
    if (failures++ < 3) throw new Error('no master')
    return address
  }
  const { connection, events, counts } = connectionTo(t, { find })
  await connection.open()
  t.strictSame([events, counts], [['error: no master'], { ready: 0, lost: 1 }])
  t.strictSame([connection.isTrying, connection.leadsTo], [false, ''])
  await t.rejects(ask(connection), { ...NOT_APPLIED, message: 'Redis is not connected: no master' })
  await until(() => connection.isReady)
  t.strictSame([events, counts], [['error: no master', `connected: ${name}`], { ready: 1, lost: 3 }])
})

void t.test('a target that is found after close is not connected to', async (t) => {
  const { address, sockets } = await master(t)
  const { promise, resolve } = Promise.withResolvers<RedisAddress>()
  const { connection, events, counts } = connectionTo(t, { find: () => promise })
  const opened = connection.open()
  await connection.close()
  resolve(address)
  await opened
  t.strictSame([sockets.length, events, counts], [0, [], { ready: 0, lost: 0 }])
  await t.rejects(ask(connection), { ...NOT_APPLIED, message: 'Redis is not connected: closed' })
})

void t.test('after close nothing is looked for again', async (t) => {
  const { address, sockets } = await master(t)
  let found = 0
  const away = connectionTo(t, {
    find: () => {
      found++
      throw new Error('no master')
    },
  })
  const there = connectionTo(t, {
    find: () => {
      found++
      return address
    },
  })
  await Promise.all([away.connection.open(), there.connection.open()])
  await Promise.all([away.connection.close(), there.connection.close()])
  t.equal(found, 2)
  // Longer than until the first attempt to reconnect.
  await new Promise((later) => setTimeout(later, 150))
  t.strictSame([found, sockets.length], [2, 1])
})

void t.test('close resolves when the connection has ended', async (t) => {
  const { address, says } = await master(t)
  const { connection } = connectionTo(t, address)
  await connection.open()
  says['get'] = null
  let isSettled = false
  void ask(connection).catch(() => {
    isSettled = true
  })
  await connection.close()
  t.ok(isSettled)
})

void t.test('the first attempt to reconnect is soon, those after failures are ever later', async (t) => {
  const { address, says, sockets } = await master(t)
  const attempts: Millis[] = []
  let soon: 'unknown' | boolean = 'unknown'
  let isLate = false
  const find = () => {
    attempts.push(performance.now())
    if (soon === 'unknown') soon = !isLate
    return address
  }
  const { connection, counts } = connectionTo(
    t,
    { find },
    {
      onLost: () => {
        counts.lost++
        // Due between the first delay and the second, whatever the machine is busy with.
        setTimeout(() => {
          isLate = true
        }, 75)
      },
    },
  )
  await connection.open()
  const isSoon = async () => {
    soon = 'unknown'
    isLate = false
    sockets.at(-1)?.destroy()
    await until(() => soon !== 'unknown')
    return soon
  }
  t.equal(await isSoon(), true)
  await until(() => connection.isReady)
  says['ping'] = '-LOADING\r\n'
  attempts.length = 0
  sockets.at(-1)?.destroy()
  await until(() => attempts.length === 4)
  t.ok((attempts[3] as Millis) - (attempts[0] as Millis) >= 690, `after ${attempts.join()}`)
  says['ping'] = '+PONG\r\n'
  await until(() => connection.isReady)
  // Timers of the attempts before.
  await until(() => isLate)
  t.equal(await isSoon(), true, 'and soon again after a success')
})

void t.test('with a grace, an attempt to connect ends before more than half of it is over', async (t) => {
  // TCP is accepted, and the TLS handshake never answered.
  const server = createServer(() => {}).listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => server.close())
  const { port } = server.address() as AddressInfo
  const order: string[] = []
  const { connection } = connectionTo(
    t,
    { host: '127.0.0.1', port, username: '', password: '', db: 0, tls: {} },
    { grace: 600, onEvent: (_, detail) => void order.push(detail) },
  )
  await Promise.all([
    connection.open(),
    new Promise<void>((resolve) =>
      setTimeout(() => {
        order.push('450 ms')
        resolve()
      }, 450),
    ),
  ])
  t.strictSame(order.slice(0, 2), ['connect ETIMEDOUT', '450 ms'])
})

void t.test('several servers are asked at once, and answer within the time of others', async (t) => {
  const [a, b, silent] = [await master(t), await master(t, { get: null }), await master(t, { ping: null })]
  const down: RedisAddress = { ...a.address, port: 1 }
  const asked: RedisAddress[] = []
  const read = (server: RedisConnection, address: RedisAddress) => {
    asked.push(address)
    return ask(server)
  }
  const addresses = [down, a.address, silent.address, b.address]
  const others = askAll(addresses, PATIENT, PATIENT, read)
  await until(() => b.asked.includes('get a'))
  b.sockets[0]?.write('+late\r\n')
  silent.sockets[0]?.destroy()
  t.strictSame(await others, ['OK', 'late'])
  t.strictSame(new Set(asked), new Set(addresses))
  t.strictSame(await askAll(addresses, PATIENT, 0, read), ['OK'], 'the first ends it')
  const ended = ({ readableEnded, destroyed }: { readableEnded: boolean; destroyed: boolean }) =>
    readableEnded || destroyed
  for (const { sockets } of [a, b, silent]) await until(() => sockets.length === 2 && sockets.every(ended))
  t.pass('connections are closed')
})

void t.test('if no server answers, their errors are told with their names', async (t) => {
  const [a, b] = [await master(t, { get: '-ERR a\r\n' }), await master(t, { get: '-ERR b\r\n' })]
  const error = await askAll([a.address, b.address], PATIENT, PATIENT, (server) => ask(server)).catch(
    (error: unknown) => error,
  )
  t.ok(error instanceof Unanswered)
  t.equal((error as Unanswered).message, `${a.name}: Redis refuses: ERR a; ${b.name}: Redis refuses: ERR b`)
  t.strictSame(
    (error as Unanswered).errors.map(({ message }) => message),
    ['Redis refuses: ERR a', 'Redis refuses: ERR b'],
  )
})

void t.test('replies are read as what they must be', async (t) => {
  t.equal(exactly('OK')('OK'), undefined)
  for (const reply of ['ok', 1, null, Buffer.from('OK')] as RespReply[])
    t.throws(() => exactly('OK')(reply), { message: 'replies do not match their commands' })
  t.equal(runIdOf(Buffer.from('# Server\r\nrun_id:0a1b\r\ntcp_port:1\r\n')), '0a1b')
  t.equal(runIdOf(Buffer.from('run_id:ff')), 'ff')
  for (const text of ['', 'old_run_id:0a\r\n', 'run_id:\r\n', 'run_id:0a x\r\n'])
    t.equal(runIdOf(Buffer.from(text)), '', text)
  t.throws(() => runIdOf('OK'), { message: 'replies do not match their commands' })
})
