import { spawnSync } from 'node:child_process'
import { cpSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { parse, parseAllDocuments } from 'yaml'
import type { HelmTools } from '../../scripts/helm-tools.ts'

export const HELM_FOLDER = join(import.meta.dirname, '../../helm')

/** Folders of the installable charts, below helm/. */
export const CHARTS = ['idempotency-proxy', 'idempotency-proxy-observability', 'examples/payments'] as const
export type Chart = (typeof CHARTS)[number]

/** The names of its ci/<name>-values.yaml. */
export function scenarios(chart: Chart): string[] {
  return readdirSync(join(HELM_FOLDER, chart, 'ci')).map((file) => file.replace(/-values\.yaml$/, ''))
}

export function scenarioFile(chart: Chart, scenario: string): string {
  return join(HELM_FOLDER, chart, 'ci', `${scenario}-values.yaml`)
}

// biome-ignore format: manifests may hold anything; the tests look inside.
export type Manifest = { readonly kind: string; readonly apiVersion: string; readonly metadata: Meta; readonly [key: string]: any }
interface Meta {
  readonly name: string
  readonly namespace?: string
  readonly labels?: Readonly<Record<string, string>>
  readonly annotations?: Readonly<Record<string, string>>
}

export interface Said {
  readonly ok: boolean
  readonly out: string
  readonly err: string
}

/** Helm with its own copy of the charts and their dependencies, in a folder that `dispose` removes. */
export class Charts implements Disposable {
  readonly #helm: string
  readonly #folder = mkdtempSync(join(tmpdir(), 'charts-'))

  constructor(helm: string) {
    this.#helm = helm
    cpSync(HELM_FOLDER, join(this.#folder, 'helm'), { recursive: true })
    for (const chart of CHARTS) {
      // Dependencies built in the checkout may be out of date.
      for (const made of ['charts', 'Chart.lock'])
        rmSync(join(this.path(chart), made), { recursive: true, force: true })
      const { ok, err } = this.run('dependency', 'build', this.path(chart))
      if (!ok) throw new Error(err)
    }
  }

  path(chart: string): string {
    return join(this.#folder, 'helm', chart)
  }

  /** A file of the chart that is not in the repository. */
  add(chart: Chart, file: string, text: string): void {
    const path = join(this.path(chart), file)
    mkdirSync(join(path, '..'), { recursive: true })
    writeFileSync(path, text)
  }

  run(...args: readonly string[]): Said {
    // Neither the user's Helm settings nor what tap adds for child processes.
    const home = Object.fromEntries(
      ['CACHE', 'CONFIG', 'DATA'].map((name) => [`HELM_${name}_HOME`, join(this.#folder, name)]),
    )
    return spoken(this.#helm, args, { ...home, KUBECONFIG: join(this.#folder, 'none') })
  }

  lint(chart: Chart, values: string): Said {
    return this.run('lint', '--strict', '-f', values, this.path(chart))
  }

  render(chart: Chart, ...args: readonly string[]): Manifest[] {
    const { ok, out, err } = this.run('template', 'shop', this.path(chart), '--namespace', 'shop', ...args)
    if (!ok) throw new Error(err)
    return manifests(out)
  }

  notes(chart: Chart, ...args: readonly string[]): string {
    const { ok, out, err } = this.run(
      'install',
      'shop',
      this.path(chart),
      '--namespace',
      'shop',
      '--dry-run=client',
      ...args,
    )
    if (!ok) throw new Error(err)
    return out.slice(out.indexOf('NOTES:'))
  }

  [Symbol.dispose](): void {
    rmSync(this.#folder, { recursive: true, force: true })
  }
}

export function kustomized(tools: HelmTools, folder: string): Manifest[] {
  const { ok, out, err } = spoken(tools.kubectl, ['kustomize', folder], {})
  if (!ok) throw new Error(err)
  return manifests(out)
}

/** The documents of a YAML stream. Anything but valid YAML 1.2, such as a duplicate key, is an error. */
export function manifests(text: string): Manifest[] {
  const documents = parseAllDocuments(text)
  return documents.flatMap((document) => {
    if (document.errors.length > 0) throw document.errors[0]
    const value = document.toJS() as Manifest | null
    return value === null ? [] : [value]
  })
}

export function valuesOf(chart: string): Record<string, unknown> {
  return parse(readFileSync(join(HELM_FOLDER, chart, 'values.yaml'), 'utf8')) as Record<string, unknown>
}

/** Each object by its kind and name, for `typeErrors`. */
export const named = (objects: readonly Manifest[]): (readonly [string, Manifest])[] =>
  objects.map((one) => [`${one.kind} ${one.metadata.name}`, one])

/**
 * Compiler errors for objects that do not match the published types of Kubernetes and the Prometheus operator: unknown or missing fields,
 * wrong enum values.
 */
export function typeErrors(tools: HelmTools, objects: readonly (readonly [string, Manifest])[]): string {
  const folder = mkdtempSync(join(tools.models, 'objects-'))
  try {
    const lines = objects.map(([name, { apiVersion, kind }], n) => {
      const from = apiVersion.startsWith('monitoring.coreos.com/')
        ? `@kubernetes-models/prometheus-operator/${apiVersion}/${kind}`
        : `kubernetes-models/${apiVersion}/${kind}`
      const text = JSON.stringify(objects[n]?.[1], null, 1)
      return `// ${name}\nimport type { I${kind} as T${n} } from '${from}'\nexport const o${n}: T${n} = ${text}\n`
    })
    writeFileSync(join(folder, 'objects.ts'), lines.join(''))
    const options = {
      strict: true,
      noEmit: true,
      skipLibCheck: true,
      module: 'nodenext',
      target: 'es2024',
      types: [],
    }
    writeFileSync(
      join(folder, 'tsconfig.json'),
      JSON.stringify({ compilerOptions: options, files: ['objects.ts'] }),
    )
    const tsc = join(import.meta.dirname, '../../node_modules/.bin/tsc')
    const { ok, out, err } = spoken(tsc, ['-p', folder, '--pretty', 'false'], {})
    return ok ? '' : `${out}${err}`
  } finally {
    rmSync(folder, { recursive: true, force: true })
  }
}

function spoken(command: string, args: readonly string[], more: Readonly<Record<string, string>>): Said {
  const env = { ...process.env, NODE_V8_COVERAGE: '', ...more }
  const { status, error, stdout, stderr } = spawnSync('env', ['-u', 'NODE_OPTIONS', command, ...args], {
    env,
    encoding: 'utf8',
    maxBuffer: 64 * 1024 ** 2,
    timeout: 120_000,
  })
  return { ok: status === 0, out: stdout ?? '', err: stderr || (error?.message ?? '') }
}
