import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { pathToFileURL } from 'node:url'
import t, { type Test } from 'tap'
import { parse, stringify } from 'yaml'
import { helmTools } from '../../scripts/helm-tools.ts'
import type { Config } from '../../src/config/config.ts'
import { formatConfigError, loadConfig } from '../../src/config/load.ts'
import { admitted } from '../support/admission.ts'
import {
  CHARTS,
  type Chart,
  Charts,
  HELM_FOLDER,
  kustomized,
  type Manifest,
  manifests,
  named,
  scenarioFile,
  scenarios,
  typeErrors,
} from '../support/charts.ts'

t.setTimeout(280_000)

const tools = helmTools()
if (typeof tools === 'string') {
  t.plan(0, tools)
  process.exit(0)
}

const secrets = mkdtempSync(join(tmpdir(), 'charts-secret-'))
t.teardown(() => rmSync(secrets, { recursive: true, force: true }))
writeFileSync(join(secrets, 'secret'), 'x'.repeat(64))
writeFileSync(join(secrets, 'key'), Buffer.alloc(32, 0x80))

const helms = Object.entries(tools.helm).map(([name, path]) => ({ name, charts: new Charts(path) }))
const charts = helms[0]?.charts as Charts
t.teardown(() => {
  for (const one of helms) one.charts[Symbol.dispose]()
})

const cases = CHARTS.flatMap((chart) =>
  scenarios(chart).map((scenario) => ({ chart, scenario, name: `${chart}: ${scenario}` })),
)
const rendered = new Map(
  cases.map(({ chart, scenario, name }) => [name, charts.render(chart, '-f', scenarioFile(chart, scenario))]),
)

const objectsOf = (name: string) => rendered.get(name) as Manifest[]
const of = (name: string, kind: string) => objectsOf(name).filter((one) => one.kind === kind)

for (const { name: helm, charts: own } of helms)
  void t.test(`${helm}: lint --strict passes for every ci file, and all render the same`, async (t) => {
    const library = own.run('lint', '--strict', own.path('idempotency-proxy-lib'))
    t.ok(library.ok, 'idempotency-proxy-lib', { said: `${library.out}${library.err}` })
    for (const { chart, scenario, name } of cases) {
      const values = scenarioFile(chart, scenario)
      const linted = own.lint(chart, values)
      t.ok(linted.ok, name, { said: `${linted.out}${linted.err}` })
      t.same(own.render(chart, '-f', values), rendered.get(name), name)
    }
  })

void t.test('rendered objects have the types of Kubernetes and of the Prometheus operator', async (t) => {
  const examples = [...rendered].flatMap(([name, objects]) =>
    objects.map((one) => [`${name}: ${one.kind}`, one] as const),
  )
  t.ok(examples.length > 40, `${examples.length} objects`)
  const others = [...kustomized(tools, join(HELM_FOLDER, 'examples/kustomize')), ...policy()]
  const all = [...examples, ...named(others)]
  t.equal(typeErrors(tools, all), '')

  const wrong = (ports: object): string => {
    const [one] = of('examples/payments: native', 'Deployment').map((found) => structuredClone(found))
    one?.['spec'].template.spec.initContainers[0].ports.push(ports)
    return typeErrors(tools, [['wrong', one as Manifest]])
  }
  t.match(wrong({ containerPort: '80' }), /TS2322/, 'a wrong type is found')
  t.match(wrong({ containerPort: 80, protocl: 'TCP' }), /TS2353.*protocl/)
})

/** The proxy's container, with the pod that it is in. */
function proxyIn(objects: readonly Manifest[]) {
  const [deployment] = objects.filter(({ kind }) => kind === 'Deployment')
  const pod = deployment?.['spec'].template.spec
  const own = (one: { name: string }): boolean => one.name === 'idempotency-proxy'
  const native = pod?.initContainers?.find(own)
  return { deployment: deployment as Manifest, pod, native, container: native ?? pod?.containers.find(own) }
}

/** The configuration file of a rendered chart, as the proxy loads it; null where the chart does not make it. */
function configurationIn(t: Test, objects: readonly Manifest[]): Config | null {
  const { container, pod } = proxyIn(objects)
  const volume = pod.volumes.find(({ name }: { name: string }) => name === 'idempotency-proxy-config')
  const map = objects.find(
    ({ kind, metadata }) => kind === 'ConfigMap' && metadata.name === volume.configMap.name,
  )
  if (map === undefined) return null
  const env: Record<string, string> = { STORE_URL: 'redis://redis:6379/0', POD_NAMESPACE: 'shop' }
  for (const { name, value } of container.env) if (value !== undefined) env[name] = value
  const text = map['data'][container.args[1].split('/').at(-1)]
    .replace('/etc/idempotency-proxy-admin/token', join(secrets, 'secret'))
    .replace('/etc/idempotency-proxy-record-ids/secret', join(secrets, 'secret'))
    .replaceAll(/\/etc\/idempotency-proxy-encryption\/\w+/g, join(secrets, 'key'))
    .replace('/var/spool/idempotency-proxy/outcomes', join(secrets, 'spool'))
    .replace('/etc/idempotency-proxy-tls/tls.key', 'test/config/files/listener-key.pem')
    .replaceAll(/\/etc\/idempotency-proxy-tls\/[.\w]+/g, 'test/config/files/listener.pem')
  const loaded = loadConfig({ file: 'proxy.yaml', text, env, flags: {} })
  t.ok(loaded.ok, 'the proxy accepts it', { errors: loaded.ok ? [] : loaded.errors.map(formatConfigError) })
  return loaded.ok ? loaded.config : null
}

