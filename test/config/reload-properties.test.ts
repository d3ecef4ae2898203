import fc from 'fast-check'
import t from 'tap'
import { type Config, namespaceOf } from '../../src/config/config.ts'
import { changesBetween } from '../../src/config/diff.ts'
import { loadConfig } from '../../src/config/load.ts'
import { recipeOf } from '../../src/core/fingerprint.ts'
import { differencesBetween, type Identification, identificationOf } from '../../src/core/identification.ts'
import { readCaller, recordId } from '../../src/core/identity.ts'
import { readKey } from '../../src/core/key.ts'
import { comparedPath, parseTarget, Router } from '../../src/core/route.ts'

/** What a route or `defaults` may say, each as YAML. */
const VALUES = {
  mode: ['enforce', 'shadow', 'off'],
  profile: ['standard', 'lenient', 'stripe'],
  ttl: ['24h', '48h'],
  key: [
    'required',
    'ignored',
    '{ from: ["header:x-key"] }',
    '{ from: ["header:x-key", "header:idempotency-key"] }',
    '{ minLength: 6 }',
    '{ syntax: strict }',
  ],
  scope: [
    '{ caller: none }',
    '{ path: route }',
    '{ path: none }',
    '{ caller: "header:x-caller" }',
    '{ anonymous: reject }',
  ],
  fingerprint: ['{ query: ignore }', '{ ignore: [/at] }'],
}
type Settings = Partial<Record<keyof typeof VALUES | 'case' | 'parameters', string>>
const setting = fc.oneof(
  ...Object.entries(VALUES).map(([name, values]) =>
    fc.constantFrom(...values).map((value): Settings => ({ [name]: value })),
  ),
)
const settings = fc.array(setting, { maxLength: 3 }).map((some): Settings => Object.assign({}, ...some))

interface Written {
  readonly routes: readonly {
    name: string
    path: string
    exact: boolean
    methods: string
    folding: Settings
    settings: Settings
  }[]
  readonly defaults: Settings
  readonly unmatched: string
}
const written: fc.Arbitrary<Written> = fc.record({
  routes: fc.uniqueArray(
    fc.record({
      name: fc.constantFrom('r1', 'r2', 'r3'),
      path: fc.constantFrom('/a', '/b', '/a/b', '/:x', '/a/*', '/*'),
      exact: fc.boolean(),
      methods: fc.constantFrom('[POST]', '[POST, PATCH]', '[PUT]'),
      folding: fc.constantFrom<Settings>({}, {}, { case: 'insensitive' }, { parameters: 'strip' }),
      settings,
    }),
    { selector: ({ name }) => name, maxLength: 3 },
  ),
  defaults: settings,
  unmatched: fc.constantFrom('protect', 'protect', 'pass'),
})
/** Two unrelated files, or two that differ in one setting, a missing route or the name of a route. */
const pair: fc.Arbitrary<[Written, Written]> = fc.oneof(
  fc.tuple(written, written),
  fc.tuple(written, setting, fc.nat(3)).map(([one, other, n]): [Written, Written] => [
    one,
    n < one.routes.length
      ? {
          ...one,
          routes: one.routes.map((route, at) =>
            at === n ? { ...route, settings: { ...route.settings, ...other } } : route,
          ),
        }
      : { ...one, defaults: { ...one.defaults, ...other } },
  ]),
  fc
    .tuple(written, fc.nat(2))
    .map(([one, n]): [Written, Written] => [one, { ...one, routes: one.routes.toSpliced(n, 1) }]),
  fc
    .tuple(written, fc.nat(2))
    .map(([one, n]): [Written, Written] => [
      one,
      { ...one, routes: one.routes.map((route, at) => (at === n ? { ...route, name: 'other' } : route)) },
    ]),
)

function yamlOf({ routes, defaults, unmatched }: Written): string {
  const flow = (entries: Readonly<Record<string, unknown>>): string =>
    `{ ${Object.entries(entries)
      .map(([name, value]) => `${name}: ${String(value)}`)
      .join(', ')} }`
  const list = routes.map(({ name, path, exact, methods, folding, settings: own }) =>
    flow({ name, match: flow({ path: `"${path}"`, exact, methods, ...folding }), ...own }),
  )
  return `upstream: { url: "http://127.0.0.1:1" }
unmatched: ${unmatched}
defaults: ${flow(defaults)}
routes: [${list.join(', ')}]`
}

function loaded(text: string): Config | null {
  const found = loadConfig({ text, env: {}, flags: {} })
  return found.ok ? found.config : null
}

