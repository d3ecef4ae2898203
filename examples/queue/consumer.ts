/**
 * Works on messages through the proxy, under their ids: the service does the work of each at most once, however often it is sent, delivered
 * or interrupted. A message is acknowledged when the proxy has answered. See README.md.
 */
import { setTimeout as sleep } from 'node:timers/promises'
import type { Broker, Delivery } from './broker.ts'
import { openBroker } from './open.ts'

const URL = process.env.PROXY_URL ?? 'http://127.0.0.1:8080/orders'
/** Answers that leave the outcome open, and deliveries, after which a message counts as poison. */
const MOST_TRIES = Number(process.env.MOST_TRIES ?? 20)
const MOST_DELIVERIES = Number(process.env.MOST_DELIVERIES ?? 5)
const HEARTBEAT = 300
const DEMO = process.env.DEMO ?? ''

type Answer =
  | { readonly kind: 'done' }
  /** Repeating it would change nothing. */
  | { readonly kind: 'refused'; readonly why: string }
  /** `isOutage`: it says nothing about this message. */
  | { readonly kind: 'open'; readonly isOutage: boolean; readonly seconds: number; readonly why: string }

async function post(id: string, body: Buffer<ArrayBuffer>): Promise<Answer> {
  const headers = { 'Idempotency-Key': id, 'Content-Type': 'application/json', 'X-Demo': DEMO }
  try {
    const response = await fetch(URL, { method: 'POST', headers, body, signal: AbortSignal.timeout(60_000) })
    const why = `${response.status} ${await response.text()}`
    if (response.ok) return { kind: 'done' }
    // A stored answer is the same for ever, and so is what the proxy refuses for good.
    const isStored = response.headers.get('idempotent-replayed') === 'true'
    const retry = response.headers.get('idempotency-retry')
    if (isStored || retry === 'no' || retry === 'new-key') return { kind: 'refused', why }
    const isOutage = response.status === 503 || response.status === 429
    return { kind: 'open', isOutage, seconds: Number(response.headers.get('retry-after') ?? 1), why }
  } catch (error) {
    const { cause, message } = error as Error
    const why = `the proxy cannot be reached: ${cause instanceof Error ? cause.message : message}`
    return { kind: 'open', isOutage: true, seconds: 1, why }
  }
}

/** Null: the work is done; else why it never will be. */
async function work({ id, body, deliveries }: Delivery): Promise<string | null> {
  if (id === null) return 'it has no message id'
  if (deliveries > MOST_DELIVERIES) return `it was delivered ${deliveries} times`
  at('received')
  for (let tries = 0; ; ) {
    const answer = await post(id, body)
    if (answer.kind === 'done') return null
    if (answer.kind === 'refused') return answer.why
    say(`${id}: ${answer.why}; again in ${answer.seconds} s`)
    // While nothing works, nothing is poison: the message waits here.
    if (!answer.isOutage && ++tries === MOST_TRIES) return answer.why
    await sleep(answer.seconds * 1000)
  }
}

async function handle(broker: Broker, delivery: Delivery): Promise<void> {
  const heart = setInterval(() => delivery.working(), HEARTBEAT)
  try {
    const why = await work(delivery)
    at('answered')
    if (why !== null) {
      await broker.publish('orders-failed', delivery, why)
      at('failed')
    }
    await delivery.ack()
    at('acked')
  } finally {
    clearInterval(heart)
  }
}

/** `DEMO=SIGKILL consumer answered`: where this process dies. */
function at(point: string): void {
  if (DEMO === `SIGKILL consumer ${point}`) process.kill(process.pid, 'SIGKILL')
}

function say(line: string): void {
  process.stdout.write(`${line}\n`)
}

try {
  const broker = await openBroker(process.env.BROKER_URL ?? 'amqp://127.0.0.1')
  say('ready')
  // Whatever ends it: what is not acknowledged is delivered again, to whoever is started next.
  await broker.consume('orders', (delivery) => handle(broker, delivery))
} catch (error) {
  process.stderr.write(`${(error as Error).message}\n`)
  process.exit(1)
}