const bytes = (quantity: string): number => {
  const [, number, unit] = /^(\d+)(Mi|Gi)$/.exec(quantity) ?? []
  return Number(number) * (unit === 'Gi' ? 1024 ** 3 : 1024 ** 2)
}

/** What `bench` measured of this proxy, in bytes. */
function benchMemory(): { rest: number; most: number } {
  const lines = readFileSync(join(HELM_FOLDER, '../docs/internals/performance.md'), 'utf8').split('\n')
  const at = lines.findIndex((line) => line.includes('MB at rest'))
  const cells = (line: string) => line.split('|').map((cell) => cell.trim())
  const head = cells(lines[at] as string)
  const mine = lines
    .slice(at)
    .filter((line) => line.startsWith('| **this proxy**, '))
    .slice(0, 2)
    .map(cells)
  const column = (title: string) =>
    mine.flatMap((row) => row.filter((_, n) => head[n]?.includes(title)).map((cell) => Number(cell) * 1e6))
  const [rest, most] = [Math.max(...column('MB at rest')), Math.max(...column('most MB'))]
  if (!(rest > 0 && most > rest)) throw new Error('docs/internals/performance.md has no table of memory')
  return { rest, most }
}

const WITH_PROXY = cases.filter(
  ({ chart, scenario }) => chart !== 'idempotency-proxy-observability' && scenario !== 'off',
)

for (const { name } of WITH_PROXY)
  void t.test(`${name}: the proxy's pod is locked down, probed, sized and wired`, async (t) => {
    const objects = objectsOf(name)
    const { pod, container, native, deployment } = proxyIn(objects)
    t.match(container.securityContext, {
      runAsNonRoot: true,
      runAsUser: 65532,
      runAsGroup: 65532,
      allowPrivilegeEscalation: false,
      privileged: false,
      readOnlyRootFilesystem: true,
      capabilities: { drop: ['ALL'] },
      seccompProfile: { type: 'RuntimeDefault' },
    })
    t.equal(pod.automountServiceAccountToken, false)
    t.notOk(pod.hostNetwork || pod.hostPID || pod.hostIPC)
    t.equal(container.terminationMessagePolicy, 'FallbackToLogsOnError')

    for (const [probe, path] of [
      ['startupProbe', '/startupz'],
      ['livenessProbe', '/livez'],
      ['readinessProbe', '/readyz'],
    ] as const)
      t.same(container[probe].httpGet, { path, port: 9901 }, probe)
    t.same(
      container.ports.map(({ name, containerPort }: Manifest) => [name, containerPort]),
      [
        ['idempotency', 8080],
        ['idempotency-ops', 9901],
      ],
    )

    const { rest, most } = benchMemory()
    t.ok(
      bytes(container.resources.limits.memory) > most,
      `the limit is over the ${most / 1e6} MB of the bench`,
    )
    t.ok(
      bytes(container.resources.requests.memory) > rest,
      `the request is over the ${rest / 1e6} MB at rest`,
    )
    t.notOk(container.resources.limits.cpu, 'no throttling')

    const volumes = new Set(pod.volumes.map((one: { name: string }) => one.name))
    t.equal(volumes.size, pod.volumes.length)
    for (const mount of container.volumeMounts) {
      t.ok(volumes.has(mount.name), `a volume ${mount.name}`)
      t.notOk(mount.subPath, 'mounts with a subPath never update')
    }
    for (const [name, value] of Object.entries(deployment['spec'].selector.matchLabels))
      t.equal(deployment['spec'].template.metadata.labels[name], value)
    const [service] = objects.filter(({ kind }) => kind === 'Service')
    t.equal(service?.['spec'].ports[0].targetPort, 8080, 'traffic goes to the proxy, by number')
    for (const [name, value] of Object.entries(service?.['spec'].selector))
      t.equal(deployment['spec'].template.metadata.labels[name], value)

    const config = configurationIn(t, objects)
    const app = pod.containers.find((one: { name: string }) => one.name !== 'idempotency-proxy')
    const sleep = (app?.lifecycle?.preStop.sleep.seconds ?? 0) * 1000
    t.equal(app === undefined, !name.startsWith('examples/'))
    if (app !== undefined) t.ok(sleep > 0, 'the app pauses')
    if (config === null) return
    t.same(config.ops.listen.address, { host: '0.0.0.0', port: 9901 })
    t.same(config.listen.address, { host: '0.0.0.0', port: 8080 })
    t.equal(config.admin.listen.address?.host, '127.0.0.1')
    t.equal(config.service, name.endsWith(': production') ? 'payments' : 'shop.shop')
    const { delay, timeout } = config.drain
    t.ok(timeout >= config.upstream.timeout, 'running calls may finish')
    t.ok(pod.terminationGracePeriodSeconds * 1000 > sleep + delay + timeout, 'and the pod lives as long')
    if (app !== undefined) t.ok(delay < sleep || delay === 0, 'the proxy stops before its app')
    t.equal(native?.restartPolicy, native && 'Always')
  })

