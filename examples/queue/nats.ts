import { AckPolicy, jetstream, jetstreamManager, RetentionPolicy } from '@nats-io/jetstream'
import { connect, headers, nanos } from '@nats-io/transport-node'
import { type Broker, QUEUES } from './broker.ts'

/** Milliseconds after which a silent consumer's message goes to another. */
const ACK_WAIT = Number(process.env.ACK_WAIT ?? 30_000)
const WORKER = 'worker'

export async function openNats(url: string): Promise<Broker> {
  const connection = await connect({ servers: url, reconnect: false })
  const lost = connection.closed().then((error): never => {
    throw new Error(`NATS is gone: ${error instanceof Error ? error.message : 'closed'}`)
  })
  // Whoever waits for it is told.
  lost.catch(() => {})
  const manager = await jetstreamManager(connection)
  for (const queue of QUEUES) {
    await manager.streams.add({ name: queue, subjects: [queue], retention: RetentionPolicy.Workqueue })
    await manager.consumers.add(queue, {
      durable_name: WORKER,
      ack_policy: AckPolicy.Explicit,
      ack_wait: nanos(ACK_WAIT),
    })
  }
  const stream = jetstream(connection)
  return {
    async publish(queue, { id, body }, reason = '') {
      const lines = headers()
      if (id !== null) lines.set('Message-Id', id)
      lines.set('Reason', reason.replaceAll(/\s+/g, ' '))
      await stream.publish(queue, body, { headers: lines })
    },
    async consume(queue, handle) {
      const consumer = await stream.consumers.get(queue, WORKER)
      for (;;) {
        const message = await Promise.race([consumer.next({ expires: 5000 }), lost])
        if (message === null) continue
        await handle({
          id: message.headers?.get('Message-Id') || null,
          body: Buffer.from(message.data),
          deliveries: message.info.deliveryCount,
          reason: message.headers?.get('Reason') ?? '',
          // Resolves when the broker has it.
          ack: async () => void (await message.ackAck()),
          working: () => message.working(),
        })
      }
    },
    async left(queue) {
      const { num_pending, num_ack_pending } = await manager.consumers.info(queue, WORKER)
      return { messages: num_pending + num_ack_pending, consumers: 0 }
    },
    [Symbol.asyncDispose]: () => connection.close(),
  }
}
