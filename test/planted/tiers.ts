/**
 * Breaks 31 rules of the product, one at a time, and prints which tier of the tests sees each, by which file: `node test/planted/tiers.ts`
 * (about half an hour; `--rule NAME` tries one). `npm test` must see at least 29, or a behaviour is in the wrong tier.
 */
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { mkdtempSync, readdirSync, rmSync } from 'node:fs'
import { availableParallelism, tmpdir } from 'node:os'
import { join } from 'node:path'
import { parseArgs } from 'node:util'
import { RULES } from './rules.ts'

const ROOT = join(import.meta.dirname, '../..')
/** As `plant.ts` ends where nothing was planted: the file did not load what was to be broken. */
const NOT_LOADED = 3

/** The files of a tier, those first whose folder is named as the broken file's. */
function filesOf(tier: string, broken: string): string[] {
  const folder = broken.split('/')[1] as string
  return readdirSync(join(ROOT, 'test'), { recursive: true, encoding: 'utf8' })
    .filter((name) => name.endsWith(`.${tier}.ts`) && !name.includes('node_modules'))
    .toSorted((a, b) => Number(b.startsWith(folder)) - Number(a.startsWith(folder)))
    .map((name) => `test/${name}`)
}

/** The first of the files that fails with the rule broken; null: none does. */
async function seenBy(rule: string, files: readonly string[]): Promise<string | null> {
  const waiting = [...files]
  const temporary = mkdtempSync(join(tmpdir(), 'rules-'))
  const stop = new AbortController()
  let seen: string | null = null
  const worker = async (): Promise<void> => {
    for (let file = waiting.shift(); file !== undefined && seen === null; file = waiting.shift()) {
      const child = spawn(process.execPath, ['--import', './test/simulation/plant.ts', file], {
        cwd: ROOT,
        env: { ...process.env, PLANT: rule, TAP_BAIL: '1', TMPDIR: temporary },
        stdio: 'ignore',
        signal: stop.signal,
      })
      child.on('error', () => {})
      const [code] = (await once(child, 'close').catch(() => [null])) as [number | null]
      if (stop.signal.aborted || code === 0 || code === NOT_LOADED) continue
      seen ??= file
      stop.abort()
    }
  }
  await Promise.all(Array.from({ length: availableParallelism() + 1 }, worker))
  rmSync(temporary, { recursive: true, force: true })
  return seen
}

const { values } = parseArgs({ options: { rule: { type: 'string' } } })
let [first, second] = [0, 0]
for (const { name, file } of RULES) {
  if (values.rule !== undefined && values.rule !== name) continue
  const inTest = await seenBy(name, filesOf('test', file))
  const inVerify = inTest === null ? await seenBy(name, filesOf('verify', file)) : null
  if (inTest !== null) first++
  else if (inVerify !== null) second++
  const saw =
    inTest !== null ? `npm test: ${inTest}` : inVerify !== null ? `verify only: ${inVerify}` : 'NO TIER'
  process.stdout.write(`${name} (${file}) | ${saw}\n`)
}
process.stdout.write(`of ${RULES.length} rules npm test sees ${first}, verify alone ${second}\n`)
