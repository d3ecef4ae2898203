import { spawnSync } from 'node:child_process'
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import t from 'tap'
import { parse, stringify } from 'yaml'
import { formatConfigError, loadConfig } from '../../src/config/load.ts'
import { WITHOUT } from '../support/prometheus.ts'

const ROOT = fileURLToPath(new URL('../../', import.meta.url))

interface Service {
  readonly configs?: readonly { readonly source: string; readonly target: string }[]
  readonly ports?: readonly string[]
  readonly depends_on?: readonly string[] | Readonly<Record<string, unknown>>
  readonly command?: readonly string[]
  readonly environment?: Readonly<Record<string, string>>
}
const compose = read('docker-compose.yml') as {
  services: Record<string, Service>
  configs: Record<string, { file: string }>
}
const prometheus = read('examples/compose/prometheus.yml') as {
  global: { scrape_interval: string }
  rule_files: string[]
  scrape_configs: { dns_sd_configs: { names: string[]; port: number }[] }[]
}

function read(file: string): unknown {
  return parse(readFileSync(join(ROOT, file), 'utf8'))
}

/** Where the service finds a file of the repository. */
function targetOf(service: string, source: string): string | undefined {
  return compose.services[service]?.configs?.find((one) => one.source === source)?.target
}

void t.test('every file that a container gets is there, and every one there is is given', async (t) => {
  const given = Object.values(compose.services).flatMap(({ configs = [] }) =>
    configs.map(({ source }) => source),
  )
  t.same([...given].sort(), Object.keys(compose.configs).sort())
  for (const [name, { file }] of Object.entries(compose.configs)) t.ok(existsSync(join(ROOT, file)), name)
})

void t.test('only the proxy itself is published beyond loopback', async (t) => {
  const ports = Object.entries(compose.services).flatMap(([name, { ports = [] }]) =>
    ports.filter((port) => !port.startsWith('127.0.0.1:')).map((port) => `${name} ${port}`),
  )
  t.same(ports, ['proxy 8080:8080'])
})

void t.test('Prometheus finds the rules and every replica', async (t) => {
  t.same(prometheus.rule_files, [targetOf('prometheus', 'alerts')])
  const file = targetOf('prometheus', 'prometheus')
  t.ok(compose.services['prometheus']?.command?.includes(`--config.file=${file}`))
  const asked = prometheus.scrape_configs[0]?.dns_sd_configs[0]
  t.same(asked?.names, ['proxy'])
  const { ops } = read('examples/compose/proxy.yaml') as { ops: { listen: string } }
  t.equal(ops.listen, `0.0.0.0:${asked?.port}`)
})

void t.test('Grafana finds Prometheus and the dashboards', async (t) => {
  const { datasources } = read('examples/compose/grafana/datasources/prometheus.yaml') as {
    datasources: unknown[]
  }
  t.match(datasources, [
    {
      type: 'prometheus',
      url: 'http://prometheus:9090',
      isDefault: true,
      jsonData: { timeInterval: prometheus.global.scrape_interval },
    },
  ])
  const { providers } = read('examples/compose/grafana/dashboards/idempotency-proxy.yaml') as {
    providers: { options: { path: string } }[]
  }
  const folder = providers[0]?.options.path
  for (const name of ['overview', 'safety']) {
    t.equal(compose.configs[name]?.file, `dashboards/${name}.json`)
    t.equal(targetOf('grafana', name), `${folder}/${name}.json`)
  }
  t.equal(
    compose.services['grafana']?.environment?.['GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH'],
    targetOf('grafana', 'overview'),
  )
  t.match(targetOf('grafana', 'grafana-datasource'), /^\/etc\/grafana\/provisioning\/datasources\//)
  t.match(targetOf('grafana', 'grafana-dashboards'), /^\/etc\/grafana\/provisioning\/dashboards\//)
})

void t.test('the proxy takes its configuration', async (t) => {
  const file = 'examples/compose/proxy.yaml'
  const loaded = loadConfig({
    file,
    text: readFileSync(join(ROOT, file), 'utf8'),
    env: compose.services['proxy']?.environment ?? {},
    flags: {},
  })
  t.ok(loaded.ok, loaded.ok ? file : loaded.errors.map(formatConfigError).join('\n'))
})

void t.test('promtool takes the configuration of Prometheus', { skip: WITHOUT }, async (t) => {
  const directory = mkdtempSync(join(tmpdir(), 'compose-'))
  t.teardown(() => rmSync(directory, { recursive: true }))
  const file = join(directory, 'prometheus.yml')
  writeFileSync(file, stringify({ ...prometheus, rule_files: [join(ROOT, 'alerts/rules.yaml')] }))
  const { status, stdout, stderr } = spawnSync('promtool', ['check', 'config', file], { encoding: 'utf8' })
  t.equal(status, 0, `${stdout}${stderr}`)
  t.match(stdout, /17 rules found/)
})

const COMPOSE = spawnSync('docker', ['compose', 'version']).status === 0
void t.test(
  'docker compose takes the file',
  { skip: COMPOSE ? false : 'docker compose is not there' },
  async (t) => {
    const run = spawnSync('docker', ['compose', 'config', '--quiet'], { cwd: ROOT, encoding: 'utf8' })
    t.equal(run.status, 0, run.stderr)
    t.equal(run.stderr, '', 'without a warning')
  },
)
