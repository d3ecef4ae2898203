import { spawnSync } from 'node:child_process'
import { existsSync, mkdirSync, readFileSync, renameSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { parse } from 'yaml'
import { type HelmTools, helmTools } from '../../scripts/helm-tools.ts'
import { load } from '../config/support.ts'
import {
  Charts,
  HELM_FOLDER,
  type Manifest,
  manifests,
  named,
  type Said,
  typeErrors,
} from '../support/charts.ts'

t.setTimeout(280_000)

const tools = helmTools() as HelmTools
if (typeof tools === 'string') {
  t.plan(0, tools)
  process.exit(0)
}

/** The code blocks of the steps in docs/helm.md, in order: dependency, shell, template, values. */
const SECTION = readFileSync(join(HELM_FOLDER, '../docs/helm.md'), 'utf8')
  .split('## Sidecar in your own chart')[1]
  ?.split('\n## ')[0] as string
const STEPS = [...SECTION.matchAll(/^ {3}```\w+\n(.*?)^ {3}```$/gms)].map(([, block]) =>
  String(block).replaceAll(/^ {3}/gm, ''),
) as [string, string, string, string]

/** The commands that run `check` before an installation: of a gateway, of a sidecar. */
const CHECKS = [
  ...(readFileSync(join(HELM_FOLDER, '../docs/helm.md'), 'utf8')
    .split('## Check the configuration')[1]
    ?.split('\n## ')[0]
    ?.matchAll(/^```console\n(.*?)^```$/gms) ?? []),
].map(([, block]) => String(block)) as [string, string]

/** A chart made by `helm create`, next to the library. */
class Created implements Disposable {
  readonly #charts: Charts
  constructor(helm: string) {
    this.#charts = new Charts(helm)
    const { ok, err } = this.#charts.run('create', this.path())
    if (!ok) throw new Error(err)
  }

  path(...names: readonly string[]): string {
    return join(this.#charts.path('demo'), ...names)
  }

  text(file: string): string {
    return readFileSync(this.path(file), 'utf8')
  }

  write(file: string, text: string): void {
    mkdirSync(join(this.path(file), '..'), { recursive: true })
    writeFileSync(this.path(file), text)
  }

  replace(file: string, found: string | RegExp, instead: string): void {
    const before = this.text(file)
    const after = before.replace(found, instead)
    if (after === before) throw new Error(`${file} has no ${found}`)
    this.write(file, after)
  }

  /** The four steps, to the letter. */
  followSteps(): this {
    const [dependency, moves, template, values] = STEPS
    this.write('Chart.yaml', `${this.text('Chart.yaml')}\n${dependency}`)
    for (const [, from = '', to = ''] of moves.matchAll(/^mv (\S+) (\S+)$/gm))
      renameSync(this.path('templates', from), this.path('templates', to))
    this.write('templates/idempotency-proxy.yaml', template)
    this.write('values.yaml', `${this.text('values.yaml')}\n${values}`)
    const { ok, err } = this.#charts.run('dependency', 'build', this.path())
    if (!ok) throw new Error(err)
    return this
  }

  template(...sets: readonly string[]): Said {
    const args = sets.flatMap((set) => [
      set.includes('={') || set.includes('=[') ? '--set-json' : '--set',
      set,
    ])
    return this.#charts.run('template', 'shop', this.path(), '--namespace', 'shop', ...args)
  }

  objects(...sets: readonly string[]): Manifest[] {
    const { ok, out, err } = this.template(...sets)
    if (!ok) throw new Error(err)
    return manifests(out)
  }

  lint(...sets: readonly string[]): Said {
    return this.#charts.run('lint', '--strict', this.path(), ...sets.flatMap((set) => ['--set', set]))
  }

  [Symbol.dispose](): void {
    this.#charts[Symbol.dispose]()
  }
}

/** The containerPort of what `helm create` makes. */
const PORT = 'idempotencyProxy.upstream.port=80'
const one = (objects: readonly Manifest[], kind: string, name = ''): Manifest => {
  const found = objects.filter((object) => object.kind === kind && object.metadata.name.endsWith(name))
  if (found.length !== 1) throw new Error(`${found.length} of ${kind} ${name}`)
  return found[0] as Manifest
}
const podOf = (objects: readonly Manifest[]): Manifest => one(objects, 'Deployment')['spec'].template.spec

for (const [name, helm] of Object.entries(tools.helm)) {
  void t.test(`${name}: helm create and the four steps make a working pod`, async (t) => {
    using plain = new Created(helm)
    using chart = new Created(helm).followSteps()
    const objects = chart.objects()
    const before = plain.objects()
    t.equal(typeErrors(tools, named(objects)), '')
    t.ok(chart.lint().ok, 'helm lint --strict')
    t.same(
      objects.map(({ kind, metadata }) => `${kind} ${metadata.name}`).toSorted(),
      [
        ...before.map(({ kind, metadata }) => `${kind} ${metadata.name}`),
        'ConfigMap shop-idempotency-proxy',
      ].toSorted(),
      'every object once',
    )

    const pod = podOf(objects)
    const [app] = pod['containers']
    const [proxy] = pod['initContainers']
    t.same([proxy.name, proxy.restartPolicy], ['idempotency-proxy', 'Always'])
    t.equal(proxy.image, 'registry.example.com/platform/idempotency-proxy:0.1.0')
    t.same(app.lifecycle, { preStop: { sleep: { seconds: 5 } } })
    t.equal(pod['terminationGracePeriodSeconds'], 53)
    t.same(pod['volumes'], [
      { name: 'idempotency-proxy-config', configMap: { name: 'shop-idempotency-proxy' } },
    ])
    const service = one(objects, 'Service')
    t.equal(service['spec'].ports[0].targetPort, proxy.ports[0].containerPort, 'traffic goes to the proxy')
    t.match(one(objects, 'Deployment')['spec'].template.metadata.annotations, {
      'checksum/idempotency-proxy': /^[0-9a-f]{64}$/,
    })

    const text = one(objects, 'ConfigMap')['data']['proxy.yaml']
    const env = { STORE_URL: 'redis://redis:6379/0', POD_NAMESPACE: 'shop' }
    const { upstream, service: name } = load(text, { env })
    t.same([upstream.url, name], ['http://127.0.0.1', 'shop.shop'])

    // Everything that was there before is still there.
    t.same(
      chart.objects('idempotencyProxy.enabled=false'),
      before,
      'enabled: false leaves the chart as it was',
    )
    const { lifecycle: _lifecycle, ...rest } = app
    t.same(rest, podOf(before)['containers'][0])
    return t.same(
      objects.filter(({ kind }) => !['Deployment', 'Service', 'ConfigMap'].includes(kind)),
      before.filter(({ kind }) => !['Deployment', 'Service'].includes(kind)),
    )
  })

  void t.test(`${name}: a missing or conflicting setting fails with one sentence`, async (t) => {
    using chart = new Created(helm).followSteps()
    const refused = (t: Test, sentence: RegExp, ...sets: readonly string[]): void => {
      const { ok, out, err } = chart.template(...sets)
      t.notOk(ok, `${sentence} ${out}`)
      t.match(err, sentence)
    }
    const file = 'templates/idempotency-proxy.yaml'
    const [, , template] = STEPS

    const absent =
      /upstream\.port is 3000, and no container of Deployment shop-demo has that containerPort: found demo 80\./
    refused(t, absent, 'idempotencyProxy.upstream.port=3000')
    refused(t, /Set idempotencyProxy\.upstream\.port/, 'idempotencyProxy.upstream.port=0')
    refused(t, /no image is published yet/, PORT, 'idempotencyProxy.image.repository=')
    refused(t, /Set idempotencyProxy\.store\.url/, PORT, 'idempotencyProxy.store.existingSecret.name=')
    const taken = ['service.port=8080', 'idempotencyProxy.upstream.port=9000']
    refused(t, /container demo has port 8080, and so has idempotencyProxy\.port\./, PORT, ...taken)
    const volume = (name: string) => `olumes=[{"name":"${name}","emptyDir":{}}]`
    const config = `v${volume('idempotency-proxy-config')}`
    refused(t, /has a volume idempotency-proxy-config already/, PORT, config)
    const both = [`v${volume('mine')}`, `idempotencyProxy.extraV${volume('mine')}`]
    refused(t, /has a volume mine already/, PORT, ...both)

    chart.write(file, template.replace(' "_service.yaml"', ''))
    const unserved =
      /No Service in _deployment\.yaml sends traffic to port 80 of the pods of Deployment shop-demo/
    refused(t, unserved, PORT)
    chart.write(file, template.replace(' "_deployment.yaml"', ''))
    refused(t, /_service\.yaml: found 0 workloads/, PORT)
    chart.write(file, template.replace('"_deployment.yaml"', '"_deployment.yaml" "_deployment.yaml"'))
    refused(t, /found 2 workloads/, PORT)
    chart.write(file, template.replace(/\(list .*\)/, '.'))
    refused(t, /Name the templates that the proxy is put into/, PORT)
    renameSync(chart.path('templates/_service.yaml'), chart.path('templates/service.yaml'))
    chart.write(file, template.replace('"_service', '"service'))
    refused(t, /Rename templates\/service\.yaml to templates\/_service\.yaml/, PORT)
    renameSync(chart.path('templates/service.yaml'), chart.path('templates/_service.yaml'))
    chart.write(file, template)

    chart.replace('templates/_service.yaml', 'targetPort: http', 'targetPort: 9000')
    refused(t, /No Service in _deployment\.yaml, _service\.yaml sends traffic to port 80/, PORT)
    chart.replace('templates/_service.yaml', 'targetPort: 9000', 'targetPort: http')
    chart.replace('templates/_service.yaml', '  selector:', '  selector:\n    some: other')
    refused(t, /No Service/, PORT)
    chart.replace('templates/_service.yaml', '\n    some: other', '\n  clusterIP: None')
    chart.replace(
      'templates/_service.yaml',
      '  selector:\n  clusterIP: None',
      '  clusterIP: None\n  selector:',
    )
    refused(t, /No Service/, PORT)
    chart.replace('templates/_service.yaml', '  clusterIP: None\n', '')
    t.ok(chart.template(PORT).ok, 'as before')

    chart.replace(
      'templates/_deployment.yaml',
      '          ports:',
      '          lifecycle: { preStop: { exec: { command: [x] } } }\n          ports:',
    )
    refused(t, /Container demo of Deployment shop-demo has a preStop hook of its own\. Let it wait 5 s/, PORT)
    const kept = podOf(chart.objects(PORT, 'idempotencyProxy.appPreStop=keep'))
    t.same(kept['containers'][0].lifecycle, { preStop: { exec: { command: ['x'] } } })
    chart.replace(
      'templates/_deployment.yaml',
      '      containers:',
      '      shareProcessNamespace: true\n      containers:',
    )
    refused(t, /process 1 is not the proxy/, PORT, 'idempotencyProxy.appPreStop=keep')
    chart.replace('templates/_deployment.yaml', 'kind: Deployment', 'kind: Deployment\n  bad: [')
    refused(t, /What templates\/_deployment\.yaml renders is not YAML/, PORT)
  })

  void t.test(`${name}: the chart keeps its own settings`, async (t) => {
    using chart = new Created(helm).followSteps()
    chart.replace(
      'templates/_deployment.yaml',
      '      containers:',
      '      terminationGracePeriodSeconds: 600\n      initContainers:\n        - { name: migrate, image: "x:1" }\n      containers:',
    )
    chart.replace(
      'templates/_deployment.yaml',
      '          ports:',
      '          lifecycle: { postStart: { sleep: { seconds: 1 } } }\n          ports:',
    )
    const service = chart.text('templates/_service.yaml')
    const byNumber = service
      .replace('name: {{ include "demo.fullname" . }}', 'name: by-number')
      .replace('targetPort: http', 'targetPort: 80')
    const elsewhere = `apiVersion: v1
kind: Service
metadata: { name: elsewhere }
spec: { selector: { app: other }, ports: [{ port: 80 }] }
`
    const two = service.replace('  ports:', '  ports:\n    - { name: metrics, port: 9100, targetPort: 9100 }')
    chart.write('templates/_service.yaml', [two, byNumber, '# nothing\n', elsewhere].join('---\n'))
    const objects = chart.objects(
      PORT,
      'volumes=[{"name":"mine","emptyDir":{}}]',
      'podAnnotations={"example.com/on":"yes","example.com/number":"1e3"}',
      'podSecurityContext={"runAsUser":1000660000,"fsGroup":2000}',
      'replicaCount=3',
    )
    t.equal(typeErrors(tools, named(objects)), '')
    const deployment = one(objects, 'Deployment')
    const pod = podOf(objects)
    t.same(pod['securityContext'], { runAsUser: 1_000_660_000, fsGroup: 2000 }, 'numbers stay numbers')
    t.match(deployment['spec'].template.metadata.annotations, {
      'example.com/on': 'yes',
      'example.com/number': '1e3',
    })
    t.equal(deployment['spec'].replicas, 3)
    t.equal(pod['terminationGracePeriodSeconds'], 600)
    t.same(
      pod['initContainers'].map((container: Manifest) => container['name']),
      ['migrate', 'idempotency-proxy'],
    )
    t.same(
      pod['volumes'].map((volume: Manifest) => volume['name']),
      ['mine', 'idempotency-proxy-config'],
    )
    t.same(pod['containers'][0].lifecycle, {
      postStart: { sleep: { seconds: 1 } },
      preStop: { sleep: { seconds: 5 } },
    })
    const targets = (name: string) =>
      one(objects, 'Service', name)['spec'].ports.map((port: Manifest) => port['targetPort'])
    t.same(targets('shop-demo'), [9100, 8080], 'only the port that led to the app changes')
    t.same(targets('by-number'), [8080])
    t.same(targets('elsewhere'), [undefined])

    const plain = podOf(chart.objects(PORT, 'idempotencyProxy.mode=plain'))
    t.same(
      plain['containers'].map((container: Manifest) => container['name']),
      ['demo', 'idempotency-proxy'],
    )
    t.same(plain['initContainers'].length, 1)
  })
}

void t.test('check reads the configuration that a sidecar and a gateway would get', async (t) => {
  const helm = tools.helm['Helm 4']
  using chart = new Created(helm).followSteps()
  const root = join(HELM_FOLDER, '..')
  const script = (block: string) => `
    helm() { "$HELM" "$@"; }
    idempotency-proxy() { "$NODE" "$ROOT/src/cli.ts" "$@"; }
    ${block}`
  const run = (block: string, cwd: string) => {
    const env = { ...process.env, HELM: helm, NODE: process.execPath, ROOT: root, NODE_V8_COVERAGE: '' }
    return spawnSync('bash', ['-c', script(block)], { cwd, encoding: 'utf8', env })
  }
  t.equal(CHECKS.length, 2)
  const [gateway, sidecar] = CHECKS
  const fine = run(sidecar, chart.path())
  t.equal(fine.status, 0, fine.stderr)
  t.match(fine.stdout, '/dev/stdin: fine')
  chart.replace('values.yaml', 'key: required', 'kye: required')
  const misspelt = run(sidecar, chart.path())
  t.equal(misspelt.status, 1)
  t.match(misspelt.stdout + misspelt.stderr, 'kye')

  const folder = chart.path('../..')
  const values = {
    image: { repository: 'registry.example.com/proxy' },
    upstream: { url: 'http://payments.shop.svc.cluster.local' },
    store: { existingSecret: { name: 'payments-redis' } },
  }
  writeFileSync(join(folder, 'values.yaml'), JSON.stringify({ idempotencyProxy: values }))
  const plain = run(gateway, folder)
  t.equal(plain.status, 0, plain.stderr)
  t.match(plain.stdout, '/dev/stdin: fine')
})

void t.test('two charts of one release have their own names, also where names are long', async (t) => {
  const helm = tools.helm['Helm 4']
  using chart = new Created(helm).followSteps()
  const umbrella = chart.path('../umbrella')
  mkdirSync(umbrella)
  const demo = { name: 'demo', version: '0.1.0', repository: 'file://../demo' }
  const dependencies = ['one', 'two'].map((alias) => ({ ...demo, alias }))
  const chartOf = { apiVersion: 'v2', name: 'umbrella', version: '1.0.0', dependencies }
  writeFileSync(join(umbrella, 'Chart.yaml'), JSON.stringify(chartOf))
  const charts = new Charts(helm)
  t.teardown(() => charts[Symbol.dispose]())
  t.ok(charts.run('dependency', 'build', umbrella).ok)
  const ports = ['one', 'two'].flatMap((alias) => ['--set', `${alias}.${PORT}`])
  const services = (release: string, namespace: string) => {
    const { ok, out, err } = charts.run('template', release, umbrella, '--namespace', namespace, ...ports)
    if (!ok) throw new Error(err)
    const maps = manifests(out).filter(({ kind }) => kind === 'ConfigMap')
    return maps.map(({ metadata, ...map }) => [metadata.name, parse(map['data']['proxy.yaml']).service])
  }
  t.same(services('shop', 'a'), [
    ['shop-one-idempotency-proxy', '${POD_NAMESPACE}.shop_one'],
    ['shop-two-idempotency-proxy', '${POD_NAMESPACE}.shop_two'],
  ])
  const long = services('r'.repeat(53), 'a')
  t.equal(new Set(long.map(([name]) => name)).size, 2)
  for (const [name] of long) t.ok(name.length <= 63, name)
  t.throws(
    () => services('r'.repeat(53), 'n'.repeat(63)),
    /Set idempotencyProxy\.service: its default, .* has more than 64/,
  )
  const named = ['--set', 'one.idempotencyProxy.service=payments']
  const { out } = charts.run('template', 'shop', umbrella, '--namespace', 'a', ...ports, ...named)
  t.match(out, 'service: payments')
})

void t.test('the example chart follows the same steps', async (t) => {
  const folder = join(HELM_FOLDER, 'examples/payments/templates')
  t.same(readFileSync(join(folder, 'idempotency-proxy.yaml'), 'utf8'), STEPS[2])
  for (const file of ['_deployment.yaml', '_service.yaml']) {
    t.ok(existsSync(join(folder, file)))
    t.notMatch(readFileSync(join(folder, file), 'utf8'), 'idempotency-proxy.')
  }
})
