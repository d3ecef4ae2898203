import { type ConsumeMessage, connect } from 'amqplib'
import { type Broker, type Delivery, QUEUES } from './broker.ts'

export async function openRabbitMq(url: string): Promise<Broker> {
  const connection = await connect(url)
  const lost = new Promise<never>((_, reject) => {
    connection.on('error', () => {})
    connection.on('close', (error) => reject(new Error(`RabbitMQ is gone: ${error?.message ?? 'closed'}`)))
  })
  // Whoever waits for it is told.
  lost.catch(() => {})
  // With confirms: a message is sent when the broker says that it has it.
  const channel = await connection.createConfirmChannel()
  channel.on('error', () => {})
  await channel.prefetch(1)
  for (const queue of QUEUES)
    await channel.assertQueue(queue, { durable: true, arguments: { 'x-queue-type': 'quorum' } })

  const delivery = (message: ConsumeMessage): Delivery => {
    const { headers = {}, messageId } = message.properties
    return {
      id: (messageId as string | undefined) ?? null,
      body: Buffer.from(message.content),
      // Quorum queues count; other queues say only that it is not the first time.
      deliveries: Number(headers['x-delivery-count'] ?? 0) + 1,
      reason: String(headers['reason'] ?? ''),
      ack: async () => channel.ack(message),
      // RabbitMQ waits for half an hour.
      working: () => {},
    }
  }
  return {
    publish: (queue, { id, body }, reason = '') => {
      const options = { persistent: true, headers: { reason }, ...(id !== null && { messageId: id }) }
      const confirmed = new Promise<void>((resolve, reject) =>
        channel.sendToQueue(queue, body, options, (error) => (error ? reject(error as Error) : resolve())),
      )
      return Promise.race([confirmed, lost])
    },
    consume: (queue, handle) => {
      const failed = new Promise<never>((_, reject) => {
        const deliver = (message: ConsumeMessage | null): void => {
          if (message === null) reject(new Error(`RabbitMQ has deleted ${queue}`))
          else handle(delivery(message)).catch(reject)
        }
        channel.consume(queue, deliver).catch(reject)
      })
      return Promise.race([failed, lost])
    },
    left: async (queue) => {
      const { messageCount: messages, consumerCount: consumers } = await channel.checkQueue(queue)
      return { messages, consumers }
    },
    [Symbol.asyncDispose]: () => connection.close(),
  }
}
