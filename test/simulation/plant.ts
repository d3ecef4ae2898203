/**
 * Plants the mistake that PLANT names while the code is loaded: `node --import ./test/simulation/plant.ts …`. The files stay as they are. It
 * fails where the text that it replaces is not there exactly once: the code has changed, and the plant has to follow.
 */
import { registerHooks } from 'node:module'
import { RULES } from '../planted/rules.ts'
import { FUZZED, PLANTS } from './plants.ts'

const plant = [...PLANTS, ...FUZZED, ...RULES].find(({ name }) => name === process.env['PLANT'])
if (plant === undefined) throw new Error(`no such plant: ${process.env['PLANT']}`)
const { name, file, from, to } = plant
const url = new URL(`../../${file}`, import.meta.url).href
let isPlanted = false

registerHooks({
  load(loaded, context, next) {
    const found = next(loaded, context)
    if (loaded !== url) return found
    const { source } = found
    const text = typeof source === 'string' ? source : Buffer.from(source as Uint8Array).toString()
    const parts = text.split(from)
    if (parts.length !== 2)
      throw new Error(`the plant "${name}": its text is ${parts.length - 1} times in ${file}, not once`)
    isPlanted = true
    return { ...found, source: parts.join(to) }
  },
})
process.on('exit', () => {
  if (isPlanted) return
  process.stderr.write(`the plant "${name}": ${file} was not loaded\n`)
  process.exitCode = 3
})
