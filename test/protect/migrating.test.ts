import fc from 'fast-check'
import t from 'tap'
import { PHASES, type Phase } from '../../src/core/copies.ts'
import { migrating } from '../../src/store/migrating.ts'
import type { Store as StorePort } from '../../src/store/register.ts'
import { HOUR, RUNS, route, Store } from './harness.ts'
import { type Fleet, play, type Step, steps } from './playing.ts'

t.setTimeout(600_000)

/** `plain`: without a migration, on the old store. */
type Place = Phase | 'plain'

/** The stores' clocks are an hour apart. */
function fleet(places: readonly [Place, Place]): Fleet {
  const [from, to] = [new Store(), new Store()]
  to.now -= HOUR
  const on =
    (place: Place) =>
    (by: unknown): StorePort =>
      place === 'plain' ? from.wire(by) : migrating(from.wire(by), to.wire(by), place)
  const after = PHASES.slice(
    Math.max(...places.map((place) => (place === 'plain' ? -1 : PHASES.indexOf(place)))) + 1,
  )
  return { stores: [from, to], wires: places.map(on), later: after.map(on), mayLeaveClaims: true }
}

const seed = Number(process.env['SEED'] ?? 20_261_122)
const scripts = (deadly: boolean) => fc.array(steps(deadly), { minLength: 5, maxLength: 60, size: 'max' })

async function explored(places: readonly [Place, Place], deadly: boolean, runs: number) {
  const one = async (script: readonly Step[]) => play(route({ profile: 'standard' }), script, fleet(places))
  return fc.check(fc.asyncProperty(scripts(deadly), one), { numRuns: runs, seed })
}

const NEIGHBOURS: readonly (readonly [Place, Place])[] = [
  ['plain', 'mirror'],
  ['plain', 'both'],
  ['mirror', 'mirror'],
  ['mirror', 'both'],
  ['both', 'both'],
  ['both', 'new'],
  ['new', 'new'],
]
for (const places of NEIGHBOURS)
  for (const deadly of [false, true])
    void t.test(
      `W09 ${places.join(' beside ')}: any interleaving${deadly ? ' in which one replica dies' : ''} executes at most once, even in the phases that follow`,
      async (t) => {
        const { failed, errorInstance, counterexample } = await explored(places, deadly, RUNS)
        t.notOk(failed, `${String(errorInstance)} ${JSON.stringify(counterexample)}`)
      },
    )

for (const places of [
  ['mirror', 'new'],
  ['plain', 'new'],
] as const)
  void t.test(`W09 ${places.join(' beside ')} can execute twice`, async (t) => {
    const { errorInstance } = await explored(places, false, 20 * RUNS)
    t.match(String(errorInstance), /executed 2 times/)
  })
