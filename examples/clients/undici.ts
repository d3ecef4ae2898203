import { Agent, RetryAgent, request } from 'undici'

/** By default it retries no POST at all, and no 409. With a key both are safe. */
const retrying = new RetryAgent(new Agent(), {
  methods: ['POST'],
  statusCodes: [409, 429, 500, 502, 503, 504],
  maxRetries: 3,
  // Returns the last response, which has the proxy's advice, instead of an error without it.
  throwOnError: false,
})

/** One charge for one key, however many tries it takes. Keep the key with the order, not in this function. */
export async function createCharge(proxy: string, key: string, amount: number) {
  for (let calls = 1; ; calls++) {
    try {
      const { statusCode, headers, body } = await request(`${proxy}/v1/charges`, {
        dispatcher: retrying,
        method: 'POST',
        headers: {
          authorization: 'Bearer sk_test_example',
          'content-type': 'application/x-www-form-urlencoded',
          'idempotency-key': key,
        },
        body: `amount=${amount}&currency=eur&source=tok_visa`,
      })
      return { status: statusCode, headers, body: await body.json() }
    } catch (error) {
      // A response that breaks off in its body cannot be resumed: the agent would request the rest with a
      // `Range`. Send the whole request again, under the same key.
      if (calls === 3) throw error
    }
  }
}
