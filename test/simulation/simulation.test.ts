import { readFileSync } from 'node:fs'
import t from 'tap'
import { MISTAKES } from '../model/protocol.ts'
import { simulateAll, timeline } from './batch.ts'
import { FUZZED, PLANTS } from './plants.ts'
import { simulate } from './run.ts'

// A busy machine takes its time.
t.setTimeout(300_000)

/** More of them: `npm run simulate`. */
const RUNS = 150
const FIRST = Number(process.env['SEED'] ?? Math.floor(Math.random() * 2 ** 31))

void t.test(
  'X06 X03 whatever happens to clients, replicas, store and upstream, the simulation finds no broken promise',
  async (t) => {
    for (const [what, first] of [
      ['the first seeds', 1],
      ['seeds of this run', FIRST],
    ] as const) {
      const { runs, executions, broken } = await simulateAll(first, RUNS)
      if (broken !== null) t.fail(await timeline(broken.seed))
      t.equal(runs, RUNS, `${what}: from ${first}`)
      t.ok(executions > RUNS / 2, `${executions} executions`)
    }
  },
)

void t.test('a seed repeats its run event for event', async (t) => {
  const hashes = new Set<number>()
  for (let seed = 1; seed <= 20; seed++) {
    const [one, two] = [await alone(seed), await alone(seed)]
    t.equal(one.hash, two.hash, `seed ${seed}`)
    t.equal(one.events, two.events)
    hashes.add(one.hash)
  }
  t.equal(hashes.size, 20, 'another seed is another run')
})

void t.test('a timeline shows what happened, and to whom', async (t) => {
  const text = await timeline(7)
  for (const what of [
    /^seed 7: nothing is wrong$/m,
    /lease 3000 ms/,
    /client .*sends "first"/,
    /store .*holds in_progress/,
  ])
    t.match(text, what)
})

const read = (file: string): string => readFileSync(new URL(`../../${file}`, import.meta.url), 'utf8')

void t.test('every mistake can be planted, and docs/internals/proof-details.md lists it', async (t) => {
  const proof = read('docs/internals/proof-details.md')
  for (const { name, file, from } of [...PLANTS, ...FUZZED]) {
    t.equal(read(file).split(from).length, 2, `${name}: its text occurs once in ${file}`)
    t.ok(proof.includes(`| ${name} |`), name)
  }
})

void t.test('at least ten mistakes are listed as caught in two ways', async (t) => {
  const proof = read('docs/internals/proof-details.md').split('\n')
  const twice = PLANTS.filter(({ model, also }) => model !== undefined || also !== undefined)
  t.ok(twice.length >= 10, `${twice.length}`)
  for (const { name, model, also } of twice) {
    const row = proof.find((line) => line.startsWith(`| ${name} |`)) ?? ''
    if (model !== undefined) {
      // test/model/protocol.test.ts shows that the model finds it.
      t.ok((MISTAKES as readonly string[]).includes(model), model)
      t.ok(row.includes(model === name ? '| yes |' : model), row)
    }
    if (also !== undefined) t.ok(row.includes(`(../../${also})`), row)
  }
})

function alone(seed: number): Promise<ReturnType<typeof simulate>> {
  return new Promise((resolve) => {
    setImmediate(() => resolve(simulate(seed)))
  })
}
