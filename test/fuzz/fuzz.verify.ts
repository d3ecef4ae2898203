import { readdirSync } from 'node:fs'
import t from 'tap'
import { fuzz } from './engine.ts'
import { corpusOf, TARGETS } from './targets.ts'

/** Without the guide, which would come in the way of the coverage of the tests. More: `npm run fuzz`. */
const TRIES = Number(process.env['FUZZ_CASES'] ?? 600)
const SEED = Number(process.env['FUZZ_SEED'] ?? Math.floor(Math.random() * 2 ** 31))

for (const target of TARGETS)
  void t.test(`${target.name}: holds of the corpus, and of what becomes of it`, async (t) => {
    t.comment(`seed ${SEED}`)
    const corpus = corpusOf(target)
    const { tries, finding } = await fuzz(target, corpus, SEED, (done) => done >= TRIES, null)
    if (finding !== null)
      t.fail(`${JSON.stringify(finding.input.toString('latin1'))}: ${String(finding.error)}`)
    t.equal(tries, TRIES, `${corpus.length} inputs`)
  })

void t.test('what guides a target is there', async (t) => {
  const files = readdirSync(new URL('../../src/', import.meta.url), { recursive: true, encoding: 'utf8' })
  for (const { name, files: guides } of TARGETS)
    for (const guide of guides)
      t.ok(
        files.some((file) => file.startsWith(guide)),
        `${name}: ${guide}`,
      )
})

void t.test('every corpus has a target', async (t) => {
  const names = new Set(TARGETS.map(({ name }) => `${name}.txt`))
  t.same(
    readdirSync(new URL('corpus/', import.meta.url)).filter((file) => !names.has(file)),
    [],
  )
})
