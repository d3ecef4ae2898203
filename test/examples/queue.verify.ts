import { randomUUID } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { createServer } from 'node:net'
import t, { type Test } from 'tap'
import { freePort, Part, until } from '../../examples/parts.ts'
import type { Broker, Delivery } from '../../examples/queue/broker.ts'
import { type Killed, killEverywhere, POINTS, table, verdict } from '../../examples/queue/kill.ts'
import { BROKERS, type BrokerKind, bodyOf, lack, World } from '../../examples/queue/world.ts'

t.setTimeout(1_500_000)

const killed: Killed[] = []

for (const broker of BROKERS) {
  const skip = lack(broker)
  void t.test(`${broker}: killed anywhere, each message is worked on once`, { skip }, async (t) => {
    const ends = await killEverywhere(broker)
    t.equal(ends.length, POINTS.length)
    for (const { who, where, ended } of ends) t.equal(ended, 'once', `${who}: ${where}`)
    killed.push(...ends)
  })

  void t.test(`${broker}: poison ends in orders-failed, with its reason`, { skip }, (t) => poison(t, broker))

  void t.test(`${broker}: while the proxy is down messages wait, and none is poison`, { skip }, async (t) => {
    await using world = await World.start(broker)
    await world.part('proxy').kill()
    const id = await world.order()
    const consumer = world.part('consumer')
    const other = world.part('other consumer')
    await until(() => [consumer, other].some((one) => one.says(`${id}: the proxy cannot be reached`)))
    t.same(await world.work(), [])
    await world.part('proxy').start()
    await until(async () => (await world.work()).length === 1)
    await using connection = await world.broker()
    t.match(await connection.left('orders-failed'), { messages: 0 })
  })
}

void t.test(
  'the guide shows what came of it',
  { skip: BROKERS.some((one) => lack(one) !== false) },
  async (t) => t.ok(readFileSync('docs/guides/queues.md', 'utf8').includes(table(killed)), table(killed)),
)

void t.test(
  'the verdict sees a message worked on twice, not at all, or for nothing among the poison',
  async (t) => {
    const sent = { point: POINTS[0], good: ['a'], refused: 'b' }
    const rows = [
      { action: 'orders', about: 'a', status: 201 },
      { action: 'orders', about: 'b', status: 402 },
    ]
    t.equal(verdict(rows, new Set(['b']), sent), 'once')
    t.match(verdict([...rows, ...rows.slice(0, 1)], new Set(['b']), sent), /^2×/)
    t.match(verdict(rows.slice(1), new Set(['b']), sent), /^0×/)
    t.match(verdict(rows, new Set(['a', 'b']), sent), /among the poison/)
    t.match(verdict(rows, new Set(), sent), /lost/)
  },
)

void t.test('a broker that refuses is named in one sentence, without its password', async (t) => {
  const port = await freePort()
  // One that nobody is behind, and one that closes at once.
  const rude = createServer((socket) => socket.destroy()).listen(0, '127.0.0.1')
  t.teardown(() => rude.close())
  await until(() => rude.listening)
  const { port: closing } = rude.address() as { port: number }
  for (const scheme of ['amqp', 'nats'])
    for (const at of [port, closing])
      for (const file of ['consumer', 'outbox']) {
        const part = new Part(file, {
          run: [process.execPath, `examples/queue/${file}.ts`],
          env: { BROKER_URL: `${scheme}://shop:secret@127.0.0.1:${at}` },
        })
        const { message } = (await part.start().catch((error: Error) => error)) as Error
        t.match(message, new RegExp(`^${file} ended \\(1\\): the broker at 127\\.0\\.0\\.1:${at} refuses: .`))
        t.notMatch(message, /secret/)
      }
})

/** What is in `orders-failed`, by id. */
async function failed(broker: Broker, count: number): Promise<Map<string | null, Delivery>> {
  const found = new Map<string | null, Delivery>()
  void broker
    .consume('orders-failed', async (delivery) => {
      found.set(delivery.id, delivery)
      await delivery.ack()
    })
    .catch(() => {})
  await until(() => found.size >= count)
  return found
}

async function poison(t: Test, kind: BrokerKind): Promise<void> {
  await using world = await World.start(kind, { ACK_WAIT: '1000' })
  await using broker = await world.broker()
  const [good, refused, deadly] = [randomUUID(), randomUUID(), randomUUID()]
  const message = (id: string | null, refuse = '') => ({
    id,
    body: Buffer.from(bodyOf(id ?? 'none', refuse)),
  })
  await broker.publish('orders', message(null))
  await broker.publish('orders', message(good))
  await until(async () => (await world.work()).length === 1)
  // Another order under the id of the first; one that is refused; one that is no JSON.
  await broker.publish('orders', message(good, 'orders'))
  await broker.publish('orders', message(refused, 'orders'))
  const found = await failed(broker, 3)
  t.match(found.get(null)?.reason, 'it has no message id')
  t.match(found.get(good)?.reason, /^422 .*idempotency_key_reused/)
  t.match(found.get(refused)?.reason, /^402 /)
  t.same(found.get(refused)?.body.toString(), message(refused, 'orders').body.toString())
  t.same(
    (await world.work()).map(({ status }) => status),
    [201, 402],
  )

  // It kills each consumer that takes it.
  const consumers = [world.part('consumer'), world.part('other consumer')]
  for (const one of consumers) await one.kill()
  await broker.publish('orders', message(deadly))
  await until(async () => {
    for (const one of consumers) if (!one.isRunning) await one.start({ DEMO: 'SIGKILL consumer received' })
    return found.has(deadly)
  })
  t.equal(found.get(deadly)?.reason, 'it was delivered 6 times')
  t.equal((await world.work()).filter(({ about }) => about === deadly).length, 0)
}
