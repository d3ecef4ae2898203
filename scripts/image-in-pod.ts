/**
 * Runs the image as the library chart's sidecar: what Helm renders becomes a container (user, read-only root, capabilities, memory
 * limit, mounts, environment, arguments), with a Redis that serves TLS under a private CA. It is then loaded as `bench` does and stopped as
 * the chart's hooks do. Needs a Docker engine, the image (scripts/image-test.sh builds it), redis-server and openssl; not part of
 * `npm test`.
 *
 *   node scripts/image-in-pod.ts [--image idempotency-proxy:test] [--seconds 15]
 */
import { spawn, spawnSync } from 'node:child_process'
import { chmodSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { setTimeout as wait } from 'node:timers/promises'
import { parseArgs } from 'node:util'
import { LARGE, SMALL } from '../bench/bodies.ts'
import { load } from '../bench/load.ts'
import { residentMb } from '../bench/machine.ts'
import { certificate } from '../test/support/certificates.ts'
import { Charts, type Manifest } from '../test/support/charts.ts'
import { freePort, RedisServer } from '../test/support/redis.ts'
import { helmTools } from './helm-tools.ts'

const { values: flags } = parseArgs({
  options: {
    image: { type: 'string', default: 'idempotency-proxy:test' },
    seconds: { type: 'string', default: '15' },
  },
})

const tools = helmTools()
if (typeof tools === 'string') throw new Error(tools)
using charts = new Charts(tools.helm['Helm 4'])
using authority = certificate('IP:127.0.0.1')
await using redis = await RedisServer.start({ tls: dirname(authority.certFile) })
const folder = mkdtempSync(join(tmpdir(), 'pod-'))
chmodSync(folder, 0o755)
const upstreamPort = await freePort()
const upstream = spawn(
  process.execPath,
  [join(import.meta.dirname, '../bench/servers/upstream.ts'), String(upstreamPort)],
  {
    stdio: 'inherit',
  },
)
const containers: string[] = []
let failed = false

function check(what: string, found: unknown, wanted: unknown): void {
  const ok = JSON.stringify(found) === JSON.stringify(wanted)
  failed ||= !ok
  say(ok ? 'ok' : 'NOT TRUE', what, ok ? String(found) : `${String(found)}, wanted ${String(wanted)}`)
}

function say(verdict: string, what: string, value: string): void {
  process.stdout.write(`  ${verdict.padEnd(9)} ${what.padEnd(62)} ${value}\n`)
}

function docker(...args: readonly string[]): string {
  const { status, stdout, stderr } = spawnSync('docker', args, { encoding: 'utf8' })
  if (status !== 0) throw new Error(`docker ${args[0]}: ${stderr}`)
  return stdout.trim()
}

interface Running {
  readonly id: string
  readonly port: number
  readonly ops: string
  readonly hook: readonly string[]
  readonly memory: string
}

/** Starts the rendered sidecar as a container and waits for its startup probe. */
async function start(hook: string): Promise<Running> {
  const [port, opsPort, adminPort] = [await freePort(), await freePort(), await freePort()]
  const sets = {
    port,
    opsPort,
    'admin.port': adminPort,
    'admin.existingSecret.name': 'token',
    'upstream.port': upstreamPort,
    service: 'payments',
    'store.url': redis.url,
    'ca.existingConfigMap': 'ca',
    'spool.enabled': true,
    'drain.hook': hook,
    // As in the bench: high enough for a busy machine.
    'config.store.timeout': '5s',
  }
  const args = Object.entries(sets).flatMap(([name, value]) => ['--set', `idempotencyProxy.${name}=${value}`])
  const objects = charts.render('examples/payments', '--set', `port=${upstreamPort}`, ...args)
  const [pod] = objects.filter(({ kind }) => kind === 'Deployment').map((one) => one['spec'].template.spec)
  const [sidecar] = pod.initContainers
  const { runAsUser, runAsGroup, readOnlyRootFilesystem, capabilities, allowPrivilegeEscalation } =
    sidecar.securityContext
  const memory = sidecar.resources.limits.memory as string
  const bytes = String(Number(memory.replace('Mi', '')) * 1024 ** 2)
  const began = performance.now()
  const id = docker(
    'run',
    '-d',
    '--network',
    'host',
    '--user',
    `${runAsUser}:${runAsGroup}`,
    ...(readOnlyRootFilesystem ? ['--read-only'] : []),
    ...capabilities.drop.flatMap((name: string) => ['--cap-drop', name]),
    ...(allowPrivilegeEscalation ? [] : ['--security-opt', 'no-new-privileges']),
    '--memory',
    bytes,
    '--memory-swap',
    bytes,
    ...sidecar.env.flatMap(({ name, value }: { name: string; value: string }) => ['-e', `${name}=${value}`]),
    ...sidecar.volumeMounts.flatMap((mount: Manifest) => ['-v', mounted(mount, pod.volumes, objects)]),
    flags.image,
    ...sidecar.args,
  )
  containers.push(id)
  const ops = `http://127.0.0.1:${opsPort}`
  for (;;) {
    const status = await fetch(`${ops}${sidecar.startupProbe.httpGet.path}`).then(
      (response) => response.status,
      () => 0,
    )
    if (status === 200) break
    if (docker('inspect', '-f', '{{.State.Running}}', id) !== 'true') throw new Error(docker('logs', id))
    await wait(20)
  }
  say('', 'docker run to a satisfied start-up probe', `${Math.round(performance.now() - began)} ms`)
  return { id, port, ops, memory, hook: sidecar.lifecycle.preStop.exec.command }
}

/** The `-v` option for a mount, with the content that Kubernetes would provide. */
function mounted(mount: Manifest, volumes: readonly Manifest[], objects: readonly Manifest[]): string {
  const { name, mountPath, readOnly } = mount as unknown as Record<string, string>
  const volume = volumes.find((one) => one['name'] === name) as Manifest
  const path = join(folder, `${containers.length}-${name}`)
  mkdirSync(path, { recursive: true })
  if (volume['emptyDir'] !== undefined) chmodSync(path, 0o777)
  else if (volume['secret'] !== undefined) writeFileSync(join(path, 'token'), 'a-token-of-the-cluster')
  else if (volume['configMap'].name === 'ca') writeFileSync(join(path, 'ca.crt'), authority.cert)
  else {
    const map = objects.find(({ metadata }) => metadata.name === volume['configMap'].name)
    for (const [file, text] of Object.entries(map?.['data'])) writeFileSync(join(path, file), String(text))
  }
  return `${path}:${mountPath}${readOnly ? ':ro' : ''}`
}

const request = (kind: 'small' | 'large', key: string): Buffer => {
  const body = kind === 'small' ? SMALL : LARGE
  const lines = [
    `POST /v1/${kind} HTTP/1.1`,
    'Host: api.example.com',
    'Authorization: Bearer x',
    'Content-Type: application/json',
    `Content-Length: ${Buffer.byteLength(body)}`,
    `Idempotency-Key: ${key}`,
  ]
  return Buffer.from(`${lines.join('\r\n')}\r\n\r\n${body}`)
}

async function loaded({ id, port, ops, memory }: Running): Promise<void> {
  const pid = Number(docker('inspect', '-f', '{{.State.Pid}}', id))
  say('', 'resident at rest', `${residentMb([pid], 'VmRSS').toFixed(0)} MB`)
  // Like the kubelet: three late answers in a row end the container.
  let worst = 0
  const done = new AbortController()
  const probes = (async () => {
    while (!done.signal.aborted) {
      const began = performance.now()
      const alive = await fetch(`${ops}/livez`, { signal: AbortSignal.timeout(10_000) }).then(
        ({ ok }) => ok,
        () => false,
      )
      worst = Math.max(worst, alive ? performance.now() - began : Number.POSITIVE_INFINITY)
      await wait(500)
    }
  })()
  for (const [kind, connections] of [
    ['small', 64],
    ['large', 256],
  ] as const) {
    const { requests, perSecond } = await load({
      port,
      connections,
      milliseconds: Number(flags.seconds) * 1000,
      request: (n) => request(kind, `${kind}-${n}`),
      status: 201,
      cpu: () => 0,
    })
    const most = residentMb([pid], 'VmHWM').toFixed(0)
    say(
      '',
      `${requests} first executions, ${kind}, ${connections} connections`,
      `${perSecond.toFixed(0)}/s, at most ${most} MB so far`,
    )
  }
  done.abort()
  await probes
  check('the longest wait for /livez was under 3 s (its timeout)', worst < 3000, true)
  check(`ended by the kernel at ${memory}`, docker('inspect', '-f', '{{.State.OOMKilled}}', id), 'false')
  check(
    'still the first process',
    docker('inspect', '-f', '{{.State.Running}} {{.RestartCount}}', id),
    'true 0',
  )
}

const status = (url: string): Promise<number> =>
  fetch(url).then(
    (response) => response.status,
    () => 0,
  )

try {
  process.stdout.write('hook signal, Redis with TLS, a spool, a token\n')
  const first = await start('signal')
  check('uid of the process', docker('exec', first.id, 'node', '-p', 'process.getuid()'), '65532')
  const pid = docker('inspect', '-f', '{{.State.Pid}}', first.id)
  check(
    'effective capabilities',
    /^CapEff:\s*(\w+)/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))?.[1],
    '0000000000000000',
  )
  await loaded(first)
  docker('exec', first.id, ...first.hook)
  check('/readyz after the hook', await status(`${first.ops}/readyz`), 503)
  check('exit code after the hook', docker('wait', first.id), '0')

  process.stdout.write('hook drain\n')
  const second = await start('drain')
  docker('exec', second.id, ...second.hook)
  check('/readyz after the hook', await status(`${second.ops}/readyz`), 503)
  const { status: served, headers } = await fetch(`http://127.0.0.1:${second.port}/v1/small`, {
    method: 'POST',
    headers: { 'idempotency-key': 'small-1', authorization: 'Bearer x', 'content-type': 'application/json' },
    body: SMALL,
  })
  check(
    'a retry after the hook, in another container',
    [served, headers.get('idempotent-replayed'), headers.get('connection')].join(' '),
    '201 true close',
  )
  docker('kill', '-s', 'TERM', second.id)
  check('exit code after SIGTERM', docker('wait', second.id), '0')
} finally {
  upstream.kill()
  if (containers.length > 0) spawnSync('docker', ['rm', '-fv', ...containers])
  rmSync(folder, { recursive: true, force: true })
}
process.stdout.write(failed ? 'image-in-pod: FAILED\n' : 'image-in-pod: all true\n')
process.exitCode = failed ? 1 : 0
