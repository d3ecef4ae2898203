import { LARGE, SMALL } from './bodies.ts'
import type { CandidateName } from './candidates.ts'
import { Client } from './load.ts'
import { STORE_CANDIDATES } from './stores.ts'

export interface Round {
  readonly candidate: CandidateName
  readonly port: number
  readonly upstreamPort: number
  /** Different in every round, which makes keys differ. */
  readonly name: string
}

export interface Scenario {
  readonly id: string
  readonly title: string
  readonly candidates: readonly CandidateName[]
  readonly status: number
  /** The share of requests that reaches the upstream. Checked: a replay must not execute. */
  readonly executes: 0 | 1
  /** Limit of the warm-up round in milliseconds, if not the plan's. */
  readonly warmUp?: number
  readonly request: (round: Round, n: number) => Buffer
  /** Prepares the round, and returns a function that undoes it. */
  readonly prepare?: (round: Round) => Promise<() => Promise<void>>
}

const PROTECTING = ['proxy-redis', 'proxy-sqlite', 'proxy-memory', 'nginx-lua', 'node-idempotency'] as const
/** Finished keys that replays cycle through, and running ones for duplicates. */
const KEYS = 500
const LARGE_KEYS = 100
const HELD_KEYS = 16

const BODIES = { small: Buffer.from(SMALL), large: Buffer.from(LARGE) }
type Size = keyof typeof BODIES

/** The request head of a payment client. */
function head(line: string, lines: readonly string[]): string {
  return [
    `${line} HTTP/1.1`,
    'Host: api.example.com',
    'User-Agent: bench/1',
    'Accept: application/json',
    'Accept-Encoding: gzip, deflate',
    'Authorization: Bearer sk_test_4eC39HqLyjWDarjtT1zdp7dc',
    ...lines,
    '\r\n',
  ].join('\r\n')
}

function post(path: string, size: Size, key: string | null): Buffer {
  return postOf(path, BODIES[size], key)
}

export function postOf(path: string, body: Buffer, key: string | null, type = 'application/json'): Buffer {
  const lines = [`Content-Type: ${type}`, `Content-Length: ${body.length}`]
  if (key !== null) lines.push(`Idempotency-Key: ${key}`)
  return Buffer.concat([Buffer.from(head(`POST ${path}`, lines), 'latin1'), body])
}

function keyOf(round: Round, n: number): string {
  return `${round.name}-${String(n).padStart(10, '0')}`
}

const KEPT = { small: '/v1/payments', large: '/v1/large' }

function replay(size: Size, keys: number): Pick<Scenario, 'request' | 'prepare'> {
  return {
    request: (round, n) => post(KEPT[size], size, keyOf(round, n % keys)),
    async prepare(round) {
      const client = await Client.open(round.port)
      for (let n = 0; n < keys; n++) {
        const status = await client.exchange(post(KEPT[size], size, keyOf(round, n)))
        if (status !== 201) throw new Error(`the first execution was answered ${status}: ${client.last}`)
      }
      client.close()
      return async () => {}
    },
  }
}

export const SCENARIOS: readonly Scenario[] = [
  {
    id: 'get',
    title: 'pass-through GET',
    candidates: ['proxy-redis', 'http-proxy', 'nginx'],
    status: 200,
    executes: 1,
    request: () => Buffer.from(head('GET /v1/payments/pay_1', [])),
  },
  {
    id: 'post',
    title: 'pass-through POST, 300 bytes',
    candidates: ['proxy-redis', 'unprotected', 'unprotected-node', 'http-proxy', 'nginx'],
    status: 201,
    executes: 1,
    request: () => post('/v1/plain', 'small', null),
  },
  {
    id: 'first',
    title: 'first execution, JSON of 300 bytes',
    candidates: [
      ...PROTECTING,
      'proxy-sealed',
      'proxy-postgres',
      'proxy-tls',
      'proxy-http2',
      'proxy-grpc',
      ...STORE_CANDIDATES,
      'unprotected',
      'unprotected-node',
    ],
    status: 201,
    executes: 1,
    request: (round, n) =>
      post(round.candidate === 'proxy-memory' ? '/v1/short' : '/v1/payments', 'small', keyOf(round, n)),
  },
  {
    id: 'replay',
    title: 'replay, JSON of 300 bytes',
    candidates: [...PROTECTING, 'proxy-sealed', 'proxy-postgres', ...STORE_CANDIDATES],
    status: 201,
    executes: 0,
    ...replay('small', KEYS),
  },
  {
    id: 'in-flight',
    title: 'duplicate in flight, JSON of 300 bytes',
    candidates: PROTECTING,
    status: 409,
    executes: 0,
    // The held requests must not outlast the round.
    warmUp: 500,
    request: (round, n) => post('/v1/hold', 'small', keyOf(round, n % HELD_KEYS)),
    async prepare(round) {
      const clients = await Promise.all(Array.from({ length: HELD_KEYS }, () => Client.open(round.port)))
      const answers = clients.map((client, n) => client.exchange(post('/v1/hold', 'small', keyOf(round, n))))
      while ((await control(round.upstreamPort, 'held')) < HELD_KEYS);
      return async () => {
        await control(round.upstreamPort, 'release')
        for (const status of await Promise.all(answers))
          if (status !== 201) throw new Error(`the held request was answered ${status}`)
        for (const client of clients) client.close()
      }
    },
  },
  {
    id: 'first-large',
    warmUp: 10_000,
    title: 'first execution, JSON of 64 KiB both ways',
    // They would fill the memory store in half a second.
    candidates: [...PROTECTING.filter((name) => name !== 'proxy-memory'), 'unprotected'],
    status: 201,
    executes: 1,
    request: (round, n) => post('/v1/large', 'large', keyOf(round, n)),
  },
  {
    id: 'replay-large',
    warmUp: 10_000,
    title: 'replay, JSON of 64 KiB both ways',
    candidates: PROTECTING,
    status: 201,
    executes: 0,
    ...replay('large', LARGE_KEYS),
  },
]

export function scenarioOf(id: string): Scenario {
  const found = SCENARIOS.find((one) => one.id === id)
  if (found === undefined) throw new Error(`no scenario ${id}`)
  return found
}

/** Asks the upstream for the number of its requests and held ones, or to release them. */
export async function control(port: number, what: 'count' | 'held' | 'release'): Promise<number> {
  const reply = await fetch(`http://127.0.0.1:${port}/control/${what}`)
  return Number(await reply.text())
}
