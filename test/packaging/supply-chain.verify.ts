import { spawnSync } from 'node:child_process'
import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { build } from '../../scripts/build.ts'

t.setTimeout(120_000)

const ROOT = join(import.meta.dirname, '../..')

/** To ship these takes a copy of the licence, and nothing else. */
const PERMISSIVE = ['0BSD', 'Apache-2.0', 'BlueOak-1.0.0', 'BSD-2-Clause', 'BSD-3-Clause', 'ISC', 'MIT']

interface Locked {
  readonly version: string
  readonly license?: string
  readonly integrity?: string
  readonly dev?: true
  readonly hasInstallScript?: true
}

interface Component {
  readonly name: string
  readonly version: string
  readonly purl: string
  readonly hashes?: readonly { readonly alg: string }[]
  readonly licenses?: readonly { readonly license: { readonly id?: string } }[]
}

function read(path: string): string {
  return readFileSync(join(ROOT, path), 'utf8')
}

/** Path below the root → what is locked there, for everything that `npm ci --omit=dev` installs. */
const lock = JSON.parse(read('package-lock.json')) as { readonly packages: Record<string, Locked> }
const production = Object.entries(lock.packages).filter(([path, { dev }]) => path !== '' && dev !== true)

function nameOf(path: string): string {
  return path.slice(path.lastIndexOf('node_modules/') + 'node_modules/'.length)
}

const INSTALLED = [...new Set(production.map(([path, { version }]) => `${nameOf(path)}@${version}`))].sort()

function sbom(format: string): Record<string, unknown> {
  const { status, stdout, stderr } = spawnSync('npm', ['run', '--silent', 'sbom', '--', format], {
    cwd: ROOT,
    encoding: 'utf8',
    env: { ...process.env, NODE_OPTIONS: '' },
  })
  if (status !== 0) throw new Error(stderr)
  return JSON.parse(stdout) as Record<string, unknown>
}

void t.test('npm run sbom lists the production dependencies and nothing else (CycloneDX)', async (t) => {
  const { metadata, components } = sbom('cyclonedx') as unknown as {
    readonly metadata: { readonly component: Component }
    readonly components: readonly Component[]
  }
  const { name, version } = JSON.parse(read('package.json')) as { name: string; version: string }
  t.match(metadata.component, { name, version, purl: `pkg:npm/${name}@${version}` })
  t.strictSame(components.map(({ name, version }) => `${name}@${version}`).sort(), INSTALLED)
  for (const { name, hashes, licenses } of components) {
    t.strictSame(
      hashes?.map(({ alg }) => alg),
      ['SHA-512'],
      `${name} has its hash`,
    )
    t.ok(PERMISSIVE.includes(String(licenses?.[0]?.license.id)), `${name} has its licence`)
  }
})

void t.test('npm run sbom lists the same as SPDX', async (t) => {
  const { packages } = sbom('spdx') as { packages: readonly { name: string; versionInfo: string }[] }
  const [self, ...others] = packages.map(({ name, versionInfo }) => `${name}@${versionInfo}`)
  t.match(self, /^idempotency-proxy@/)
  t.strictSame([...new Set(others)].sort(), INSTALLED)
})

void t.test('every production dependency is under a permissive licence', async (t) => {
  t.ok(production.length > 50, `${production.length} packages`)
  for (const [path, { license }] of production)
    t.ok(PERMISSIVE.includes(String(license)), `${path}: ${license}`)
})

void t.test('the bundle has only production dependencies, and lists each with its licence', async (t) => {
  const into = t.testdir()
  await build(into)
  const [...parts] = readFileSync(join(into, 'THIRD-PARTY.txt'), 'utf8').split(`${'='.repeat(80)}\n`)
  t.ok(parts.length > 50, `${parts.length} packages`)
  for (const part of parts) {
    const [, bundled = '', license] = /^(\S+@\S+) \((.+)\)\n/.exec(part) ?? []
    t.ok(INSTALLED.includes(bundled), bundled)
    t.ok(PERMISSIVE.includes(String(license)), `${bundled}: ${license}`)
  }
  t.notMatch(parts.join(''), '@opentelemetry/api@', 'the user’s SDK has to find it')
  const files = readdirSync(into, { recursive: true, encoding: 'utf8' }).filter((file) =>
    file.endsWith('.js'),
  )
  for (const file of files)
    t.notMatch(readFileSync(join(into, file), 'utf8'), ROOT, `${file} names no folder of this machine`)
})

void t.test('no production dependency has a notice that must be passed on', async (t) => {
  const notices = production.flatMap(([path]) =>
    readdirSync(join(ROOT, path))
      .filter((file) => /^notice(\.|$)/i.test(file))
      .map((file) => `${path}/${file}`),
  )
  t.strictSame(notices, [], 'Apache-2.0 §4(d): put what these say into a NOTICE file')
})

void t.test('production dependencies are locked by hash, and none has an install script', async (t) => {
  for (const [path, { integrity, hasInstallScript }] of production) {
    t.match(integrity, /^sha512-/, path)
    t.notOk(hasInstallScript, `${path} has no install script`)
  }
})

void t.test('dependencies have exact versions, and the package is published with provenance', async (t) => {
  const { dependencies, devDependencies, publishConfig, files, license } = JSON.parse(
    read('package.json'),
  ) as {
    dependencies: Record<string, string>
    devDependencies: Record<string, string>
    publishConfig: object
    files: string[]
    license: string
  }
  for (const [name, range] of Object.entries({ ...dependencies, ...devDependencies }))
    t.match(range, /^\d+\.\d+\.\d+$/, `${name} ${range}`)
  t.strictSame(publishConfig, { access: 'public', provenance: true })
  for (const file of ['CHANGELOG.md', 'SECURITY.md', 'docs']) t.ok(files.includes(file), file)
  t.equal(license, 'Apache-2.0')
  t.match(read('LICENSE'), 'Apache License')
})

void t.test('the image has its labels, and one argument pins its bases', async (t) => {
  const dockerfile = read('Dockerfile')
  const proxy = dockerfile.slice(dockerfile.indexOf(' AS proxy'))
  const labels = [...proxy.matchAll(/org\.opencontainers\.image\.([a-z.]+)=/g)].map(([, name]) => name)
  for (const label of 'title description licenses version revision created source base.name'.split(' '))
    t.ok(labels.includes(label), label)
  const { version } = JSON.parse(read('package.json')) as { version: string }
  t.match(proxy, `ARG VERSION=${version}\n`)
  for (const [, image] of dockerfile.matchAll(/^FROM (\S+)/gm)) t.equal(image, '${NODE_IMAGE}')
  t.match(/^ARG NODE_IMAGE=(\S+)$/m.exec(dockerfile)?.[1], /^node:24-slim(@sha256:[0-9a-f]{64})?$/)
})

void t.test('the build context has what the Dockerfile copies, and nothing else', async (t) => {
  const copied = [...read('Dockerfile').matchAll(/^COPY (?!--from)(.+) \S+$/gm)].flatMap(([, from = '']) =>
    from.split(' '),
  )
  const sent = [...read('.dockerignore').matchAll(/^!(.+)$/gm)].map(([, path]) => path)
  t.same(new Set(sent), new Set(copied))
})
