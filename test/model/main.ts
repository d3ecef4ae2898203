/**
 * `npm run model -- [--requests 3] [--only 'a failover with grace']`: goes through every state of the model, so many requests at once, and of the one of a migration. Three
 * requests are explored where nothing is lost and nobody decides (a minute); another variant of them by `--only`, with gigabytes and time.
 * Exit codes: 0 nothing is wrong, 1 something is; its shortest way is printed.
 */
import { parseArgs } from 'node:util'
import { type Exploration, explore } from './explore.ts'
import { migration } from './migration.ts'
import { protocol } from './promises.ts'
import { VARIANTS } from './variants.ts'

const { values } = parseArgs({
  options: { requests: { type: 'string', default: '2' }, only: { type: 'string' } },
})
const requests = Number(values.requests)
if (!(requests === 2 || requests === 3)) throw new TypeError('--requests: found neither 2 nor 3')
const say = (text: string): void => void process.stdout.write(`${text}\n`)

const models: Record<string, () => Omit<Exploration<unknown>, 'pathTo'>> = {
  'a migration of three requests': () => explore(migration(3, null)),
}
// A minute, and three gigabytes.
if (requests === 3) models['a migration of four requests'] = () => explore(migration(4, null))
const BOUNDED = ['plain', 'onLeaseExpired: retry']
for (const [name, rules] of Object.entries(VARIANTS(requests)))
  if (requests === 2 || BOUNDED.includes(name) || values.only === name)
    models[name] = () => explore(protocol(rules))

for (const [name, explored] of Object.entries(models)) {
  if (values.only !== undefined && values.only !== name) continue
  const began = process.cpuUsage()
  const { states, steps, broken } = explored()
  const { user, system } = process.cpuUsage(began)
  say(`${name}: ${states} states, ${steps} steps, ${Math.round((user + system) / 1e5) / 10} CPU seconds`)
  if (broken === null) continue
  say(`WRONG: ${broken.what}\n  ${broken.trace.join('\n  ')}`)
  process.exitCode = 1
}
if (process.exitCode !== 1) say('no promise is broken')
