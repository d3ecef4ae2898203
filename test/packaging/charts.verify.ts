import { spawnSync } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { parse } from 'yaml'
import { HELM_FOLDER, valuesOf } from '../support/charts.ts'

const ROOT = join(HELM_FOLDER, '..')
const { version } = JSON.parse(readFileSync(join(ROOT, 'package.json'), 'utf8')) as { version: string }
const DOCUMENTED = ['idempotency-proxy-lib', 'idempotency-proxy', 'idempotency-proxy-observability']

interface Schema {
  readonly $ref?: string
  readonly type?: string | readonly string[]
  readonly properties?: Readonly<Record<string, Schema>>
  readonly additionalProperties?: boolean | Schema
  readonly required?: readonly string[]
  readonly definitions?: Readonly<Record<string, Schema>>
}

/** Objects that Kubernetes or the proxy itself describes: the chart passes them on, and what is rendered is checked. */
const PASSED_ON = new Set([
  'config',
  'spool.volume',
  'resources',
  'resources.requests',
  'resources.limits',
  'podMonitor.selector',
  'affinity',
])

/** `a.b` → default, down to what has no properties of its own. */
function leaves(values: Record<string, unknown>, prefix = ''): Map<string, unknown> {
  const found = new Map<string, unknown>()
  for (const [name, value] of Object.entries(values)) {
    const path = `${prefix}${name}`
    const inner =
      value !== null && typeof value === 'object' && !Array.isArray(value) && Object.keys(value).length > 0
    if (!inner || PASSED_ON.has(path)) found.set(path, value)
    else
      for (const [below, one] of leaves(value as Record<string, unknown>, `${path}.`)) found.set(below, one)
  }
  return found
}

function schemaOf(chart: string): Schema {
  return JSON.parse(readFileSync(join(HELM_FOLDER, chart, 'values.schema.json'), 'utf8')) as Schema
}

function properties(schema: Schema, root: Schema, prefix = ''): string[] {
  return Object.entries(schema.properties ?? {}).flatMap(([name, one]) => {
    const path = `${prefix}${name}`
    const resolved =
      one.$ref === undefined ? one : (root.definitions?.[one.$ref.replace('#/definitions/', '')] as Schema)
    if (resolved.properties === undefined || PASSED_ON.has(path)) return [path]
    return properties(resolved, root, `${path}.`)
  })
}

/** Values of the library are another chart's to describe; `global` is Helm's own. */
const own = (path: string): boolean => path !== 'global' && !path.startsWith('idempotencyProxy.')

for (const chart of DOCUMENTED) {
  void t.test(`${chart}: the schema has what values.yaml has, and nothing else`, async (t) => {
    const schema = schemaOf(chart)
    t.same(
      properties(schema, schema).filter(own).sort(),
      [...leaves(valuesOf(chart)).keys()].filter(own).sort(),
    )
  })

  void t.test(`${chart}: every object of the schema is closed`, async (t) => {
    const open: string[] = []
    let seen = 0
    const visit = (schema: Schema, path: string): void => {
      if (schema.properties !== undefined) {
        seen++
        // The library closes it, and an item of Kubernetes' lists is checked as rendered.
        const elsewhere = path.endsWith('/idempotencyProxy') || path.endsWith('/items')
        if (schema.additionalProperties !== false && !elsewhere) open.push(path)
      }
      for (const [name, one] of Object.entries(schema))
        if (one !== null && typeof one === 'object') visit(one as Schema, `${path}/${name}`)
    }
    visit(schemaOf(chart), '')
    t.same(open, [])
    t.ok(seen >= 4, `${seen} objects`)
  })
}

void t.test('charts, images and manifests have the version of the package', async (t) => {
  for (const chart of [...DOCUMENTED, 'examples/payments']) {
    const found = parse(readFileSync(join(HELM_FOLDER, chart, 'Chart.yaml'), 'utf8'))
    t.equal(found.version, version, chart)
    t.equal(found.appVersion, version, chart)
    for (const dependency of found.dependencies ?? []) t.equal(dependency.version, version, chart)
  }
  for (const file of ['kustomize/sidecar.yaml', 'mutating-admission-policy/policy.yaml']) {
    const text = readFileSync(join(HELM_FOLDER, file), 'utf8')
    t.same(
      [...text.matchAll(/idempotency-proxy:(\d[\w.-]*)/g)].map(([, tag]) => tag),
      [version],
      file,
    )
  }
})

void t.test('the observability chart ships the dashboards and alerts of this repository', async (t) => {
  const { status, stderr } = spawnSync(process.execPath, [join(ROOT, 'scripts/helm-files.ts'), '--check'], {
    encoding: 'utf8',
    env: { ...process.env, NODE_V8_COVERAGE: '' },
  })
  t.equal(status, 0, stderr)
})
