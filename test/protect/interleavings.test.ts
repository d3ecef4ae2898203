import fc from 'fast-check'
import t from 'tap'
import { RUNS, route } from './harness.ts'
import { play, steps } from './playing.ts'

// Thousands of runs (INTERLEAVINGS=1500 SEED=…) take longer than tap's default timeout.
t.setTimeout(600_000)

for (const profile of ['standard', 'strict', 'stripe', 'lenient'] as const)
  for (const deadly of [false, true]) {
    const what = `any interleaving of two replicas${deadly ? ', one of which dies' : ''}, a faulty store and lapsing leases`
    const holds = profile === 'lenient' ? 'wedges no key and leaks nothing' : 'executes at most once'
    void t.test(`X06 ${profile}: ${what} ${holds}`, async (t) => {
      const policy = route({ profile })
      const scripts = fc.array(steps(deadly), { minLength: 5, maxLength: 60, size: 'max' })
      const seed = Number(process.env['SEED'] ?? 20_261_121)
      await fc.assert(
        fc.asyncProperty(scripts, (script) => play(policy, script)),
        { numRuns: RUNS, seed },
      )
      t.pass(`${RUNS} runs`)
    })
  }
