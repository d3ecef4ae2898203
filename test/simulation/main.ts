/**
 * `npm run simulate -- [--seconds 60] [--cpu-seconds N] [--runs N] [--seed N] [--told]`: simulations of the whole proxy, one seed after the other, until
 * something breaks. `--told` prints the timeline of one seed. Exit codes: 0 nothing broke, 1 something did.
 */
import { parseArgs } from 'node:util'
import { simulateAll, timeline } from './batch.ts'

const { values } = parseArgs({
  options: {
    seconds: { type: 'string' },
    'cpu-seconds': { type: 'string' },
    runs: { type: 'string' },
    seed: { type: 'string' },
    told: { type: 'boolean', default: false },
  },
})
const seed = values.seed === undefined ? Math.floor(Math.random() * 2 ** 31) : Number(values.seed)
if (!Number.isSafeInteger(seed)) throw new TypeError('--seed is no whole number')
const say = (text: string): void => void process.stdout.write(`${text}\n`)

if (values.told) say(await timeline(seed))
else {
  const runs = Number(values.runs ?? Number.POSITIVE_INFINITY)
  const cpuSeconds = Number(values['cpu-seconds'] ?? Number.POSITIVE_INFINITY)
  const seconds = Number(values.seconds ?? (Number.isFinite(cpuSeconds) ? cpuSeconds * 100 : 60))
  const batch = await simulateAll(seed, runs, { seconds, cpuSeconds })
  const { broken } = batch
  if (broken !== null) say(await timeline(broken.seed))
  say(
    JSON.stringify({
      from: seed,
      runs: batch.runs,
      events: batch.events,
      executions: batch.executions,
      answers: batch.answers,
      cpuSeconds: Math.round(batch.cpuSeconds * 10) / 10,
      runsPerCpuSecond: Math.round(batch.runs / batch.cpuSeconds),
      eventsPerCpuSecond: Math.round(batch.events / batch.cpuSeconds),
      broken: broken === null ? null : { seed: broken.seed, what: broken.broken?.what },
    }),
  )
  process.exitCode = broken === null ? 0 : 1
}
