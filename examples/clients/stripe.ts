import { Stripe } from 'stripe'

/** Stripe's own client, through the proxy: only host, port and protocol change. */
export function stripeThrough(proxy: string): Stripe {
  const { hostname, port, protocol } = new URL(proxy)
  return new Stripe('sk_test_example', {
    host: hostname,
    port,
    protocol: protocol === 'https:' ? 'https' : 'http',
    maxNetworkRetries: 3,
  })
}

/** One charge for one key, however many tries it takes. Keep the key with the order, not in this function. */
export async function createCharge(stripe: Stripe, key: string, amount: number) {
  for (let calls = 1; ; calls++) {
    try {
      const charge = await stripe.charges.create(
        { amount, currency: 'eur', source: 'tok_visa' },
        { idempotencyKey: key },
      )
      // Whatever the status, stripe-node takes any JSON without a member `error` for the requested object.
      if (charge.object !== 'charge') throw new Error(`not charged: ${JSON.stringify(charge)}`)
      return charge
    } catch (error) {
      // A response that breaks off in its body is the one fault that stripe-node does not retry on its own.
      if (!(error instanceof Stripe.errors.StripeConnectionError) || calls === 3) throw error
    }
  }
}
