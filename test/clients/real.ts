import { execFile, spawnSync } from 'node:child_process'
import { randomUUID } from 'node:crypto'
import { fileURLToPath } from 'node:url'
import * as viaAxios from '../../examples/clients/axios.ts'
import * as viaStripe from '../../examples/clients/stripe.ts'
import * as viaUndici from '../../examples/clients/undici.ts'

/** How an attempt to charge ended, as the client reports it to its application. */
export type Ended =
  | {
      readonly kind: 'charged'
      readonly charge: unknown
      /** Whether the response was marked `Idempotent-Replayed`; null where the client does not show headers. */
      readonly replayed: boolean | null
    }
  /** Refused, or unknown: the `code` of the proxy's response. */
  | { readonly kind: 'told'; readonly code: unknown }
  | { readonly kind: 'lost'; readonly error: string }

export interface RealClient {
  readonly name: string
  /** Why it cannot run on this machine. */
  readonly skip: string | false
  /** A process for every try. */
  readonly costly: boolean
  /** Runs the example as it stands in the documentation. */
  charge(url: string, key: string): Promise<Ended>
}

/** Stripe's minor unit; every scenario asks for the same amount, so that every exchange has the same length. */
export const AMOUNT = 4200

/** A key whose bytes occur nowhere else in a request. */
export function orderKey(): string {
  return `order-${randomUUID()}`
}

export const NO_CURL =
  spawnSync('curl', ['--version']).status === 0 ? false : 'curl is not installed; examples/retry.sh needs it'

const SCRIPT = fileURLToPath(new URL('../../examples/retry.sh', import.meta.url))

export const REAL_CLIENTS: readonly RealClient[] = [
  {
    name: 'stripe',
    skip: false,
    costly: false,
    async charge(url, key) {
      try {
        const charge = await viaStripe.createCharge(viaStripe.stripeThrough(url), key, AMOUNT)
        return ended(200, { ...charge }, charge.lastResponse.headers['idempotent-replayed'])
      } catch (error) {
        // What the example throws where stripe-node took the proxy's refusal for a charge.
        const told = /^not charged: (\{.*\})$/.exec((error as Error).message)?.[1]
        return told === undefined ? lost(error) : ended(409, JSON.parse(told), undefined)
      }
    },
  },
  {
    name: 'undici RetryAgent',
    skip: false,
    costly: false,
    async charge(url, key) {
      try {
        const { status, headers, body } = await viaUndici.createCharge(url, key, AMOUNT)
        return ended(status, body, headers['idempotent-replayed'])
      } catch (error) {
        return lost(error)
      }
    },
  },
  {
    name: 'axios-retry',
    skip: false,
    costly: false,
    async charge(url, key) {
      try {
        const { status, data, headers } = await viaAxios.createCharge(viaAxios.axiosThrough(url), key, AMOUNT)
        return ended(status, data, headers['idempotent-replayed'])
      } catch (error) {
        const { response } = error as { response?: { status: number; data: unknown } }
        return response === undefined ? lost(error) : ended(response.status, response.data, undefined)
      }
    },
  },
  {
    name: 'retry.sh (curl)',
    skip: NO_CURL,
    costly: true,
    async charge(url, key) {
      const { code, stdout, stderr } = await runScript(url, key)
      if (code === 0) return { kind: 'charged', charge: JSON.parse(stdout), replayed: null }
      const told = /^\{.*\}$/m.exec(stderr)?.[0]
      return told === undefined ? lost(stderr) : ended(409, JSON.parse(told), undefined)
    },
  },
]

/** examples/retry.sh, with a short pause between its tries. */
export function runScript(
  url: string,
  key: string,
  env: Readonly<Record<string, string>> = {},
): Promise<{ code: number; stdout: string; stderr: string }> {
  return new Promise((resolve) => {
    const child = execFile(
      'sh',
      [SCRIPT, String(AMOUNT), key],
      { env: { ...process.env, URL: `${url}/v1/charges`, PAUSE: '0.2', ...env } },
      (_error, stdout, stderr) => resolve({ code: child.exitCode ?? -1, stdout, stderr }),
    )
  })
}

function ended(status: number, body: unknown, marker: unknown): Ended {
  if (status === 200) return { kind: 'charged', charge: body, replayed: marker === 'true' }
  return { kind: 'told', code: (body as { code?: unknown }).code }
}

function lost(error: unknown): Ended {
  return { kind: 'lost', error: String(error) }
}

/** Runs all tasks, at most `width` at a time. */
export async function inBatches<T>(
  tasks: readonly T[],
  width: number,
  run: (task: T) => Promise<void>,
): Promise<void> {
  const left = [...tasks].reverse()
  const worker = async (): Promise<void> => {
    for (let task = left.pop(); task !== undefined; task = left.pop()) await run(task)
  }
  await Promise.all(Array.from({ length: width }, worker))
}
