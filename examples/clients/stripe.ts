import { Stripe } from 'stripe'

/** Stripe's own client before the proxy: host, port and protocol are all that changes. */
export function stripeThrough(proxy: string): Stripe {
  const { hostname, port, protocol } = new URL(proxy)
  return new Stripe('sk_test_example', {
    host: hostname,
    port,
    protocol: protocol === 'https:' ? 'https' : 'http',
    maxNetworkRetries: 3,
  })
}

/** One charge for one key, however often it takes. Keep the key with the order, not in this function. */
export async function createCharge(stripe: Stripe, key: string, amount: number) {
  for (let calls = 1; ; calls++) {
    try {
      const charge = await stripe.charges.create(
        { amount, currency: 'eur', source: 'tok_visa' },
        { idempotencyKey: key },
      )
      // stripe-node takes any JSON without a member `error` for what it asked for, whatever its status.
      if (charge.object !== 'charge') throw new Error(`not charged: ${JSON.stringify(charge)}`)
      return charge
    } catch (error) {
      // An answer that breaks off in its body is the one fault that stripe-node does not retry by itself.
      if (!(error instanceof Stripe.errors.StripeConnectionError) || calls === 3) throw error
    }
  }
}
