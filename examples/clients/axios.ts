import axios, { type AxiosError, type AxiosInstance, type AxiosResponse } from 'axios'
import axiosRetry from 'axios-retry'

/** By default it retries a POST if the connection failed, but on no status, and not if the response breaks off. */
export function axiosThrough(proxy: string): AxiosInstance {
  const client = axios.create({ baseURL: proxy, headers: { Authorization: 'Bearer sk_test_example' } })
  axiosRetry(client, {
    retries: 5,
    retryCondition: mayBeAskedAgain,
    // The longer of its own pause and of `Retry-After`.
    retryDelay: (count, error) => axiosRetry.exponentialDelay(count, error),
  })
  return client
}

function mayBeAskedAgain(error: AxiosError): boolean {
  const { response } = error
  // No response, or a truncated one: nobody knows what happened, and the key makes a retry safe.
  if (response === undefined || response.data === undefined) return true
  return [409, 429].includes(response.status) || response.status >= 500
}

/** One charge for one key, however many tries it takes. Keep the key with the order, not in this function. */
export function createCharge(client: AxiosInstance, key: string, amount: number): Promise<AxiosResponse> {
  const form = new URLSearchParams({ amount: String(amount), currency: 'eur', source: 'tok_visa' })
  return client.post('/v1/charges', form, { headers: { 'Idempotency-Key': key } })
}