t.test('native sidecars get a preStop hook; a proxy that ends no later than the app, none', async (t) => {
  const hook = (name: string) => proxyIn(objectsOf(name)).container.lifecycle?.preStop.exec.command
  t.same(hook('examples/payments: native'), ['node', '-e', "process.kill(1, 'SIGTERM')"])
  t.equal(
    hook('examples/payments: drain-hook').join(' '),
    'idempotency-proxy drain --admin http://127.0.0.1:9464 --token-file /etc/idempotency-proxy-admin/token --by preStop',
  )
  for (const name of [
    'examples/payments: plain',
    'examples/payments: no-rollout',
    'idempotency-proxy: least',
  ])
    t.equal(hook(name), undefined, name)
  const delay = (name: string) => configurationIn(t, objectsOf(name))?.drain.delay
  t.same(
    ['native', 'plain', 'drain-hook', 'no-rollout'].map((name) => delay(`examples/payments: ${name}`)),
    [3000, 8000, 0, 0],
  )
  t.equal(delay('idempotency-proxy: least'), 5000)
})

/** What a scenario has rendered. */
function renderingOf(t: Test, name: string) {
  const objects = objectsOf(name)
  return {
    objects,
    ...proxyIn(objects),
    of: (kind: string) => of(name, kind),
    /** The configuration as the proxy loads it. */
    config: () => configurationIn(t, objects),
    /** `store` of the configuration that the chart has made. */
    store() {
      const [text = ''] = Object.values(of(name, 'ConfigMap')[0]?.['data'] as Record<string, string>)
      return parse(text).store
    },
  }
}

