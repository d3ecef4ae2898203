import type { Broker } from './broker.ts'
import { openNats } from './nats.ts'
import { openRabbitMq } from './rabbitmq.ts'

/**
 * RabbitMQ or NATS JetStream, by the URL.
 *
 * @throws in one sentence if the broker refuses.
 */
export async function openBroker(url: string): Promise<Broker> {
  try {
    return await (url.startsWith('nats:') ? openNats(url) : openRabbitMq(url))
  } catch (error) {
    // Without the password in the URL.
    throw new Error(`the broker at ${new URL(url).host} refuses: ${(error as Error).message}`, {
      cause: error,
    })
  }
}
