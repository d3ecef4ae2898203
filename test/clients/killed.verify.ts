import t from 'tap'
import { type ChargesApi, startChargesApi } from '../../examples/charges-api/server.ts'
import { configFile, tempDir } from '../support/e2e.ts'
import { type ChildProxy, proxyProcess } from '../support/proxy.ts'
import { freePort } from '../support/redis.ts'
import { type Cut, type Cutter, cutter } from './cutter.ts'
import { type Ended, orderKey, REAL_CLIENTS, type RealClient } from './real.ts'

t.setTimeout(240_000)

interface Stage {
  readonly title: string
  /** Where the first exchange of each client stops before the proxy is killed. */
  readonly stop: (whole: Cutter['first']) => Cut
  /** The API makes the charge and does not answer before the kill. */
  readonly heldByApi: boolean
  /** How it ends for every client once a proxy is back. */
  readonly ends: 'made by the retry' | 'replayed' | 'unknown'
}

const STAGES: readonly Stage[] = [
  {
    title: 'half of the request has arrived',
    stop: ({ up }) => ({ way: 'up', after: Math.floor(up.length / 2), how: 'hold' }),
    heldByApi: false,
    ends: 'made by the retry',
  },
  {
    title: 'the charge is made, the API has not answered',
    stop: ({ down }) => ({ way: 'down', after: down.length, how: 'hold' }),
    heldByApi: true,
    ends: 'unknown',
  },
  {
    title: 'the response is stored, none of it has arrived',
    stop: () => ({ way: 'down', after: 0, how: 'hold' }),
    heldByApi: false,
    ends: 'replayed',
  },
  {
    title: 'the response is stored, half of its body has arrived',
    stop: ({ down }) => ({
      way: 'down',
      after: Math.floor((down.indexOf('\r\n\r\n') + down.length) / 2),
      how: 'hold',
    }),
    heldByApi: false,
    ends: 'replayed',
  },
]

/**
 * The clients that can run. Where the outcome stays unknown, only those with few tries: the others would wait out five or six growing
 * `Retry-After`s to be told the same, which cuts.test.ts shows.
 */
function clientsOf({ ends }: Stage): readonly RealClient[] {
  const here = REAL_CLIENTS.filter(({ skip }) => skip === false)
  return ends === 'unknown' ? here.slice(0, 2) : here
}

/** How it ended for each client. */
async function killedAt(stage: Stage, dir: string): Promise<Map<RealClient, Summary>> {
  const { stop, heldByApi } = stage
  const clients = clientsOf(stage)
  await using api = await startChargesApi()
  const port = await freePort()
  const config = configFile(
    dir,
    `upstream: { url: "${api.url}" }
store: { url: "sqlite:${dir}/${port}.db" }
defaults: { lease: 2s }
routes: [{ name: charges, match: { methods: [POST], path: /v1/charges }, key: required }]`,
  )
  const start = (): Promise<ChildProxy> => proxyProcess(config, ['--listen', `127.0.0.1:${port}`])
  await using doomed = await start()
  const lengths = await Promise.all(clients.map((client) => measured(client, port)))

  const { promise, resolve } = Promise.withResolvers<void>()
  if (heldByApi) api.trouble(...clients.map(() => ({ until: promise })))
  const asked = await Promise.all(
    clients.map(async (client, n) => {
      const wire = await cutter(port, [stop(lengths[n] as Cutter['first'])])
      const key = orderKey()
      return { client, key, wire, ended: client.charge(wire.url, key) }
    }),
  )
  if (heldByApi) await api.charged(2 * clients.length)
  else await Promise.all(asked.map(({ wire }) => wire.cut(1)))
  doomed.kill('SIGKILL')
  await doomed.exited
  await using _restarted = await start()

  const summaries = new Map<RealClient, Summary>()
  await Promise.all(
    asked.map(async ({ client, key, wire, ended }) => {
      // A client that ran out of tries before a proxy was back, or before the lease was over, tries once more.
      let last = await ended
      while (last.kind === 'lost' || (last.kind === 'told' && last.code === 'idempotency_key_in_progress'))
        last = await client.charge(wire.url, key)
      summaries.set(client, summary(api, key, last))
      await wire[Symbol.asyncDispose]()
    }),
  )
  resolve()
  return summaries
}

const dir = tempDir(t)
const runs = STAGES.map((stage) => killedAt(stage, dir))
for (const run of runs) run.catch(() => {})

for (const [n, stage] of STAGES.entries())
  void t.test(
    `X06 kill -9 while ${stage.title}, then a new proxy on the same store: one charge`,
    async (t) => {
      const summaries = await (runs[n] as (typeof runs)[number])
      for (const client of clientsOf(stage)) {
        const { replayed, ...rest } = summaries.get(client) as Summary
        const { replayed: marked, ...expected } = EXPECTED[stage.ends]
        t.same(rest, expected, client.name)
        if (replayed !== null) t.equal(replayed, marked)
      }
    },
  )

async function measured(client: RealClient, port: number): Promise<Cutter['first']> {
  await using wire = await cutter(port)
  await client.charge(wire.url, orderKey())
  return wire.first
}

interface Summary {
  readonly charges: number
  readonly told: unknown
  /** null where the client does not show it. */
  readonly replayed: boolean | null
}

function summary(api: ChargesApi, key: string, ended: Ended): Summary {
  const made = api.under(key)
  const told = ended.kind === 'told' ? ended.code : ended.kind
  if (ended.kind !== 'charged') return { charges: made.length, told, replayed: null }
  const right = JSON.stringify(ended.charge) === JSON.stringify(made[0])
  return { charges: made.length, told: right ? told : ended.charge, replayed: ended.replayed }
}

const EXPECTED: Readonly<Record<Stage['ends'], Summary>> = {
  'made by the retry': { charges: 1, told: 'charged', replayed: false },
  replayed: { charges: 1, told: 'charged', replayed: true },
  unknown: { charges: 1, told: 'idempotency_outcome_unknown', replayed: null },
}
