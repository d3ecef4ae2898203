import fc from 'fast-check'
import t from 'tap'
import { routeDiff } from '../../src/config/diff.ts'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { parseTarget, Router } from '../../src/core/route.ts'
import { route } from '../protect/harness.ts'

interface Routed {
  readonly routes: readonly RoutePolicy[]
  readonly defaults: RoutePolicy
  readonly unmatched: 'protect' | 'pass'
}

const segment = fc.constantFrom('a', 'b', ':x', ':y')
const path = fc
  .tuple(fc.array(segment, { maxLength: 3 }), fc.boolean(), fc.boolean())
  .map(([segments, rest, slash]) => `/${[...segments, ...(rest ? ['*'] : slash ? [''] : [])].join('/')}`)
const policies = fc.uniqueArray(
  fc.record({
    name: fc.constantFrom('r1', 'r2', 'r3', 'r4', 'r5'),
    path,
    exact: fc.boolean(),
    methods: fc.subarray(['POST', 'PUT', 'PATCH'], { minLength: 1 }),
  }),
  { selector: ({ name }) => name, maxLength: 4 },
)
const routed: fc.Arbitrary<Routed> = fc
  .record({ list: policies, unmatched: fc.constantFrom('protect', 'pass') })
  .map(({ list, unmatched }) => ({
    routes: list.map(({ name, ...match }) => route({ name, match })),
    defaults: route({ name: 'default', match: { methods: ['POST', 'PATCH'], path: '/*', exact: false } }),
    unmatched,
  }))

/** Paths as clients may write them, with every way to spell one. */
const SPELLINGS = ['a', 'b', 'c', '%61', '.', '..', '']
const TARGETS = [
  '/',
  '//',
  ...SPELLINGS.flatMap((one) => [
    `/${one}`,
    ...SPELLINGS.flatMap((other) => [`/${one}/${other}`, `/${one}/${other}/a`, `/a/${one}/${other}`]),
  ]),
]

/** The route that decides, as in the traffic server; null: none. */
function decider(
  router: Router,
  { defaults, unmatched }: Routed,
  method: string,
  target: string,
): RoutePolicy | null {
  const parsed = parseTarget(target)
  if (parsed === null) throw new Error(target)
  const found = router.match(method, parsed)
  return found ?? (unmatched === 'protect' && method !== 'PUT' ? defaults : null)
}

void t.test('every request that moves to another route is covered by the diff', async (t) => {
  let moved = 0
  fc.assert(
    fc.property(routed, routed, (before, after) => {
      const told = new Set(routeDiff(before, after).map(({ from, to }) => `${from?.name} ${to?.name}`))
      const [old, next] = [before, after].map(({ routes }) => new Router(routes)) as [Router, Router]
      for (const method of ['POST', 'PUT', 'PATCH'])
        for (const target of TARGETS) {
          const from = decider(old, before, method, target)?.name
          const to = decider(next, after, method, target)?.name
          if (from === to) continue
          moved++
          if (!told.has(`${from} ${to}`))
            throw new Error(`${method} ${target}: ${from} → ${to} is not in the diff`)
        }
    }),
    { numRuns: 2000 },
  )
  t.ok(moved > 10_000, `${moved} requests`)
})

void t.test('the diff of an unchanged configuration is empty', async (t) => {
  fc.assert(
    fc.property(routed, (one) => routeDiff(one, one).length === 0),
    { numRuns: 2000 },
  )
  t.pass()
})
