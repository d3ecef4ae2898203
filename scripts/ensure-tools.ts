/**
 * `npm test`, `npm run verify` and `npm run check` run this first; `check` needs the packages of scripts/tools alone. The tests start their own servers, so they need three programs that npm does
 * not install: `redis-server` (7 or later), PostgreSQL and `openssl` (certificates for the TLS tests). `verify` also uses Chromium
 * for the operators' page, `prometheus` and `promtool` for dashboards and alerts, PgBouncer, grpcio, and psycopg2, RabbitMQ and NATS for examples; without them
 * tests are skipped. Run as root on a machine with apt-get, this installs what is missing; elsewhere it prints one sentence on what to do.
 * REDIS_SERVER, POSTGRES_BIN (a folder) and CHROMIUM point to other binaries.
 */
import { spawnSync } from 'node:child_process'
import { existsSync, rmSync, writeFileSync } from 'node:fs'
import { postgresBinaries } from '../test/support/postgres-binaries.ts'
import { installToolPackages } from './tool-packages.ts'

const OLDEST_REDIS = 7
/** Debian asks this script before it starts a newly installed service; 101 means "do not". */
const POLICY = '/usr/sbin/policy-rc.d'

interface Need {
  readonly name: string
  readonly debian: string
  /** Only `verify` needs it, and skips the tests that do. */
  readonly optional?: true
  /** What is wrong with the tool found; null: it is suitable. */
  missing(): string | null
}

const [purpose = 'test'] = process.argv.slice(2)
const verify = purpose === 'verify'

const needs: readonly Need[] = [
  {
    name: `redis-server ${OLDEST_REDIS} or newer`,
    debian: 'redis-server',
    missing() {
      const binary = process.env.REDIS_SERVER ?? 'redis-server'
      const version = output(binary, ['--version'])
      if (version === null) return `${binary} is missing or does not run`
      const major = /v=(\d+)\./.exec(version)?.[1]
      if (major === undefined) return `${binary} does not look like Redis: ${version}`
      return Number(major) >= OLDEST_REDIS ? null : `${binary} is version ${major}`
    },
  },
  {
    name: 'PostgreSQL',
    debian: 'postgresql',
    missing: () => (postgresBinaries() === null ? 'no folder with initdb and postgres was found' : null),
  },
  {
    name: 'openssl',
    debian: 'openssl',
    missing: () => (output('openssl', ['version']) === null ? 'openssl is not there' : null),
  },
  {
    name: 'chromium',
    debian: 'chromium',
    optional: true,
    missing: () =>
      process.env.CHROMIUM !== undefined || existsSync('/usr/bin/chromium')
        ? null
        : '/usr/bin/chromium is not there',
  },
  {
    name: 'PgBouncer',
    debian: 'pgbouncer',
    optional: true,
    missing: () =>
      ['pgbouncer', '/usr/sbin/pgbouncer'].every((binary) => output(binary, ['--version']) === null)
        ? 'pgbouncer is not there'
        : null,
  },
  {
    name: 'psycopg2 for Python',
    debian: 'python3-psycopg2',
    optional: true,
    missing: () =>
      ['python3', '/usr/bin/python3'].every((python) => output(python, ['-c', 'import psycopg2']) === null)
        ? 'no python3 has it'
        : null,
  },
  {
    name: 'grpc for Python',
    debian: 'python3-grpcio',
    optional: true,
    missing: () =>
      ['python3', '/usr/bin/python3'].every((python) => output(python, ['-c', 'import grpc']) === null)
        ? 'no python3 has it'
        : null,
  },
  ...['nginx', 'haproxy'].map(
    (name): Need => ({
      name,
      debian: name,
      optional: true,
      missing: () =>
        [name, `/usr/sbin/${name}`].every((binary) => output(binary, ['-v']) === null)
          ? `${name} is not there`
          : null,
    }),
  ),
  {
    name: 'RabbitMQ',
    debian: 'rabbitmq-server',
    optional: true,
    missing: () =>
      existsSync('/usr/lib/rabbitmq/bin/rabbitmq-server') ? null : 'rabbitmq-server is not there',
  },
  {
    name: 'NATS',
    debian: 'nats-server',
    optional: true,
    missing: () =>
      ['nats-server', '/usr/sbin/nats-server'].every((binary) => output(binary, ['--version']) === null)
        ? 'nats-server is not there'
        : null,
  },
  ...['prometheus', 'promtool'].map(
    (name): Need => ({
      name,
      debian: name,
      optional: true,
      missing: () => (output(name, ['--version']) === null ? `${name} is not there` : null),
    }),
  ),
]

