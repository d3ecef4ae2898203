import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import t, { type Test } from 'tap'
import { parse, stringify } from 'yaml'
import type { Config } from '../../src/config/config.ts'
import { load } from '../config/support.ts'
import { RULES, RULES_FILE } from '../support/alerts.ts'
import { configFile, tempDir, until } from '../support/e2e.ts'
import { WITHOUT } from '../support/prometheus.ts'
import { proxyProcess } from '../support/proxy.ts'

const ROOT = fileURLToPath(new URL('../../', import.meta.url))
const DOCKERFILE = readFileSync(join(ROOT, 'Dockerfile'), 'utf8')

interface Service {
  readonly configs?: readonly { readonly source: string; readonly target: string }[]
  readonly ports?: readonly string[]
  readonly depends_on?: Readonly<Record<string, { readonly condition: string }>>
  readonly entrypoint?: readonly string[]
  readonly command?: readonly string[]
  readonly volumes?: readonly string[]
  readonly mem_limit?: string
  readonly healthcheck?: { readonly test?: readonly string[] }
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

void t.test('every config that a container uses exists, and every config is used', async (t) => {
  const given = Object.values(compose.services).flatMap(({ configs = [] }) =>
    configs.map(({ source }) => source),
  )
  t.same([...given].sort(), Object.keys(compose.configs).sort())
  for (const [name, { file }] of Object.entries(compose.configs)) t.ok(existsSync(join(ROOT, file)), name)
})

const mebibytes = (text: string | undefined): number => Number(/^(\d+)mb?$/.exec(text ?? '')?.[1])

void t.test('the memory limit of the proxy fits its heap and its bodies', async (t) => {
  const heap = Number(/^ENTRYPOINT .*--max-old-space-size=(\d+)/m.exec(DOCKERFILE)?.[1])
  const { buffered } = configuration(t).limits
  const limit = mebibytes(compose.services['proxy']?.mem_limit)
  t.ok(limit > heap + buffered / 1024 ** 2, `${limit} MiB is more than heap and bodies`)
})

/** The proxy's, with a token made as compose makes it. */
function configuration(t: Test): Config {
  const file = 'examples/compose/proxy.yaml'
  const folder = tempDir(t)
  makeToken(t, folder)
  const env = { ...compose.services['proxy']?.environment, ADMIN_TOKEN_FILE: join(folder, 'admin-token') }
  return load(readFileSync(join(ROOT, file), 'utf8'), { file, env })
}

/** Runs what the service `admin-token` runs, on a folder of the test. */
function makeToken(t: Test, folder: string): string {
  const { entrypoint = [], command = [] } = compose.services['admin-token'] as Service
  const [bash = '', ...words] = [...entrypoint, ...command].map((one) => one.replaceAll('/data', folder))
  const { status, stderr } = spawnSync(bash, words, { encoding: 'utf8' })
  t.same([status, stderr], [0, ''])
  return readFileSync(join(folder, 'admin-token'), 'utf8')
}

void t.test('the first start makes a token, and every later one keeps it', async (t) => {
  const folder = tempDir(t)
  const token = makeToken(t, folder)
  t.match(token, /^[A-Za-z0-9+/]{43}=$/)
  t.equal(makeToken(t, folder), token)
  t.equal(statSync(join(folder, 'admin-token')).mode & 0o777, 0o600)
  t.same(readdirSync(folder), ['admin-token'])
  t.not(makeToken(t, tempDir(t)), token)
  t.equal(compose.services['proxy']?.depends_on?.['admin-token']?.condition, 'service_completed_successfully')

  const file = compose.services['proxy']?.environment?.['ADMIN_TOKEN_FILE'] as string
  t.same(compose.services['proxy']?.volumes, [`admin:${dirname(file)}:ro`])
  t.same(compose.services['admin-token']?.volumes, ['admin:/data'])
  t.ok(
    readFileSync(join(ROOT, 'docker-compose.yml'), 'utf8').includes(`docker compose exec proxy cat ${file}`),
  )
})

void t.test("the health check starts no Node, and its exit code follows the response's status", async (t) => {
  for (const [name, { healthcheck }] of Object.entries(compose.services))
    t.notMatch(healthcheck?.test ?? [], /\bnode\b/, name)
  t.match(DOCKERFILE, /^HEALTHCHECK .* CMD \["healthcheck"\]$/m)
  t.match(DOCKERFILE, /^COPY scripts\/healthcheck\.sh \/usr\/local\/bin\/healthcheck$/m)

  const check = async (...urls: string[]): Promise<number> => {
    const child = spawn('bash', ['scripts/healthcheck.sh', ...urls], { cwd: ROOT, stdio: 'ignore' })
    const [code] = await once(child, 'exit')
    return code
  }
  const asked: string[] = []
  const server = createServer((req, res) => {
    asked.push(`${req.url} ${req.headers.host}`)
    if (req.url !== '/silent') res.writeHead(Number(req.url?.slice(1)) || 204).end('x'.repeat(100_000))
  })
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve))
  t.teardown(() => {
    server.closeAllConnections()
    server.close()
  })
  const { port } = server.address() as AddressInfo
  const at = `127.0.0.1:${port}`
  t.equal(await check(`http://${at}/200`), 0)
  t.same(asked, [`/200 ${at}`])
  for (const path of ['/503', '/404', '', '/silent']) t.equal(await check(`http://${at}${path}`), 1, path)
  t.equal(await check('http://127.0.0.1:1/livez'), 1, 'nobody listens')

  const yaml = `upstream: { url: "http://${at}" }\nstore: { url: "memory:" }\n`
  await using proxy = await proxyProcess(configFile(tempDir(t), yaml))
  // It takes an answer that is late for none, so on a busy machine it may need several tries, as Docker makes them.
  for (const path of ['/livez', '/readyz'])
    await until(async () => (await check(`${proxy.adminUrl}${path}`)) === 0)
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

void t.test('the proxy accepts its configuration', async (t) => {
  const { service, listen, admin, ops } = configuration(t)
  t.equal(service, 'payments')
  t.same(
    [listen, admin.listen, ops.listen].map((one) => String(one.address?.port)).toSorted(),
    compose.services['proxy']?.ports?.map((one) => one.split(':').at(-1)).toSorted(),
    'it listens on the published ports',
  )
})

void t.test('promtool accepts the configuration of Prometheus', { skip: WITHOUT }, async (t) => {
  const directory = mkdtempSync(join(tmpdir(), 'compose-'))
  t.teardown(() => rmSync(directory, { recursive: true }))
  const file = join(directory, 'prometheus.yml')
  writeFileSync(file, stringify({ ...prometheus, rule_files: [RULES_FILE] }))
  const { status, stdout, stderr } = spawnSync('promtool', ['check', 'config', file], { encoding: 'utf8' })
  t.equal(status, 0, `${stdout}${stderr}`)
  t.match(stdout, `${RULES.length} rules found`)
})