/** The record and recipe that a request finds; 'refused' for a bad key or caller, null where nothing is protected. */
function finds(
  config: Config,
  router: Router,
  method: string,
  target: string,
  headers: readonly string[],
): string | null {
  const parsed = parseTarget(target)
  if (parsed === null) throw new Error(target)
  const found = router.match(method, parsed)
  const route = found ?? (config.unmatched === 'protect' && method !== 'PUT' ? config.defaults : null)
  if (route === null || route.mode === 'off' || route.key.presence === 'ignored') return null
  const key = readKey({ headers, query: parsed.query }, route.key, null)
  if (key.kind === 'missing') return null
  const caller = readCaller({ headers, certificate: null }, route.scope, null)
  if (key.kind === 'invalid' || caller.kind === 'missing') return 'refused'
  const path = comparedPath(route.match, parsed)
  const id = recordId(namespaceOf(config), route, caller.parts, method, path, key.key, key.qualifier, null)
  return `${id} ${recipeOf(route.fingerprint)}`
}

// biome-ignore format: a list
const TARGETS = [
  '/', '/a', '/A', '/a;v=1', '/b', '/c', '/a/', '/%61', '//a', '/a/b', '/a/B', '/a/c', '/a/../b', '/a/b/c',
]
const HEADERS = [
  ['Idempotency-Key', 'abc', 'Authorization', 'Bearer a'],
  ['Idempotency-Key', '"abcdefgh"', 'Authorization', 'Bearer a', 'X-Caller', 'b'],
  ['X-Key', 'abcdefgh', 'Authorization', 'Bearer a'],
  ['Idempotency-Key', 'abcdefgh'],
]

/** Runs of each property: RUNS=5000 node FILE. */
const numRuns = Number(process.env['RUNS'] ?? 300)

void t.test('O08 after a reload that is not refused, each request finds its record again', async (t) => {
  const seen = { taken: 0, refused: 0, requests: 0 }
  fc.assert(
    fc.property(pair, (both) => {
      const [one, other] = both.map(yamlOf) as [string, string]
      const [before, after] = [loaded(one), loaded(other)]
      fc.pre(before !== null && after !== null)
      if (changesBetween(before, after).some(({ effect }) => effect !== 'live')) {
        seen.refused++
        return
      }
      seen.taken++
      const [old, next] = [before, after].map((config) => new Router(config.routes)) as [Router, Router]
      for (const method of ['POST', 'PATCH', 'PUT'])
        for (const target of TARGETS)
          for (const headers of HEADERS) {
            const was = finds(before, old, method, target, headers)
            const now = finds(after, next, method, target, headers)
            seen.requests++
            // A refused request had no record, so it may be accepted now.
            if (was !== now && was !== 'refused')
              throw new Error(`${method} ${target} ${headers.join(' ')}: ${was} → ${now}\n${one}\n${other}`)
          }
    }),
    { numRuns },
  )
  t.ok(seen.taken > numRuns / 10 && seen.refused > numRuns / 10, JSON.stringify(seen))
})

t.test('Y20 configurations with one digest find the same records; a reload takes no others', async (t) => {
  const seen = { equal: 0, different: 0 }
  fc.assert(
    fc.property(pair, (both) => {
      const [one, other] = both.map(yamlOf) as [string, string]
      const [before, after] = [loaded(one), loaded(other)]
      fc.pre(before !== null && after !== null)
      const [own, theirs] = [before, after].map(identificationOf) as [Identification, Identification]
      const isLive = changesBetween(before, after).every(({ effect }) => effect === 'live')
      if (!own.digest.equals(theirs.digest)) {
        seen.different++
        if (isLive) throw new Error(`a reload takes it:\n${one}\n${other}`)
        if (differencesBetween(own.parts, theirs.parts).length === 0) throw new Error('unexplained')
        return
      }
      seen.equal++
      const [old, next] = [before, after].map((config) => new Router(config.routes)) as [Router, Router]
      for (const method of ['POST', 'PATCH', 'PUT'])
        for (const target of TARGETS)
          for (const headers of HEADERS) {
            const ids = [
              finds(before, old, method, target, headers),
              finds(after, next, method, target, headers),
            ]
            const [was, now] = ids.map((found) => found?.split(' ')[0])
            if (was !== now && was !== 'refused' && now !== 'refused')
              throw new Error(`${method} ${target} ${headers.join(' ')}: ${was} → ${now}\n${one}\n${other}`)
          }
    }),
    { numRuns },
  )
  t.ok(seen.equal > numRuns / 10 && seen.different > numRuns / 10, JSON.stringify(seen))
})
