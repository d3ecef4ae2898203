import { spawnSync } from 'node:child_process'
import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import type { Config } from '../../src/config/config.ts'
import { load } from '../config/support.ts'
import { tempDir } from '../support/e2e.ts'

/** What docs/guides/ecs-and-systemd.md deploys. */
const UNIT = readFileSync('examples/systemd/idempotency-proxy.service', 'utf8')

function configOf(t: Test, file: string): Config {
  const token = join(tempDir(t), 'token')
  writeFileSync(token, 'a-token-of-this-test')
  const env = { REDIS_URL: 'redis://127.0.0.1:6379/0', ADMIN_TOKEN_FILE: token }
  return load(readFileSync(file, 'utf8'), { file, env })
}

/** How long a stop by SIGTERM may take, in seconds. */
function secondsToStop({ drain }: Config): number {
  return (drain.delay + drain.timeout) / 1000
}

const NO_SYSTEMD =
  spawnSync('systemd-analyze', ['--version']).status !== 0 && 'systemd-analyze is not installed'

void t.test('systemd accepts the unit', { skip: NO_SYSTEMD }, async (t) => {
  const file = join(tempDir(t), 'idempotency-proxy.service')
  writeFileSync(file, UNIT.replaceAll('/usr/local/bin/idempotency-proxy', process.execPath))
  const { status, stdout, stderr } = spawnSync('systemd-analyze', ['verify', file], { encoding: 'utf8' })
  t.strictSame([status, stdout, stderr], [0, '', ''])
})

void t.test('the unit waits for the whole drain of its configuration', async (t) => {
  const stop = Number(/^TimeoutStopSec=(\d+)$/m.exec(UNIT)?.[1])
  const needed = secondsToStop(configOf(t, 'examples/systemd/proxy.yaml'))
  t.ok(stop > needed, `${stop} s, ${needed} s needed`)
})

interface Container {
  readonly name: string
  readonly dependsOn?: readonly { readonly containerName: string }[]
  readonly portMappings?: readonly { readonly containerPort: number }[]
  readonly environment?: readonly { readonly name: string; readonly value: string }[]
  readonly stopTimeout: number
}

void t.test('the ECS task fits its configuration', async (t) => {
  const config = configOf(t, 'examples/ecs/proxy.yaml')
  const task = JSON.parse(readFileSync('examples/ecs/task-definition.json', 'utf8')) as {
    readonly containerDefinitions: readonly Container[]
  }
  const [app, proxy] = task.containerDefinitions as [Container, Container]
  const ports = [config.listen, config.ops.listen].map((listen) => listen.address?.port)
  t.strictSame(
    proxy.portMappings?.map(({ containerPort }) => containerPort),
    ports,
  )
  t.ok(proxy.stopTimeout > secondsToStop(config), `${proxy.stopTimeout} s`)
  t.ok(proxy.stopTimeout <= 120, 'the most that Fargate allows')
  t.strictSame(
    proxy.dependsOn?.map(({ containerName }) => containerName),
    [app.name],
    'dependents are stopped first',
  )
  const where = Object.fromEntries(app.environment?.map(({ name, value }) => [name, value]) ?? [])
  t.equal(
    `http://${where['HOST']}:${where['PORT']}`,
    config.upstream.url,
    'the app listens on loopback alone',
  )
})
