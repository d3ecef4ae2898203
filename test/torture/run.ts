/**
 * `npm run torture`: replicas as processes, behind relays that cut and hold, on a real store; kills, pauses, reloads, drains, clock
 * steps, a full disk (as root), failovers that lose writes; clients that retry. Exit 1 if anything was executed twice, answered
 * wrongly, lost or stuck, or if a process grew. SIGINT ends it early, with the figures so far.
 *
 *   --store NAME     sqlite (default), redis, postgres, sentinel, cluster
 *   --minutes N      1
 *   --requests N     instead of --minutes: until this many requests
 *   --faults N       and this many faults, spread evenly (a thousandth of the requests)
 *   --seed N         chosen at random, and printed
 *   --replicas N     3
 *   --workers N      processes of each: 1 (redis, postgres, sentinel, cluster)
 *   --lanes N        clients at a time: 32
 *   --only TEXT      only faults whose name contains it, such as 'replica killed'
 *   --grace off      without the grace after a failover (sentinel, cluster): torture should find it
 *   --plant NAME     with a bug of test/simulation/plants.ts in the proxies: torture should find it
 */
import { randomInt } from 'node:crypto'
import { parseArgs } from 'node:util'
import { planted, torture } from './torture.ts'

const { values } = parseArgs({
  options: {
    store: { type: 'string', default: 'sqlite' },
    minutes: { type: 'string', default: '1' },
    requests: { type: 'string' },
    faults: { type: 'string' },
    seed: { type: 'string' },
    replicas: { type: 'string', default: '3' },
    workers: { type: 'string', default: '1' },
    lanes: { type: 'string', default: '32' },
    only: { type: 'string' },
    grace: { type: 'string' },
    plant: { type: 'string' },
  },
})

function positive(name: string, text: string): number {
  const value = Number(text)
  if (!(value > 0)) throw new Error(`--${name}: found ${text}; allowed: a number above 0`)
  return value
}

const seed = values.seed === undefined ? randomInt(2 ** 31) : positive('seed', values.seed)
const requestsWanted = values.requests === undefined ? null : positive('requests', values.requests)
process.stdout.write(`store ${values.store}, seed ${seed}, ${new Date().toISOString()}\n`)
const stop = new AbortController()
process.once('SIGINT', () => stop.abort())
const result = await torture({
  store: values.store,
  seed,
  goal:
    requestsWanted === null
      ? { milliseconds: positive('minutes', values.minutes) * 60_000 }
      : {
          requests: requestsWanted,
          faults: positive('faults', values.faults ?? `${Math.ceil(requestsWanted / 1000)}`),
        },
  replicas: positive('replicas', values.replicas),
  workers: positive('workers', values.workers),
  lanes: positive('lanes', values.lanes),
  ...(values.only === undefined ? {} : { only: values.only }),
  ...(values.grace === 'off' ? { grace: values.grace } : {}),
  ...(values.plant === undefined ? {} : { env: planted(values.plant) }),
  signal: stop.signal,
  say: (line) => void process.stderr.write(`${line}\n`),
})
const { operations, executed, unknown, replays, requests, seconds, findings, leftOvers } = result
const faults = [...result.faults.values()].reduce((sum, count) => sum + count, 0)
for (const [name, count] of [...result.faults].toSorted(([a], [b]) => a.localeCompare(b)))
  process.stdout.write(`${String(count).padStart(6)} ${name}\n`)
process.stdout.write(
  `${requests} requests in ${seconds} s, ${faults} faults; ${operations} operations: ${executed} executed, ${replays} answers replayed, ${unknown} unknown to the end; ${findings.length} promises broken\n`,
)
for (const { what, timeline } of findings) process.stdout.write(`\n${what}\n${timeline}\n`)
for (const what of leftOvers) process.stdout.write(`left: ${what}\n`)
process.exitCode = findings.length + leftOvers.length === 0 ? 0 : 1
