import { existsSync, readdirSync, readFileSync, statSync } from 'node:fs'
import { dirname, join } from 'node:path'
import t from 'tap'
import { type Document, parseAllDocuments } from 'yaml'
import { formatConfigError, loadConfig } from '../src/config/load.ts'
import { REFUSALS } from '../src/core/refusal.ts'
import { METRICS } from '../src/observe/metrics.ts'

const ROOT = join(import.meta.dirname, '..')

function read(path: string): string {
  return readFileSync(join(ROOT, path), 'utf8')
}

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

void t.test('every document is in docs/README.md, and every decision in docs/adr/README.md', async (t) => {
  const index = read('docs/README.md')
  const decisions = read('docs/adr/README.md')
  for (const file of DOCUMENTS) {
    const [, folder = '', name = ''] =
      /^docs\/(?:(adr|guides|internals|runbooks)\/)?([^/]+\.md)$/.exec(file) ?? []
    if (name === '' || name === 'README.md') continue
    if (folder === '' || folder === 'internals')
      t.ok(index.includes(`](${folder === '' ? '' : `${folder}/`}${name})`), file)
    if (folder === 'adr')
      t.match(
        decisions,
        new RegExp(`^\\| \\[${Number(name.slice(0, 4))}\\]\\(${name}\\) \\| .+ \\| .+ \\|$`, 'm'),
        file,
      )
  }
  const start = read('README.md')
  for (const link of ['docs/README.md', 'docs/adr/README.md']) t.ok(start.includes(`](${link})`), link)
})

void t.test('complete configurations in guides are accepted', async (t) => {
  let seen = 0
  for (const file of GUIDES)
    for (const [, yaml = ''] of read(file).matchAll(/```yaml\n(.*?)```/gs)) {
      if (!/^upstream:/m.test(yaml)) continue
      seen++
      const loaded = loadConfig({ file, text: yaml, env: {}, flags: {} })
      t.ok(loaded.ok, loaded.ok ? file : loaded.errors.map(formatConfigError).join('\n'))
    }
  t.ok(seen >= 2, `${seen} configurations`)
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
  for (const file of [...GUIDES, 'README.md', 'SECURITY.md', 'CONTRIBUTING.md', 'docs/operations.md'])
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
    const loaded = loadConfig({ file: 'row.yaml', text, env: {}, flags: {} })
    if (!loaded.ok) throw new Error(loaded.errors.map(formatConfigError).join('\n'))
    return loaded.config.warnings
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
