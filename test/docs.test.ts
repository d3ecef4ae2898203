import { existsSync, readdirSync, readFileSync, statSync } from 'node:fs'
import { dirname, join } from 'node:path'
import t from 'tap'
import { type Document, parseAllDocuments } from 'yaml'
import { GENERATED, notLive, withTables } from '../scripts/docs.ts'
import { SHADOW_FIGURES } from '../src/admin/shadow-tally.ts'
import { profileDefaults } from '../src/config/load.ts'
import { formatDuration } from '../src/config/units.ts'
import { classify } from '../src/core/classify.ts'
import { ALWAYS_DIFFERENT } from '../src/core/fingerprint.ts'
import { REFUSALS } from '../src/core/refusal.ts'
import { RPC_CODES, type RpcCode } from '../src/core/rpc/codes.ts'
import { rpcAction } from '../src/core/rpc/status.ts'
import { rpcCodeFor } from '../src/http/rpc-answers.ts'
import { METRICS } from '../src/observe/metrics.ts'
import { FILES, load } from './config/support.ts'

const ROOT = join(import.meta.dirname, '..')

function read(path: string): string {
  return readFileSync(join(ROOT, path), 'utf8')
}

/** The rows of a Markdown file's tables, cells without backticks. */
function rows(file: string): string[][] {
  return read(file)
    .split('\n')
    .filter((line) => line.startsWith('| `'))
    .map((line) =>
      line
        .slice(1, -1)
        .split('|')
        .map((cell) => cell.trim().replaceAll('`', '')),
    )
}

void t.test('docs/errors.md lists every refusal of the proxy with status and advice, in order', async (t) => {
  const told = rows('docs/errors.md').map(([code, status, retry]) => [code, Number(status), retry])
  const known = Object.entries(REFUSALS).map(([code, { status, retry }]) => [code, status, retry])
  t.same(told, known)
})

void t.test('docs/guides/grpc.md says the code of every refusal', async (t) => {
  const told = rows('docs/guides/grpc.md').flatMap(([codes = '', code]) =>
    codes.split(', ').map((refused) => [refused, code]),
  )
  const known = Object.entries(REFUSALS).map(([code, { status }]) => [
    code,
    rpcCodeFor({ code: code as keyof typeof REFUSALS, status }),
  ])
  t.same(new Map(told as [string, string][]), new Map(known as [string, string][]))
  t.equal(told.length, known.length)
})

void t.test('docs/shadow.md says what is not compared, and names every figure', async (t) => {
  const text = read('docs/shadow.md').toLowerCase()
  for (const name of ALWAYS_DIFFERENT) t.ok(text.includes(`\`${name}\``), name)
  for (const name of SHADOW_FIGURES) t.ok(text.includes(` ${name.toLowerCase()}`), name)
})

void t.test('the index of the decisions lists every page under its title', async (t) => {
  const folder = new URL('../docs/adr/', import.meta.url)
  const index = readFileSync(new URL('README.md', folder), 'utf8')
  const listed = [...index.matchAll(/^- \[(\d+)\]\((\S+)\) (.+)$/gm)]
  for (const [, number, file = '', title] of listed)
    t.equal(readFileSync(new URL(file, folder), 'utf8').split('\n', 1)[0], `# ${number}. ${title}`)
  const pages = readdirSync(folder).filter((file) => file !== 'README.md')
  t.same(listed.map(([, , file = '']) => file).toSorted(), pages.toSorted())
})

void t.test('configuration, metrics, verdicts and results are listed as the code has them', async (t) => {
  for (const page of GENERATED) {
    const text = readFileSync(page, 'utf8')
    t.match(text, /^<!-- table: /m, page.pathname)
    t.equal(text, withTables(text), 'run: node scripts/docs.ts')
  }
})

void t.test('docs/reload.md names every property whose change is not live', async (t) => {
  const told = rows('docs/reload.md').flatMap(([properties = '', effect]) =>
    effect === 'restart' || effect === 'identifies' ? properties.split(', ').map((one) => [one, effect]) : [],
  )
  const known = notLive()
  t.same(Object.fromEntries(told), Object.fromEntries(known))
  t.equal(told.length, known.length)
})

void t.test('docs/profiles.md says what every profile decides', async (t) => {
  const told = rows('docs/profiles.md').flatMap(([what = '', ...cells]) =>
    what.split(', ').map((one) => [one, ...cells]),
  )
  for (const [i, profile] of (['standard', 'strict', 'lenient', 'stripe'] as const).entries()) {
    const { tombstone, ...rest } = profileDefaults(profile)
    const settings: Record<string, unknown> = {
      ...rest,
      'scope.anonymous': rest.scope.anonymous,
      'key.minLength': rest.key.minLength,
      'misuse.status': rest.misuse.status,
      tombstone: tombstone === 0 ? 'off' : formatDuration(tombstone),
    }
    for (const [what = '', ...cells] of told) {
      const status = Number(/^\d+/.exec(what.replace('xx', '99'))?.[0])
      const known = RPC_CODES.includes(what as RpcCode)
        ? rpcAction(profile, what as RpcCode)
        : Number.isNaN(status)
          ? String(settings[what])
          : classify({ profile, outcomes: [] }, status, what.includes('Retry-After'))
      t.equal(cells[i], known, `${profile}: ${what}`)
    }
  }
  t.equal(told.length, 32 + RPC_CODES.length)
})

