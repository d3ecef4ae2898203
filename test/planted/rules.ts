import { FUZZED, PLANTS, type Plant } from '../simulation/plants.ts'

/** Rules of the product at its edges, each broken by one edit. Those of the protocol are in test/simulation/plants.ts. */
// biome-ignore format: a table
const EDGES: readonly Plant[] = [
  { name: 'two lines of the key header are accepted', file: 'src/core/key.ts',
    from: 'if (lines.length > 1) return invalid(`${lines.length}',
    to: 'if (lines.length > 9) return invalid(`${lines.length}' },
  { name: 'a key may be one character too long', file: 'src/core/key.ts',
    from: 'if (length > policy.maxLength)',
    to: 'if (length > policy.maxLength + 1)' },
  { name: 'the query is not compared', file: 'src/core/fingerprint.ts',
    from: 'include: (query) => query,',
    to: "include: () => ''," },
  { name: 'misuse advises the same key', file: 'src/core/refusal.ts',
    from: "title: 'Idempotency key was used for another request',\n    retry: 'new-key'",
    to: "title: 'Idempotency key was used for another request',\n    retry: 'same-key'" },
  { name: 'misuse is counted as a request in progress', file: 'src/protect/answers.ts',
    from: "return refuse('misuse', ",
    to: "return refuse('in_progress', " },
  { name: 'Retry-After is rounded up', file: 'src/core/decide.ts',
    from: 'Math.max(1, Math.floor(remaining / 1000))',
    to: 'Math.max(1, Math.ceil(remaining / 1000))' },
  { name: '429 is kept and replayed', file: 'src/core/settle.ts',
    from: ' 428, 429, 431]',
    to: ' 428, 431]' },
  { name: 'an upstream may say that its answer is a replay', file: 'src/core/headers.ts',
    from: "return name === 'idempotent-replayed'",
    to: 'return false' },
  { name: 'credentials for the proxy are forwarded', file: 'src/core/headers.ts',
    from: "  'proxy-authorization',\n",
    to: '' },
  { name: "a client's fence is forwarded", file: 'src/http/headers.ts',
    from: "  'expect',\n  ...Object.values(REQUEST_HEADER).map((name) => name.toLowerCase()),\n",
    to: "  'expect',\n" },
  { name: 'a request that comes round again is served', file: 'src/http/server.ts',
    from: 'if (isLoop(request.rawHeaders, loop)) {',
    to: 'if (isLoop(request.rawHeaders, loop) && request.method === null) {' },
  { name: 'a body may be larger than limits.request', file: 'src/http/protected.ts',
    from: 'const limit = this.route.limits.request\n    return',
    to: 'const limit = Number.MAX_SAFE_INTEGER\n    return' },
  { name: 'any bearer token opens the admin API', file: 'src/http/admin-app.ts',
    from: 'timingSafeEqual(digest(given), digest(token))',
    to: "given !== '' && timingSafeEqual(digest(token), digest(token))" },
  { name: 'an unknown property is ignored', file: 'src/config/read.ts',
    from: 'findings.add(within(name), unknownProperty(row, name, path), placeOf(source, key))\n',
    to: '\n' },
]

/** Of the protocol's plants, those that change what a client or an operator of one store would see. */
const PROTOCOL = new Set([
  'an outcome is written whoever owns the record',
  'the lease is the expiry',
  'a takeover ignores the state',
  'a takeover keeps the fence',
  'a broken exchange frees the key',
  'a completed record takes another outcome',
  'the payload is not compared',
  'a waiter takes what the last one was told',
  'a sweep frees what fell silent',
  'a claim whose reply was lost is sent all the same',
  'an outcome that the store did not take is dropped',
  'not found is believed at once',
  'the answer leaves before its outcome is written',
  'the caller is not part of the record',
  'claims are not written again after a failover',
  'a record is read in whatever state it is',
])

/** The thirty rules that `npm run --silent rules` breaks, one at a time. */
export const RULES: readonly Plant[] = [
  ...EDGES,
  ...[...PLANTS, ...FUZZED].filter(({ name }) => PROTOCOL.has(name)),
]
