import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { type AddressInfo, connect, Server } from 'node:net'
import t from 'tap'
import { closeListener } from '../../src/http/close-listener.ts'

async function listening(host: string): Promise<Server> {
  const server = new Server((connection) => connection.on('error', () => {}).end('served'))
  server.listen(0, host)
  await once(server, 'listening')
  return server
}

/** What a client gets before its connection ends. */
async function servedTo(client: ReturnType<typeof connect>): Promise<string> {
  let got = ''
  client.on('data', (chunk: Buffer) => {
    got += chunk.toString()
  })
  await once(client, 'close')
  return got
}

for (const host of ['127.0.0.1', '0.0.0.0', '::', '::1'])
  t.test(`a connection that ${host} has completed is served, though the listener closes`, async (t) => {
    const server = await listening(host)
    const { port } = server.address() as AddressInfo
    // It connects in this tick, and so waits in the kernel when the listener would close.
    const served = servedTo(connect(port, host.includes(':') ? '::1' : '127.0.0.1'))
    await closeListener(server, () => server.close())
    t.equal(await served, 'served')
    t.equal(server.listening, false)
    await t.rejects(once(connect(port, '127.0.0.1'), 'connect'), { code: 'ECONNREFUSED' })
  })

t.test('a listener on a path closes', async (t) => {
  const server = new Server().listen(`${t.testdir()}/socket`)
  await once(server, 'listening')
  await closeListener(server, () => server.close())
  t.equal(server.listening, false)
})

t.test('no connection of a busy client is reset', async (t) => {
  const server = await listening('127.0.0.1')
  const { port } = server.address() as AddressInfo
  const client = spawn(process.execPath, ['-e', BUSY_CLIENT, String(port)], {
    stdio: ['ignore', 'pipe', 'inherit'],
  })
  let said = ''
  client.stdout.on('data', (chunk: Buffer) => {
    said += chunk.toString()
  })
  for (let served = 0; served < 100; served++) await once(server, 'connection')
  await closeListener(server, () => server.close())
  await once(client, 'close')
  t.equal(said, 'ECONNREFUSED')
})

/** Connects again and again, eight at a time; says how the first connection failed that was not served. */
const BUSY_CLIENT = `
  const { connect } = require('node:net')
  const next = () => {
    let got = ''
    connect(Number(process.argv[1]), '127.0.0.1')
      .on('data', (chunk) => (got += chunk))
      .on('error', ({ code }) => process.stdout.write(code, () => process.exit()))
      .on('close', () => got === 'served' ? next() : process.stdout.write('not served', () => process.exit()))
  }
  for (let n = 0; n < 8; n++) next()
`