void t.test('docs/ARCHITECTURE.md names every folder of src, and only files that exist', async (t) => {
  const source = new URL('../src/', import.meta.url)
  const page = read('docs/ARCHITECTURE.md')
  const named = page.matchAll(/(?<![\w/.])(?:src\/)?([a-z][a-z0-9/-]*\.ts)\b/g)
  const files = [...named].map(([, file]) => file as string)
  t.ok(files.length > 20, `${files.length} files`)
  for (const file of files)
    t.ok(existsSync(new URL(/^(?:scripts|test)\//.test(file) ? `../${file}` : file, source)), file)
  const folders = readdirSync(source, { withFileTypes: true }).filter((entry) => entry.isDirectory())
  for (const { name } of folders) t.match(page, `\`${name}/\``)
})

/** Every document of the repository, from its root. */
const DOCUMENTS = [
  ...readdirSync(ROOT).filter((name) => name.endsWith('.md')),
  ...['docs', 'examples', 'helm'].flatMap((folder) =>
    readdirSync(join(ROOT, folder), { recursive: true, encoding: 'utf8' })
      .filter((name) => name.endsWith('.md'))
      .map((name) => `${folder}/${name}`),
  ),
]
const GUIDES = DOCUMENTS.filter((file) => file.startsWith('docs/guides/'))

/** The anchor of a heading, as GitHub makes it. */
function anchorOf(heading: string): string {
  return heading
    .toLowerCase()
    .replaceAll(/[^\p{L}\p{N} _-]/gu, '')
    .replaceAll(' ', '-')
}

function anchorsIn(file: string): Set<string> {
  const text = read(file).replaceAll(/^```.*?^```/gms, '')
  return new Set([...text.matchAll(/^#+ (.*)$/gm)].map(([, heading = '']) => anchorOf(heading)))
}

void t.test('every link between documents resolves', async (t) => {
  t.ok(GUIDES.length >= 11, `${GUIDES.length} guides`)
  let seen = 0
  for (const file of DOCUMENTS)
    for (const [, target = ''] of read(file).matchAll(/\]\(([^)\s]+)\)/g)) {
      if (/^(https?:|mailto:)/.test(target)) continue
      seen++
      const [path = '', anchor] = target.split('#')
      const to = path === '' ? file : join(dirname(file), path)
      if (!existsSync(join(ROOT, to))) t.fail(`${file}: ${target} is not there`)
      else if (anchor !== undefined && statSync(join(ROOT, to)).isFile())
        t.ok(anchorsIn(to).has(anchor), `${file}: ${target}`)
    }
  t.ok(seen > 100, `${seen} links`)
})

void t.test('every guide is in the list of guides', async (t) => {
  const list = read('docs/guides/README.md')
  for (const file of GUIDES) {
    const name = file.slice('docs/guides/'.length)
    if (name !== 'README.md') t.ok(list.includes(`](${name})`), name)
  }
  t.match(read('README.md'), 'docs/guides/README.md')
})

void t.test('every document is in docs/README.md, and the README leads there', async (t) => {
  const index = read('docs/README.md')
  for (const file of DOCUMENTS) {
    const [, name = 'README.md'] = /^docs\/((?:internals\/)?[^/]+\.md)$/.exec(file) ?? []
    if (!name.endsWith('README.md')) t.ok(index.includes(`](${name})`), file)
  }
  for (const link of ['docs/README.md', 'docs/adr/README.md'])
    t.ok(read('README.md').includes(`](${link})`), link)
})

void t.test('the configurations that documents show are accepted', async (t) => {
  const env = { ISSUER_SECRET_FILE: `${FILES}/signing-secret` }
  const flags = { upstream: 'http://127.0.0.1:3000' }
  let seen = 0
  for (const file of ['README.md', 'docs/keys.md', 'docs/duplicates.md', 'docs/reconciliation.md', ...GUIDES])
    for (const [, yaml = ''] of read(file).matchAll(/```yaml\n(.*?)```/gs)) {
      const isWhole = /^upstream:/m.test(yaml)
      if (file.startsWith('docs/guides/') && !isWhole) continue
      seen++
      t.doesNotThrow(() => load(yaml, { file, env, flags: isWhole ? {} : flags }), file)
    }
  t.ok(seen >= 14, `${seen} configurations`)
})

void t.test('YAML in guides parses, templates aside', async (t) => {
  for (const file of GUIDES)
    for (const [, yaml = ''] of read(file).matchAll(/```yaml\n(.*?)```/gs)) {
      if (yaml.includes('{{')) continue
      for (const document of parseAllDocuments(yaml) as Document[])
        t.strictSame(document.errors, [], `${file}: ${yaml.split('\n')[0]}`)
    }
})

void t.test('the commands that documents name exist, with their flags', async (t) => {
  const reference = read('docs/cli.md')
  const help = new Map(
    [...reference.matchAll(/^## `([a-z]+)`$.*?```text\n(.*?)```/gms)].map(([, name = '', text = '']) => [
      name,
      text,
    ]),
  )
  t.ok(help.size >= 9, [...help.keys()].join(' '))
  let seen = 0
  for (const file of [
    ...GUIDES,
    'README.md',
    'SECURITY.md',
    'CONTRIBUTING.md',
    'docs/clients.md',
    'docs/operations.md',
  ])
    for (const [, block = ''] of read(file).matchAll(/```(?:sh|console)\n(.*?)```/gs))
      for (const line of block.replaceAll('\\\n', ' ').split('\n')) {
        const [, args] =
          /(?:\bidempotency-proxy|npm start(?: --silent)? --|cli\.js) +([^#|&>]*)/.exec(line) ?? []
        if (args === undefined || line.includes('npm install') || line.includes('docker')) continue
        seen++
        const [first = ''] = args.trim().split(/\s+/)
        const command = /^[a-z]+$/.test(first) ? first : 'serve'
        const usage = help.get(command)
        t.ok(usage, `${file}: ${line}`)
        for (const [flag] of args.matchAll(/--[a-z][a-z-]*/g))
          t.ok(usage?.includes(flag), `${file}: ${command} ${flag}`)
      }
  t.ok(seen >= 8, `${seen} commands`)
})

void t.test('the metrics and codes that guides name exist', async (t) => {
  const known = new Set([...Object.keys(METRICS), ...Object.keys(REFUSALS)])
  for (const file of GUIDES)
    for (const [name] of read(file).matchAll(/\bidempotency_[a-z_]+/g)) {
      // The zone and the cluster of the nginx and Envoy examples; a form field.
      if (name === 'idempotency_proxy' || name === 'idempotency_key') continue
      t.ok(known.has(name), `${file}: ${name}`)
    }
})

/** What each row of docs/guides/not-promised.md means in a configuration. */
const GIVEN_UP: Readonly<Record<string, readonly string[]>> = {
  '`mode: off`, `mode: shadow`': ['mode: off', 'mode: shadow'],
  '`profile: lenient`': ['profile: lenient'],
  '`onLeaseExpired: retry`': ['onLeaseExpired: retry'],
  '`onResponseLost: retry`': ['onResponseLost: retry'],
  '`onStoreUnavailable: bypass`': ['onStoreUnavailable: bypass'],
  'an outcome set to `release`': ['outcomes: { "500": release }'],
  '`key.derive` with `bucket`': ['key: { presence: required, derive: { json: [/id], bucket: 1h } }'],
  '`anonymous: share`': ['scope: { caller: "header:x-user", anonymous: share }'],
  '`reconcile` by `{key}` alone, `identity: none`': [
    'reconcile: { request: { path: "/p?k={key}" }, identity: { /k: "{key}" }, completed: { status: 200 } }',
    'reconcile: { request: { path: "/p?k={record}" }, identity: none, completed: { status: 200 } }',
  ],
  '`reconcile.after` below `upstream.timeout`': [
    'key: { forwardFence: true }\n    reconcile: { request: { path: "/p?k={record}" }, identity: { /k: "{record}" }, completed: { status: 200 }, notFound: { status: 404 }, after: 1s }',
  ],
}

void t.test('every setting that gives the promise up is documented, and warned of at start', async (t) => {
  const document = read('docs/guides/not-promised.md')
  const start = document.indexOf('## By what you configured')
  const table = document.slice(start, document.indexOf('## By time'))
  const rows = [...table.matchAll(/^\| (.*?) \| .* \|$/gm)].map(([, setting]) => setting as string).slice(1)
  t.strictSame(rows, Object.keys(GIVEN_UP))
  const warnings = (route: string): readonly string[] => {
    const scope = route.includes('scope:')
      ? ''
      : '    scope: { caller: "header:authorization", anonymous: reject }\n'
    const text = `upstream: { url: "http://127.0.0.1:3000" }
unmatched: reject
routes:
  - name: pay
    match: { path: /pay }
${scope}    ${route}
`
    return load(text).warnings
  }
  t.strictSame(warnings('ttl: 24h'), [], 'nothing is given up by default')
  for (const route of Object.values(GIVEN_UP).flat()) t.ok(warnings(route).length > 0, route)
})

void t.test('the tests that the threat model names exist', async (t) => {
  const all = readdirSync(new URL('.', import.meta.url), { recursive: true, encoding: 'utf8' })
  let seen = 0
  for (const row of read('SECURITY.md').matchAll(/^\| [^|]* \| [^|]* \| ([^|]*) \|/gm))
    for (const [, name = ''] of (row[1] ?? '').matchAll(/`([a-z0-9/*-]+)`/g)) {
      seen++
      const beginning = name.replace(/\*$/, '')
      t.ok(
        all.some((file) =>
          beginning.endsWith('/') || name.endsWith('*')
            ? file.startsWith(beginning)
            : file === `${name}.test.ts` || file === `${name}.verify.ts`,
        ),
        name,
      )
    }
  t.ok(seen >= 30, `${seen} tests`)
})