void t.test('each scenario renders what its values ask for', async (t) => {
  const looks: Record<string, (t: Test, rendering: ReturnType<typeof renderingOf>) => void> = {
    'idempotency-proxy: least'(t, { deployment, container, pod, objects }) {
      const kinds = objects.map(({ kind }) => kind).sort()
      t.same(kinds.join(' '), 'ConfigMap Deployment PodDisruptionBudget Service ServiceAccount')
      t.equal(deployment['spec'].replicas, 2)
      t.equal(container.image, 'registry.example.com/idempotency-proxy:0.1.0')
      const { matchLabels } = deployment['spec'].selector
      const spread = pod.topologySpreadConstraints as Manifest[]
      t.same(
        spread.map((one) => [one['topologyKey'], one['labelSelector'].matchLabels]),
        ['topology.kubernetes.io/zone', 'kubernetes.io/hostname'].map((key) => [key, matchLabels]),
      )
    },
    'idempotency-proxy: production'(t, { deployment, container, pod, config, of }) {
      t.match(container.image, /^registry\.example\.com\/platform\/idempotency-proxy@sha256:[0-9a-f]{64}$/)
      t.notOk('replicas' in deployment['spec'], 'the autoscaler decides how many')
      const scaleTargetRef = { name: deployment.metadata.name }
      const [scaler] = of('HorizontalPodAutoscaler')
      t.match(scaler?.['spec'], { minReplicas: 3, maxReplicas: 9, scaleTargetRef })
      t.equal(of('PodDisruptionBudget')[0]?.['spec'].maxUnavailable, '34%')
      const [network] = of('NetworkPolicy') as [Manifest]
      const { policyTypes, ingress, egress } = network['spec'] as Record<string, Manifest[]>
      t.same(policyTypes, ['Ingress', 'Egress'])
      t.match(ingress, [{ ports: [{ port: 8080 }] }, { ports: [{ port: 9901 }] }])
      t.equal(ingress?.length, 2)
      t.ok(ingress?.every((rule) => rule['from'].length === 1))
      t.match(egress?.[0]?.['ports'], [{ port: 53 }, { port: 53 }])
      t.equal(egress?.[0]?.['ports'].length, 2)
      t.equal(egress?.length, 3)
      t.same(of('ServiceAccount')[0]?.['automountServiceAccountToken'], false)
      t.equal(pod.serviceAccountName, of('ServiceAccount')[0]?.metadata.name)
      t.match(container.env, [
        { name: 'STORE_URL', valueFrom: { secretKeyRef: { name: 'payments-redis', key: 'url' } } },
        { name: 'NODE_EXTRA_CA_CERTS', value: '/etc/idempotency-proxy-ca/ca.crt' },
        { name: 'PROBLEMS_URL' },
      ])
      t.notMatch(JSON.stringify(of('ConfigMap')), /redis:\/\//)
      const ids = ['k2026', 'k2025']
      const secret = { secretName: 'payments-encryption', items: ids.map((id) => ({ key: id, path: id })) }
      const volume = pod.volumes.find((one: Manifest) => one['name'] === 'idempotency-proxy-encryption')
      t.match(volume, { secret })
      const keys = config()?.store.encryption.keys.map(({ id }) => id)
      t.same(keys, ids)
      t.match(deployment['spec'].template.metadata.annotations, {
        'example.com/team': 'payments',
        'checksum/idempotency-proxy': /^[0-9a-f]{64}$/,
      })
      t.equal(deployment['spec'].template.metadata.labels.team, 'payments')
      t.match(of('Service')[0], {
        spec: { type: 'LoadBalancer' },
        metadata: { annotations: { 'example.com/internal': 'true' } },
      })
      t.equal(pod.securityContext.fsGroup, 65532)
    },
    'idempotency-proxy: tls'(t, { pod, container, config }) {
      const mount = { name: 'idempotency-proxy-tls', mountPath: '/etc/idempotency-proxy-tls', readOnly: true }
      const named = (all: readonly Manifest[]) => all.find(({ name }) => name === mount.name)
      t.same(named(container.volumeMounts), mount)
      t.same(named(pod.volumes), { name: mount.name, secret: { secretName: 'payments-tls' } })
      t.match(config()?.listen.tls, { clientCa: /listener/, alpn: ['h2', 'http/1.1'] })
      t.match(config()?.defaults.scope.caller, [{ kind: 'tls', name: 'san-uri' }])
    },
    'idempotency-proxy: grpc'(t, { config }) {
      t.match(config(), {
        listen: { http2: true },
        upstream: { http2: true },
        routes: [{ match: { grpc: 'shop.v1.Payments/*', methods: ['POST'] }, inFlight: { mode: 'wait' } }],
      })
    },
    'idempotency-proxy: http2'(t, { config }) {
      t.match(config(), { listen: { http2: true }, upstream: { http2: true } })
    },
    'idempotency-proxy: redis-tls'(t, { container, pod }) {
      t.match(container.env, [
        { value: /^rediss:/ },
        { name: 'NODE_EXTRA_CA_CERTS', value: '/etc/idempotency-proxy-ca/tls-ca.pem' },
      ])
      const items = [{ key: 'tls-ca.pem', path: 'tls-ca.pem' }]
      t.match(pod.volumes[1].secret, { secretName: 'redis-ca', items })
    },
    'idempotency-proxy: redis-sentinel'(t, { container, store, of }) {
      t.match(container.env, [
        { name: 'STORE_URL', valueFrom: { secretKeyRef: { name: 'payments-redis', key: 'url' } } },
      ])
      t.same(store(), { url: '${STORE_URL}', grace: '2s', wait: { replicas: 1, timeout: '100ms' } })
      const [network] = of('NetworkPolicy') as [Manifest]
      const [, ...egress] = network['spec'].egress as Manifest[]
      const ports = egress.map((rule) => rule['ports'][0].port)
      t.same(ports, [8080, 26_379, 6379])
    },
    'idempotency-proxy: redis-cluster'(t, { container, store }) {
      t.match(container.env, [
        { value: /^rediss\+cluster:\/\/redis-0\..*,redis-1\./ },
        { name: 'NODE_EXTRA_CA_CERTS', value: '/etc/idempotency-proxy-ca/ca.crt' },
      ])
      t.match(store(), { grace: '2s', wait: { replicas: 'all' } })
    },
    'idempotency-proxy: postgres'(t, { container, store }) {
      t.match(container.env, [
        { name: 'STORE_URL', valueFrom: { secretKeyRef: { name: 'payments-database', key: 'url' } } },
        { name: 'NODE_EXTRA_CA_CERTS' },
      ])
      t.match(store(), { grace: '2s', timeout: '1s' })
    },
    'idempotency-proxy: embedded'(t, { deployment, container, pod }) {
      t.same(deployment['spec'].strategy, { type: 'Recreate' })
      t.equal(deployment['spec'].replicas, 1)
      t.match(container.volumeMounts[1], { mountPath: '/data' })
      t.match(pod.volumes[1].persistentVolumeClaim, { claimName: 'idempotency' })
    },
    'idempotency-proxy: spool'(t, { container, pod, config }) {
      t.match(container.volumeMounts[1], { mountPath: '/var/spool/idempotency-proxy' })
      t.same(pod.volumes[1].emptyDir, { sizeLimit: '512Mi' })
      t.match(config()?.store.spool, /spool$/)
    },
    'idempotency-proxy: existing-configmap'(t, { deployment, container, pod, of }) {
      t.same(container.args, ['--config', '/etc/idempotency-proxy/payments.yaml'])
      t.same(of('ConfigMap'), [])
      t.equal(deployment['spec'].template.metadata.annotations, undefined)
      t.equal(pod.serviceAccountName, 'payments')
      t.same(of('ServiceAccount'), [])
      t.equal(pod.terminationGracePeriodSeconds, 140)
      t.ok(container.volumeMounts.some((one: Manifest) => one['mountPath'] === '/etc/issuer'))
    },
    'examples/payments: native'(t, { pod, native, deployment }) {
      t.ok(native)
      t.equal(pod.containers.length, 1)
      t.equal(pod.terminationGracePeriodSeconds, 53)
      t.ok(deployment['spec'].template.metadata.annotations['example.com/team'], 'its own annotations')
    },
    'examples/payments: plain'(t, { pod, native }) {
      t.notOk(native)
      t.equal(pod.containers.length, 2)
    },
    'examples/payments: off'(t, { objects, of }) {
      t.notMatch(stringify(objects), /idempotency/)
      t.equal(of('Service')[0]?.['spec'].ports[0].targetPort, 'app')
    },
    'examples/payments: drain-hook'(t, { pod }) {
      t.equal(pod.terminationGracePeriodSeconds, 120)
    },
    'examples/payments: no-rollout'(t, { deployment }) {
      t.same(deployment['spec'].template.metadata.annotations, { 'example.com/team': 'payments' })
    },
    'examples/payments: spool'(t, { container, pod }) {
      t.match(container.volumeMounts[1], { name: 'state', mountPath: '/var/spool/idempotency-proxy' })
      t.equal(pod.volumes.length, 2)
    },
    'idempotency-proxy-observability: stack'(t, { of }) {
      const [monitor] = of('PodMonitor')
      t.equal(monitor?.metadata.labels?.['release'], 'kube-prometheus-stack')
      t.match(monitor?.['spec'], {
        selector: {},
        namespaceSelector: { any: true },
        podMetricsEndpoints: [{ port: 'idempotency-ops', path: '/metrics' }],
      })
      t.equal(monitor?.['spec'].jobLabel, 'app.kubernetes.io/instance')
      for (const rule of of('PrometheusRule'))
        t.equal(rule.metadata.labels?.['release'], 'kube-prometheus-stack')
    },
    'idempotency-proxy-observability: bare'(t, { of }) {
      const [monitor] = of('PodMonitor')
      t.match(monitor?.['spec'], {
        selector: { matchLabels: { team: 'payments' } },
        namespaceSelector: { matchNames: ['shop', 'billing'] },
      })
      t.same(of('ConfigMap'), [])
    },
    'idempotency-proxy-observability: dashboards'(t, { objects }) {
      for (const { kind, metadata } of objects) {
        t.equal(kind, 'ConfigMap')
        t.equal(metadata.labels?.['dashboards.example.com/grafana'], 'yes')
      }
    },
  }
  t.same(Object.keys(looks).sort(), cases.map(({ name }) => name).sort(), 'every scenario has a test')
  for (const [name, look] of Object.entries(looks))
    await t.test(name, async (t) => look(t, renderingOf(t, name)))
})

void t.test('dashboards and rules are shipped unchanged, braces and all', async (t) => {
  using own = new Charts(tools.helm['Helm 4'])
  const dashboard = {
    uid: 'x',
    title: 'Überblick',
    panels: [{ legendFormat: '{{ route }} {{ $labels.x }}' }],
  }
  const rules = {
    groups: [
      {
        name: 'x',
        rules: [
          {
            alert: 'X',
            expr: 'up == 0',
            for: '1m',
            annotations: { summary: '{{ $labels.route }} is {{ $value | humanize }}' },
          },
        ],
      },
    ],
  }
  own.add('idempotency-proxy-observability', 'files/dashboards/one.json', JSON.stringify(dashboard, null, 2))
  own.add('idempotency-proxy-observability', 'files/rules.yaml', `# One.\n${stringify(rules)}`)
  const objects = own.render('idempotency-proxy-observability')
  const map = objects.find(({ metadata }) => metadata.name === 'idempotency-proxy-one') as Manifest
  t.same(JSON.parse(map['data']['idempotency-proxy-one.json']), dashboard)
  t.equal(map.metadata.labels?.['grafana_dashboard'], '1')
  const [rule] = objects.filter(({ kind }) => kind === 'PrometheusRule')
  t.same(rule?.['spec'], rules)
  t.equal(typeErrors(tools, named(objects)), '')
})

/** Rules of the chart by the name of their alert. */
function rulesOf(objects: readonly Manifest[]): Map<string, Manifest> {
  const [rule] = objects.filter(({ kind }) => kind === 'PrometheusRule')
  const rules = rule?.['spec'].groups.flatMap((group: Manifest) => group['rules']) as Manifest[]
  return new Map(rules.map((one) => [one['alert'], one]))
}

void t.test('values change single alerts, and nothing else', async (t) => {
  const source = parse(readFileSync(join(HELM_FOLDER, '../alerts/rules.yaml'), 'utf8')).groups[0]
    .rules as Manifest[]
  const plain = rulesOf(charts.render('idempotency-proxy-observability'))
  t.same(
    [...plain.values()],
    source.map((one) => {
      const { runbook_url: _link, ...annotations } = one['annotations']
      return { ...one, annotations }
    }),
    'unchanged, without a dead link',
  )

  const changed = rulesOf(objectsOf('idempotency-proxy-observability: stack'))
  t.notOk(changed.has('IdempotencyAbsent'))
  t.equal(changed.size, plain.size - 1)
  for (const [name, one] of changed)
    t.equal(one['annotations'].runbook_url, `https://runbooks.example.com/idempotency/${name}.md`)
  t.match(changed.get('IdempotencyStoreUnavailable'), { for: '5m', labels: { severity: 'page' } })
  t.match(changed.get('IdempotencyDuplicatesHigh'), {
    for: '1h',
    labels: { severity: 'info' },
    expr: /> 0\.2$/,
  })
  t.same(changed.get('IdempotencyDown')?.['expr'], plain.get('IdempotencyDown')?.['expr'])
})

void t.test('docs/helm.md names the alerts that have a limit, and their limits', async (t) => {
  const text = readFileSync(join(HELM_FOLDER, '../docs/helm.md'), 'utf8')
  const [sentence = ''] = /`threshold` for those that compare.*?\[monitoring/s.exec(text) ?? []
  const told = new Map([...sentence.matchAll(/`(\w+)`\s\(([\d.]+)/g)].map(([, name, limit]) => [name, limit]))
  const plain = rulesOf(charts.render('idempotency-proxy-observability'))
  for (const [name, one] of plain) {
    const path = charts.path('idempotency-proxy-observability')
    const limit = set(`prometheusRule.alerts.${name}.threshold=0.77`)
    const { ok, out, err } = charts.run('template', 'shop', path, ...limit)
    t.equal(ok, told.has(name), `${name} ${err}`)
    if (!ok) t.match(err, /has no limit to change/)
    const changed = one['expr'].replace(new RegExp(`> ${told.get(name)}(?![\\d.])`), '> 0.77')
    if (ok) t.equal(rulesOf(manifests(out)).get(name)?.['expr'], changed, name)
  }
})

const set = (...values: readonly string[]): string[] => values.flatMap((one) => ['--set', one])
const GATEWAY = set(
  ...['image.repository=x/y', 'upstream.url=http://x', 'store.url=redis://r:6379'].map(
    (one) => `idempotencyProxy.${one}`,
  ),
)
t.test('Y20 strategy=Recreate ends all pods before it starts any; the default rolls', async (t) => {
  for (const [strategy, type] of [
    ['auto', 'RollingUpdate'],
    ['Recreate', 'Recreate'],
  ] as const) {
    const args = [...GATEWAY, ...set(`strategy=${strategy}`)]
    const { deployment } = proxyIn(charts.render('idempotency-proxy', ...args))
    t.equal(deployment['spec'].strategy.type, type)
  }
})

/** Chart, what is said, and the values that it is said about. */
const REFUSED = `
idempotency-proxy | Set idempotencyProxy.upstream.url | idempotencyProxy.upstream.url=
idempotency-proxy | no image is published yet | idempotencyProxy.image.repository=
examples/payments | docker push REGISTRY/idempotency-proxy:0.1.0 | idempotencyProxy.image.repository=
examples/payments | Set idempotencyProxy.upstream.port | idempotencyProxy.upstream.port=0
examples/payments | port and idempotencyProxy.upstream.port are both 8080 | idempotencyProxy.upstream.port=8080
idempotency-proxy | are both 9000 | idempotencyProxy.port=9000 idempotencyProxy.opsPort=9000
idempotency-proxy | use idempotencyProxy.service | idempotencyProxy.config.service=x
idempotency-proxy | service | idempotencyProxy.service=a/b
idempotency-proxy | topologySpreadConstraints | topologySpreadConstraints=always
idempotency-proxy | strategy | strategy=Sometimes
idempotency-proxy | Set idempotencyProxy.store.url | idempotencyProxy.store.url=
idempotency-proxy | not both | idempotencyProxy.store.existingSecret.name=x
idempotency-proxy | has credentials | idempotencyProxy.store.url=redis://u:p@r:6379
idempotency-proxy | forgets at every restart | idempotencyProxy.store.url=memory:
idempotency-proxy | is embedded | idempotencyProxy.store.url=sqlite:/data/x.db idempotencyProxy.store.existingClaim=x
idempotency-proxy | is embedded | idempotencyProxy.store.url=sqlite:/data/x.db idempotencyProxy.store.existingClaim=x replicaCount=1 autoscaling.enabled=true
idempotency-proxy | would be lost with its pod | idempotencyProxy.store.url=sqlite:/data/x.db replicaCount=1
idempotency-proxy | would be lost with its pod | idempotencyProxy.store.url=sqlite:./x.db idempotencyProxy.store.existingClaim=x replicaCount=1
idempotency-proxy | for sqlite:/data/<name>.db alone | idempotencyProxy.store.existingClaim=x
idempotency-proxy | a spool is of one process alone | idempotencyProxy.spool.enabled=true idempotencyProxy.spool.volume.persistentVolumeClaim.claimName=x
idempotency-proxy | is too short | idempotencyProxy.terminationGracePeriodSeconds=49
idempotency-proxy | cuts off calls | idempotencyProxy.drain.timeoutSeconds=29
idempotency-proxy | is set by the chart: use idempotencyProxy.port | idempotencyProxy.config.listen=0.0.0.0:1
idempotency-proxy | is set by the chart | idempotencyProxy.config.upstream.timeout=5s
idempotency-proxy | is set by the chart | idempotencyProxy.config.store.url=memory:
idempotency-proxy | is set by the chart | idempotencyProxy.config.store.encryption.keys[0].id=a
idempotency-proxy | both existingSecret and keys | idempotencyProxy.store.encryption.existingSecret=x
idempotency-proxy | both existingSecret and keys | idempotencyProxy.store.encryption.keys[0]=a
idempotency-proxy | is set by the chart | idempotencyProxy.config.admin.tokenFile=/x
idempotency-proxy | is set by the chart | idempotencyProxy.config.drain.delay=1s
idempotency-proxy | not both | idempotencyProxy.existingConfigMap.name=x idempotencyProxy.config.unmatched=pass
idempotency-proxy | which is not set | idempotencyProxy.tls.clientCaKey=ca.crt
idempotency-proxy | not both | idempotencyProxy.ca.existingConfigMap=x idempotencyProxy.ca.existingSecret=y
idempotency-proxy | more than maxReplicas | autoscaling.enabled=true autoscaling.minReplicas=9
idempotency-proxy | mode | idempotencyProxy.mode=native
idempotency-proxy | porrt | idempotencyProxy.porrt=1
idempotency-proxy | replicas | replicas=3
idempotency-proxy | digest | idempotencyProxy.image.digest=latest
examples/payments | is for mode gateway | idempotencyProxy.upstream.url=http://x
examples/payments | the app would stop | idempotencyProxy.drain.delaySeconds=5
examples/payments | needs its token | idempotencyProxy.drain.hook=drain
examples/payments | for mode native | idempotencyProxy.drain.hook=drain idempotencyProxy.mode=plain idempotencyProxy.admin.existingSecret.name=x
examples/payments | is embedded | idempotencyProxy.store.url=sqlite:/data/x.db idempotencyProxy.store.existingClaim=x
examples/payments | found 3 | idempotencyProxy.store.url=sqlite:/data/x.db idempotencyProxy.store.existingClaim=x idempotencyProxy.maxReplicas=3 replicaCount=1
examples/payments | hook | idempotencyProxy.drain.hook=later
idempotency-proxy-observability | there is no such alert. There are Idempotency | prometheusRule.alerts.Absent.enabled=false
idempotency-proxy-observability | levl | prometheusRule.alerts.IdempotencyAbsent.levl=x
idempotency-proxy-observability | dashbords | dashbords.enabled=false
`
  .trim()
  .split('\n')
  .map((row) => row.split(' | ') as [Chart, string, string])

void t.test('values that would lose records or requests, and mistyped ones, are refused', async (t) => {
  for (const [chart, sentence, values] of REFUSED)
    for (const { name, charts: own } of helms) {
      const args = [...(chart === 'idempotency-proxy' ? GATEWAY : []), ...set(...values.split(' '))]
      const { ok, err } = own.run('template', 'shop', own.path(chart), ...args)
      t.notOk(ok, `${name}: ${values}`)
      t.ok(err.includes(sentence), sentence, { err })
    }
})

void t.test('an install without any value first says how to get an image', async (t) => {
  for (const { name, charts: own } of helms) {
    const { ok, err } = own.run('template', 'shop', own.path('idempotency-proxy'))
    t.notOk(ok, name)
    t.match(err, /Set idempotencyProxy\.image\.repository: no image is published yet/)
  }
})

void t.test('a dependency without its alias is refused', async (t) => {
  using own = new Charts(tools.helm['Helm 4'])
  const chart = own.path('examples/payments')
  const file = join(chart, 'Chart.yaml')
  writeFileSync(file, readFileSync(file, 'utf8').replace(/^ +alias: .*\n/m, ''))
  const values = 'replicaCount: 1\nimage: { repository: a, tag: b }\nservice: { port: 80 }\n'
  writeFileSync(join(chart, 'values.yaml'), values)
  const { ok, err } = own.run('template', 'shop', chart)
  t.notOk(ok)
  t.match(err, /alias: idempotencyProxy/)
})

// Helm 3 shows them only with a cluster; that it can render them is part of every rendering.
void t.test('NOTES name missing wiring until it is there', async (t) => {
  using own = new Charts(tools.helm['Helm 4'])
  const notes = (chart: Chart, scenario: string) => own.notes(chart, '-f', scenarioFile(chart, scenario))
  const missing = (text: string) =>
    [...text.matchAll(/MISSING: ([\w.]+)/g)].map(([, what]) => what?.replace(/\.$/, ''))
  t.same(missing(notes('idempotency-proxy', 'least')), [
    'idempotencyProxy.config.routes',
    'idempotencyProxy.image.digest',
    'idempotencyProxy.admin.existingSecret',
    'traffic',
    'networkPolicy.enabled',
  ])
  t.same(missing(notes('idempotency-proxy', 'production')), ['traffic'])
  t.match(notes('idempotency-proxy', 'embedded'), 'MISSING: a second replica')
  t.match(notes('idempotency-proxy', 'existing-configmap'), /drain: \{ delay: 5s, timeout: 125s \}/)
  t.match(notes('examples/payments', 'no-rollout'), /WARNING: .*preStopSleepSeconds is 2/)
  t.match(notes('examples/payments', 'no-rollout'), /WARNING: .*drain\.hook is none/)
  t.notMatch(notes('examples/payments', 'native'), /WARNING/)
  t.notMatch(notes('examples/payments', 'off'), /MISSING|proxy/)

  const observability = (scenario: string) => missing(notes('idempotency-proxy-observability', scenario))
  t.ok(observability('bare').includes('additionalLabels.release'))
  t.match(notes('idempotency-proxy-observability', 'bare'), 'MISSING: the Prometheus operator')
  t.notOk(observability('stack').includes('additionalLabels.release'))
  t.notOk(observability('dashboards').includes('additionalLabels.release'))
})

/** What the library renders from the values that the Kustomize component and the admission policy stand for. */
function fromLibrary() {
  const own = ['service=orders', 'store.url=', 'store.existingSecret.name=idempotency-proxy']
  const sets = set(...own.map((one) => `idempotencyProxy.${one}`))
  return proxyIn(charts.render('examples/payments', ...sets))
}

void t.test('the Kustomize component adds the same sidecar to an unedited chart', async (t) => {
  const objects = kustomized(tools, join(HELM_FOLDER, 'examples/kustomize'))
  const orders = objects.filter(({ metadata }) => metadata.name === 'orders')
  const { container, pod } = proxyIn(orders)
  const { container: wanted, pod: shop } = fromLibrary()
  t.same({ ...container, image: '' }, { ...wanted, image: '' })
  t.match(container.image, /^registry\.example\.com\/.*@sha256:/)
  t.equal(pod.terminationGracePeriodSeconds, shop.terminationGracePeriodSeconds)
  t.same(pod.containers[0].lifecycle, shop.containers[0].lifecycle)
  t.same(pod.initContainers.map((one: Manifest) => one['name']).sort(), ['idempotency-proxy', 'migrate'])
  t.equal(pod.volumes.length, 2)
  t.equal(orders.find(({ kind }) => kind === 'Service')?.['spec'].ports[0].targetPort, 8080)
  const config = configurationIn(t, objects) as Config
  t.equal(config.service, 'shop.orders')
  t.same(config.ops.listen.address, { host: '0.0.0.0', port: 9901 })
  t.same(config.drain, { delay: 3000, timeout: 35_000 })
  const worker = objects.find(({ metadata }) => metadata.name === 'orders-worker')
  t.notMatch(JSON.stringify(worker), /idempotency/, 'a workload without the label is left alone')
})

void t.test('the expressions of the admission policy are valid CEL', async (t) => {
  const cel = createRequire(join(tools.models, 'package.json')).resolve('@bufbuild/cel')
  const { parse } = (await import(pathToFileURL(cel).href)) as { parse: (text: string) => unknown }
  const [{ matchConditions, mutations }] = policy().map((one) => one['spec']) as [Manifest]
  const expressions = [...matchConditions, ...mutations.map(({ jsonPatch }: Manifest) => jsonPatch)]
  t.equal(expressions.length, 7)
  for (const { expression } of expressions) t.ok(parse(expression))
  t.throws(() => parse('[JSONPatch{op: "add" path: "/x"}]'))
})

void t.test('the admission policy adds the same sidecar, once', async (t) => {
  const [map, binding] = policy()
  t.equal(binding?.['spec'].policyName, map?.metadata.name)
  const { container: wanted, pod: shop } = fromLibrary()
  const spec = { containers: [{ name: 'app', image: 'x' }] }
  const bare = { apiVersion: 'v1', kind: 'Pod', metadata: { name: 'p' }, spec }
  const pod = admitted(map as Manifest, bare)
  const [container] = pod['spec'].initContainers
  const unset = (name: string, annotation: string) => ({ name, value: `set the annotation ${annotation}` })
  const port = unset('APP_PORT', 'idempotency-proxy/app-port')
  const env = [wanted.env[0], port, unset('SERVICE', 'idempotency-proxy/service')]
  t.match(container, { ...wanted, image: 'registry.example.com/idempotency-proxy:0.1.0', env })
  t.equal(pod['spec'].terminationGracePeriodSeconds, shop.terminationGracePeriodSeconds)
  t.same(pod['spec'].containers[0].lifecycle, shop.containers[0].lifecycle)
  t.equal(typeErrors(tools, [['admitted', pod]]), '')
  t.same(admitted(map as Manifest, pod), pod, 'it is not added again')

  const busy = structuredClone(bare) as unknown as Manifest
  Object.assign(busy.metadata, {
    annotations: { 'idempotency-proxy/app-port': '8000', 'idempotency-proxy/service': 'orders' },
  })
  Object.assign(busy['spec'], {
    terminationGracePeriodSeconds: 600,
    volumes: [{ name: 'v', emptyDir: {} }],
    initContainers: [{ name: 'i' }],
  })
  busy['spec'].containers[0].lifecycle = { preStop: { exec: { command: ['x'] } } }
  const after = admitted(map as Manifest, busy)
  t.same(after['spec'].containers, busy['spec'].containers)
  t.equal(after['spec'].terminationGracePeriodSeconds, 600)
  const names = after['spec'].initContainers.map((one: Manifest) => one['name'])
  t.same(names, ['i', 'idempotency-proxy'])
  t.equal(after['spec'].volumes.length, 2)
  t.match(after['spec'].initContainers[1].env.slice(1), [{ value: '8000' }, { value: 'orders' }])
})

function policy(): Manifest[] {
  return manifests(readFileSync(join(HELM_FOLDER, 'mutating-admission-policy/policy.yaml'), 'utf8'))
}
