import { randomInt } from 'node:crypto'
import { setTimeout as wait } from 'node:timers/promises'
import { newKey, send, until } from './e2e.ts'
import { proxyInProcess, type TestProxy } from './proxy.ts'
import { upstreamStub, valueOf } from './upstream.ts'

const CLIENTS = 6

/** Two servers, of which one is the other's copy, a moment late. */
export interface Pair extends AsyncDisposable {
  readonly url: string
  cutReplication(): void
  promote(): Promise<void>
  heal(): Promise<void>
}

export interface Figures {
  failovers: number
  keys: number
  /** Executed more than once. */
  twice: number
  /** What their clients were told last. */
  unknown: number
  splits: number
}

/** Two proxies and a pair of servers of which one is lost again and again, with what it alone had, while clients go on. */
async function failovers(start: () => Promise<Pair>, count: number, grace: string): Promise<Figures> {
  const executions = new Map<string, number>()
  await using upstream = await upstreamStub(async (seen, response) => {
    const key = valueOf(seen, 'idempotency-key')
    executions.set(key, (executions.get(key) ?? 0) + 1)
    await wait(randomInt(300))
    response.writeHead(201, { 'Content-Type': 'text/plain' }).end(key)
  })
  await using pair = await start()
  const yaml = `upstream: { url: "${upstream.url}" }\nstore: { url: "${pair.url}", grace: ${grace}, timeout: 400ms }\n`
  await using a = await proxyInProcess(yaml)
  await using b = await proxyInProcess(yaml)
  const proxies = [a, b] as const
  const any = (): TestProxy => proxies[randomInt(2)] as TestProxy
  const load = { isOver: false }
  let unknown = 0
  /** Asked for until it is answered: a client whose connection broke off does the same. */
  const ask = async (key: string): Promise<boolean> => {
    let reply = await send(any(), key).catch(() => null)
    while (reply?.status !== 201 && reply?.code !== 'idempotency_outcome_unknown') {
      await wait(20 + randomInt(60))
      reply = await send(any(), key).catch(() => null)
    }
    return reply.status === 201
  }
  const clients = Array.from({ length: CLIENTS }, async () => {
    while (!load.isOver) {
      const key = newKey()
      // Twice at once, and once more when it was done: its outcome may be lost, too.
      await Promise.all([ask(key), ask(key)])
      if (!(await ask(key))) unknown++
    }
  })
  for (let n = 0; n < count; n++) {
    await wait(randomInt(300))
    pair.cutReplication()
    await wait(randomInt(200))
    await pair.promote()
    await until(async () => (await send(any(), newKey()).catch(() => null))?.status === 201)
    await pair.heal()
  }
  load.isOver = true
  await Promise.all(clients)
  const splits = (proxy: TestProxy) => proxy.metric('idempotency_split_total{route="default"}')
  // The connection of the last look, long ago, may just be closing.
  const split = await Promise.all(proxies.map((one) => splits(one).catch(() => splits(one))))
  return {
    failovers: count,
    keys: executions.size,
    twice: [...executions.values()].filter((times) => times > 1).length,
    unknown,
    splits: split.reduce((sum, one) => sum + one, 0),
  }
}

/** So many failovers over all `pairs`, which are at work at once. */
export async function failoversOf(
  start: () => Promise<Pair>,
  pairs: number,
  count: number,
  grace: string,
): Promise<Figures> {
  const each = Array.from({ length: pairs }, () => failovers(start, Math.ceil(count / pairs), grace))
  const sum: Figures = { failovers: 0, keys: 0, twice: 0, unknown: 0, splits: 0 }
  for (const one of await Promise.all(each))
    for (const name of Object.keys(sum) as (keyof Figures)[]) sum[name] += one[name]
  return sum
}

/** What happens where nothing is held: failovers go on until some claim was lost that matters, so that the test can fail. */
export async function failoversWithoutGrace(
  start: () => Promise<Pair>,
  pairs: number,
  count: number,
): Promise<Figures> {
  const figures = await failoversOf(start, pairs, count, 'off')
  for (let round = 1; figures.twice === 0 && round < 10; round++) {
    const more = await failoversOf(start, pairs, count, 'off')
    for (const name of Object.keys(figures) as (keyof Figures)[]) figures[name] += more[name]
  }
  return figures
}
