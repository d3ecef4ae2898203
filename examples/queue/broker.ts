/** What the example needs of a broker. */

/** Messages to work on, and those that nobody can work on. */
export const QUEUES = ['orders', 'orders-failed'] as const
export type Queue = (typeof QUEUES)[number]

export interface Message {
  /** The same however often it is sent; null: the sender gave it none. */
  readonly id: string | null
  readonly body: Buffer<ArrayBuffer>
}

export interface Delivery extends Message {
  /** How often the broker has delivered it, this time included. */
  readonly deliveries: number
  /** Why it is in `orders-failed`. */
  readonly reason: string
  /** It is not delivered again. */
  ack(): Promise<void>
  /** Called while it is worked on, or another consumer gets it. */
  working(): void
}

export interface Broker extends AsyncDisposable {
  /** Resolves when the broker has stored it. */
  publish(queue: Queue, message: Message, reason?: string): Promise<void>
  /** Delivers one message after another. Rejects if `handle` does, or the connection ends. */
  consume(queue: Queue, handle: (delivery: Delivery) => Promise<void>): Promise<never>
  /** RabbitMQ counts no messages that its `consumers` have. */
  left(queue: Queue): Promise<{ readonly messages: number; readonly consumers: number }>
}
