import { readFileSync } from 'node:fs'
import t from 'tap'
import { FUZZED, PLANTS } from '../simulation/plants.ts'
import { RULES } from './rules.ts'

t.test('the text that a planted mistake replaces is in its file exactly once', async (t) => {
  for (const { name, file, from, to } of [...PLANTS, ...FUZZED, ...RULES]) {
    const text = readFileSync(new URL(`../../${file}`, import.meta.url), 'utf8')
    t.equal(text.split(from).length, 2, `${name} (${file})`)
    t.not(from, to)
  }
})