function output(command: string, args: readonly string[]): string | null {
  const { status, stdout } = spawnSync(command, args, {
    encoding: 'utf8',
    stdio: ['ignore', 'pipe', 'ignore'],
  })
  return status === 0 ? stdout.trim() : null
}

function find(): { need: Need; found: string }[] {
  return needs.flatMap((need) => {
    if (need.optional && !verify) return []
    const found = need.missing()
    return found === null ? [] : [{ need, found }]
  })
}

function aptInstall(packages: readonly string[]): void {
  const guarded = !existsSync(POLICY)
  if (guarded) writeFileSync(POLICY, '#!/bin/sh\nexit 101\n', { mode: 0o755 })
  try {
    const env = { ...process.env, DEBIAN_FRONTEND: 'noninteractive' }
    const aptGet = (...args: string[]) =>
      spawnSync('apt-get', ['-o', 'DPkg::Lock::Timeout=120', ...args], {
        env,
        encoding: 'utf8',
        stdio: ['ignore', 'pipe', 'pipe'],
      })
    // An installation that was killed stops each later one until this.
    spawnSync('dpkg', ['--configure', '-a'], { env, stdio: 'ignore' })
    // The update may have been enough even if one of several sources could not be reached.
    aptGet('update', '-qq')
    // Up to Debian 12, promtool was part of the prometheus package.
    const known = packages.filter((name) => output('apt-cache', ['show', name]) !== null)
    const run = aptGet('install', '-y', '-qq', '--no-install-recommends', ...known)
    if (run.status !== 0) process.stderr.write(`${run.stdout ?? ''}${run.stderr ?? ''}`)
  } finally {
    if (guarded) rmSync(POLICY, { force: true })
  }
}

if (purpose !== 'test')
  try {
    installToolPackages()
  } catch (error) {
    process.stderr.write(`the packages of scripts/tools cannot be installed: ${(error as Error).message}\n`)
    process.exit(1)
  }

let lacking = purpose === 'check' ? [] : find()
const apt = process.getuid?.() === 0 && output('apt-get', ['--version']) !== null
// REDIS_SERVER is the user's choice: nothing is installed in its place.
const installable = lacking.filter(
  ({ need }) => need.debian !== 'redis-server' || process.env.REDIS_SERVER === undefined,
)
if (apt && installable.length > 0) {
  const packages = installable.map(({ need }) => need.debian)
  process.stdout.write(`installing ${packages.join(' and ')} for the tests\n`)
  aptInstall(packages)
  lacking = find()
}
const SKIPPED: Readonly<Record<string, string>> = {
  promtool: 'no promtool on the PATH: the tests of dashboards and alerts with it are skipped\n',
  chromium: 'no Chromium: the tests of the operators’ page are skipped (CHROMIUM names one elsewhere)\n',
  prometheus: 'no prometheus on the PATH: the tests of dashboards and alerts against it are skipped\n',
}
for (const { need } of lacking) process.stdout.write(SKIPPED[need.name] ?? '')
lacking = lacking.filter(({ need }) => !need.optional)
if (lacking.length > 0) {
  const what = lacking.map(({ need, found }) => `${need.name} (${found})`).join(' and ')
  process.stderr.write(
    `The tests need ${what}: install it with your system's package manager` +
      `${lacking.some(({ need }) => need.debian === 'redis-server') ? ', or set REDIS_SERVER to the binary' : ''}.\n`,
  )
  process.exitCode = 1
}
