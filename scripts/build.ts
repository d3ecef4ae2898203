/**
 * `npm run build`: bundles the program and its packages into a few files, split by what is loaded together (docs/adr/0074).
 * THIRD-PARTY.txt names the bundled packages and their licences.
 */
import { cpSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { rolldown } from 'rolldown'

export const ROOT = fileURLToPath(new URL('..', import.meta.url))

/**
 * CommonJS: an `import` of a Node module reads all of its exports, and so loads unused code. `node:http` alone would load the undici inside
 * Node: 13 MB and 40 ms.
 */
const FORMAT = 'cjs'

export async function build(into: string): Promise<void> {
  rmSync(into, { recursive: true, force: true })
  const bundle = await rolldown({
    cwd: ROOT,
    input: {
      cli: 'src/cli.ts',
      'store/sqlite/worker': 'src/store/sqlite/worker.ts',
      'workers/worker': 'src/workers/worker.ts',
      'core/key-pattern': 'src/core/key-pattern.ts',
      'core/rpc/descriptors': 'src/core/rpc/descriptors.ts',
    },
    platform: 'node',
    // The globals of these names are accessors, which V8 calls at each use: some forty times per protected request.
    transform: {
      inject: { Buffer: ['node:buffer', 'Buffer'], performance: ['node:perf_hooks', 'performance'] },
    },
    plugins: [
      { name: 'unused', resolveId: (name, from = '') => (isUnused(name, from) ? NOTHING : null), load },
    ],
    // The user's SDK registers with this very copy of the API; `debug` does without `supports-color`.
    external: ['@opentelemetry/api', 'supports-color'],
    onLog: (_level, { message }) => {
      throw new Error(message)
    },
  })
  const { output } = await bundle.write({
    dir: into,
    format: FORMAT,
    // Modules are always strict; this covers packages that do not say so themselves.
    strict: true,
    entryFileNames: '[name].js',
    // At the same depth as the modules in src, so that `../` resolves to the same files.
    chunkFileNames: 'chunks/[name]-[hash].js',
    comments: { legal: true, annotation: false, jsdoc: false },
  })
  await bundle.close()
  const chunks = output.filter((one) => one.type === 'chunk')
  for (const { fileName, code } of chunks) writeFileSync(join(into, fileName), ascii(code))
  const modules = chunks.flatMap(({ moduleIds }) => moduleIds)
  writeFileSync(join(into, 'THIRD-PARTY.txt'), thirdParty(modules))
  writeFileSync(join(into, 'package.json'), '{ "type": "commonjs" }\n')
  for (const folder of ['store/redis/lua', 'store/postgres/sql', 'admin/page'])
    cpSync(join(ROOT, 'src', folder), join(into, folder), { recursive: true })
}

/** Fastify loads these at once, and uses them for HTTP/2, TLS and schemas only: half of its code, and a third of a start. */
const UNUSED: ReadonlySet<string> = new Set([
  'node:http2',
  'node:https',
  '@fastify/ajv-compiler',
  '@fastify/fast-json-stringify-compiler',
])
const NOTHING = '\0nothing'

function isUnused(name: string, from: string): boolean {
  return UNUSED.has(name) && from.includes('/node_modules/fastify/')
}

function load(id: string): string | null {
  return id === NOTHING ? 'module.exports = {}' : null
}

/** With any other character, a source takes two bytes per character in V8. */
function ascii(code: string): string {
  return code.replace(/[^\0-\x7f]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`)
}

/** Lists the packages that these modules belong to, with their licences. */
function thirdParty(modules: readonly string[]): string {
  const folders = modules.map((id) => /^.*\/node_modules\/(?:@[^/]+\/)?[^/]+(?=\/)/.exec(id)?.[0])
  const parts = [...new Set(folders)]
    .filter((folder) => folder !== undefined)
    .map((folder) => {
      const { name, version, license } = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8')) as {
        readonly [member in 'name' | 'version' | 'license']: string
      }
      const texts = readdirSync(folder)
        .filter((file) => /^(licen[cs]e|copying|notice)/i.test(file))
        .map((file) => readFileSync(join(folder, file), 'utf8').trim())
      return [`${name}@${version} (${license})`, ...texts].join('\n\n')
    })
  return `${[...new Set(parts)].sort().join(`\n\n${'='.repeat(80)}\n`)}\n`
}

if (import.meta.main) await build(join(ROOT, 'dist'))
