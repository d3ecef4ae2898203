import { execFileSync } from 'node:child_process'
import { readdirSync, readFileSync } from 'node:fs'
import { dirname, join, relative, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import t from 'tap'
import { VERSION } from '../src/version.ts'

const ROOT = fileURLToPath(new URL('..', import.meta.url))
const SRC = join(ROOT, 'src')

interface Module {
  /** Below src/, as `core/record.ts`. */
  readonly path: string
  readonly text: string
  /** Other modules of src/, type-only ones too. */
  readonly own: readonly string[]
  /** Packages, and Node's modules with their `node:`. */
  readonly foreign: readonly string[]
}

const IMPORT =
  /^(?:import|export)\b[^'"`;]*?\bfrom\s*['"]([^'"]+)['"]|^import\s*['"]([^'"]+)['"]|\bimport\(\s*['"]([^'"]+)['"]/gm

function read(path: string): Module {
  const text = readFileSync(join(SRC, path), 'utf8')
  const named = [...text.matchAll(IMPORT)].map(
    ([, from, bare, dynamic]) => (from ?? bare ?? dynamic) as string,
  )
  const own = named
    .filter((name) => name.startsWith('.'))
    .map((name) => relative(SRC, resolve(SRC, dirname(path), name)))
  return { path, text, own, foreign: named.filter((name) => !name.startsWith('.')) }
}

const modules = readdirSync(SRC, { recursive: true, encoding: 'utf8' })
  .filter((path) => path.endsWith('.ts') && !path.endsWith('.d.ts'))
  .sort()
  .map(read)

function layerOf(path: string): string {
  return path.includes('/') ? path.slice(0, path.indexOf('/')) : path.replace(/\.ts$/, '')
}

/** The start and the end of a process. */
const STARTS = ['main', 'compose', 'drain', 'workers']

/** Ports and values that every module may import; main chooses the adapters behind them. */
const PORTS = new Set(['store/spool/outbox.ts', 'store/records.ts', 'store/register.ts', 'upstream/port.ts'])

/** What the modules of a layer may import from others, besides core and runtime: layers, or single modules. */
const ALLOWED: Readonly<Record<string, readonly string[]>> = {
  core: [],
  runtime: [],
  store: ['config/config.ts', 'config/urls.ts'],
  upstream: ['config/config.ts'],
  credentials: [],
  // What a key file may hold is known where it is used, and checked when the configuration is read.
  config: ['credentials/key-text.ts'],
  protect: [...PORTS],
  // Decides alongside traffic that it does not touch, by the steps of the guard.
  shadow: ['protect', ...PORTS],
  reconcile: ['protect/outcomes.ts', ...PORTS],
  admin: [
    'protect',
    ...PORTS,
    'config/config.ts',
    'config/units.ts',
    'config/written.ts',
    'observe/audit.ts',
    'observe/history.ts',
  ],
  // Descriptions for clients of the API and its developers.
  describe: ['config'],
  // A client of any API.
  probe: [],
  http: ['protect', 'shadow', 'admin', 'describe', 'upstream', 'config/config.ts', 'observe/metrics.ts'],
  observe: [
    'protect/request.ts',
    'protect/outcomes.ts',
    'reconcile/ports.ts',
    'reconcile/reconciler.ts',
    'store/around.ts',
    'store/register.ts',
    'store/grade.ts',
    'upstream/port.ts',
    'config/config.ts',
  ],
  // Compares the configuration that was read again with the one in force.
  reload: ['compose', 'config'],
  drain: ['compose', 'http', 'protect'],
  main: ['compose', 'drain', 'reload', 'http', 'config', 'observe', 'version'],
  compose: [
    'admin',
    'protect',
    'shadow',
    'reconcile',
    'http',
    'store',
    'upstream',
    'credentials',
    'config',
    'observe',
    'version',
  ],
  // One proxy in several processes.
  workers: ['main', 'compose', 'drain', 'reload', 'http', 'config', 'observe'],
  // From main only `serve`; the rest look from outside, `doctor` at the upstream too.
  commands: [
    'main',
    'workers',
    'admin',
    'protect/outcomes.ts',
    'describe',
    'probe',
    'store',
    'upstream',
    'reconcile/ask.ts',
    'config',
    'observe',
    'version',
  ],
  cli: ['commands'],
  version: [],
}

void t.test('the scan finds every import, and every file of src is imported or an entry point', async (t) => {
  t.ok(modules.length > 30, `${modules.length} modules`)
  const imports = modules.reduce((sum, { own }) => sum + own.length, 0)
  t.ok(imports > 100, `${imports} imports`)
  const paths = new Set(modules.map(({ path }) => path))
  for (const { path, own } of modules)
    for (const target of own) if (!paths.has(target)) t.fail(`${path} imports ${target}, which is not there`)
  const seen = new Set(['main.ts', 'cli.ts', 'store/sqlite/worker.ts', 'workers/worker.ts'])
  for (const { own } of modules) for (const target of own) seen.add(target)
  t.strictSame(
    [...paths].filter((path) => !seen.has(path)),
    [],
    'no module is unused',
  )
})

t.test('imports point one way: core ← store, upstream, config ← protect ← http ← main', async (t) => {
  const wrong = modules.flatMap(({ path, own }) => {
    const layer = layerOf(path)
    const allowed = ALLOWED[layer]
    if (allowed === undefined) return [`${path}: no such layer`]
    return own
      .filter((target) => ![layer, 'core', 'runtime'].includes(layerOf(target)))
      .filter((target) => !allowed.includes(target) && !allowed.includes(layerOf(target)))
      .map((target) => `${path} → ${target}`)
  })
  t.strictSame(wrong, [])
})

void t.test('core does no I/O, has no clock and no randomness', async (t) => {
  for (const { path, foreign, own, text } of modules.filter((module) => layerOf(module.path) === 'core')) {
    t.strictSame(
      own.filter((target) => layerOf(target) !== 'core'),
      [],
      `${path} imports core only`,
    )
    const pure = [
      'node:buffer',
      'node:crypto',
      'structured-headers',
      're2js',
      'protobufjs',
      'protobufjs/ext/descriptor.js',
    ]
    t.strictSame(
      foreign.filter((name) => !pure.includes(name)),
      [],
      `${path}: packages`,
    )
    t.notMatch(
      text,
      /Date\.now|new Date\(\)|performance\.|Math\.random|random(?:Bytes|UUID|Int)|process\.|setTimeout/,
      path,
    )
  }
})

void t.test('the guard knows ports, not adapters; nobody but main imports http', async (t) => {
  const protect = modules.filter(({ path }) => layerOf(path) === 'protect')
  t.ok(protect.length >= 5)
  for (const { path, own, foreign } of protect) {
    const beyond = own.filter(
      (target) => !['core', 'runtime', 'protect'].includes(layerOf(target)) && !PORTS.has(target),
    )
    t.strictSame(beyond, [], path)
    t.strictSame(foreign, [], `${path} needs no package and nothing of Node`)
  }
  for (const { path, own } of modules)
    if (![...STARTS, 'http'].includes(layerOf(path)))
      t.notOk(
        own.some((target) => layerOf(target) === 'http'),
        `${path} does not import http`,
      )
  const engineOf = (path: string) => /^store\/(redis|postgres|sqlite|dynamodb)\//.exec(path)?.[1]
  for (const { path, own } of modules)
    if (engineOf(path) !== undefined)
      t.strictSame(
        own.filter((target) => ![undefined, engineOf(path)].includes(engineOf(target))),
        [],
        `${path} imports no other engine`,
      )
  const users = (name: string) =>
    modules.filter(({ foreign }) => foreign.includes(name)).map(({ path }) => path)
  t.strictSame(
    users('node:sqlite').filter((path) => !path.startsWith('store/')),
    ['runtime/file-lock.ts'],
  )
  t.strictSame(
    users('fastify').filter((path) => !/^(?:admin|http)\//.test(path)),
    [],
  )
  t.strictSame(users('@opentelemetry/api'), ['observe/tracing.ts'])
  t.strictSame(
    users('jose').filter((path) => !path.startsWith('credentials/')),
    [],
  )
})

void t.test('only the command serve starts a proxy, and its workers', async (t) => {
  t.strictSame(
    modules.filter(({ own }) => own.includes('main.ts')).map(({ path }) => path),
    ['commands/serve.ts', 'workers/first.ts', 'workers/worker.ts'],
  )
})

void t.test('no import cycles, no barrels, no utils', async (t) => {
  const byPath = new Map(modules.map((module) => [module.path, module]))
  const done = new Set<string>()
  const visit = (path: string, trail: readonly string[]): void => {
    if (trail.includes(path)) t.fail(`a cycle: ${[...trail, path].join(' → ')}`)
    else if (!done.has(path))
      for (const target of byPath.get(path)?.own ?? []) visit(target, [...trail, path])
    done.add(path)
  }
  for (const { path } of modules) visit(path, [])
  t.equal(done.size, modules.length)
  for (const { path, text } of modules) {
    t.notMatch(path, /(^|\/)(index|utils?|helpers?)(\.ts|\/)/, path)
    const other = text
      .replace(/\/\*[\s\S]*?\*\/|\/\/.*$/gm, '')
      .replace(/^(?:export|import)\b[^;]*?\bfrom\s*['"][^'"]+['"];?$/gm, '')
    t.match(other, /\S/, `${path} is more than re-exports`)
  }
})

// A file is one idea. Longer ones rarely are; a lower limit made fragments of ideas.
void t.test('a source file has at most 700 lines', async (t) => {
  const long = modules.map(({ path, text }) => [path, text.trimEnd().split('\n').length] as const)
  t.strictSame(
    long.filter(([, lines]) => lines > 700),
    [],
  )
})

void t.test('src/version.ts has the version of package.json', async (t) => {
  t.equal(VERSION, JSON.parse(readFileSync(join(ROOT, 'package.json'), 'utf8')).version)
})

t.test('tracked files name no path of a machine and only the public registry', async (t) => {
  const git = (...args: string[]): string[] =>
    execFileSync('git', args, { cwd: ROOT, encoding: 'utf8' }).split('\0').filter(Boolean)
  const files = [...git('ls-files', '-z'), ...git('ls-files', '-z', '--others', '--exclude-standard')]
  t.ok(files.length > 100, `${files.length} files`)
  const own = 'test/architecture.test.ts'
  const folders = ['home', 'Users', 'root', 'work'].join('|')
  const machine = new RegExp(`(?:^|[\\s=(:,[])["'\`]?(?:/(?:${folders})/|[A-Z]:\\\\Users\\\\)`, 'm')
  for (const file of files.filter((name) => name !== own)) {
    let text: string
    try {
      text = readFileSync(join(ROOT, file), 'utf8')
    } catch {
      // Deleted in the working copy.
      continue
    }
    if (machine.test(text)) t.fail(`${file}: ${machine.exec(text)?.[0]}`)
    if (file.endsWith('package-lock.json') || file.endsWith('.npmrc'))
      for (const [, host] of text.matchAll(/https?:\/\/([^/"\s]+)[^"\s]*\.tgz/g))
        if (host !== 'registry.npmjs.org') t.fail(`${file}: ${host}`)
    if (/https?:\/\/[^/\s"']*(?:artifactory|nexus|verdaccio|registry\.(?!npmjs\.org))[^/\s"']*/i.test(text))
      t.fail(`${file} names another registry`)
  }
  t.ok(files.includes('package-lock.json'))
})

t.test('node:http is imported for its types only: it would add 25 ms to each start', async (t) => {
  const values = /^import (?!type )[^'"]*['"]node:http['"]/m
  t.ok(values.test("import { Server } from 'node:http'"))
  t.same(
    modules.filter(({ text }) => values.test(text)).map(({ path }) => path),
    [],
    "take it from process.getBuiltinModule('node:http')",
  )
})
