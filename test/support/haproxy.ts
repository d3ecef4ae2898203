import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { text } from 'node:stream/consumers'
import type { Test } from 'tap'
import { tempDir, until } from './e2e.ts'
import { answers } from './nginx.ts'
import { freePort } from './redis.ts'

/** Debian installs it in a folder that is not on every PATH. */
const BINARY = ['haproxy', '/usr/sbin/haproxy'].find((one) => spawnSync(one, ['-v']).status === 0)

export const NO_HAPROXY = BINARY === undefined ? 'HAProxy is not installed' : false

/** A server of the example: where traffic goes, and where its /readyz is. */
export interface Behind {
  readonly port: number
  readonly readyPort: number
}

/** A real HAProxy with examples/haproxy/haproxy.cfg in front of two servers; it ends with the test. */
export async function haproxy(t: Test, a: Behind, b: Behind): Promise<{ readonly url: string }> {
  const port = await freePort()
  const file = join(tempDir(t), 'haproxy.cfg')
  let config = readFileSync(new URL('../../examples/haproxy/haproxy.cfg', import.meta.url), 'utf8')
  for (const [from, to] of [
    ['bind 127.0.0.1:8000', `bind 127.0.0.1:${port}`],
    ['127.0.0.1:8080 port 9901', `127.0.0.1:${a.port} port ${a.readyPort}`],
    ['127.0.0.1:8081 port 9902', `127.0.0.1:${b.port} port ${b.readyPort}`],
  ] as const) {
    if (!config.includes(from)) throw new Error(`haproxy.cfg has no ${from}`)
    config = config.replaceAll(from, to)
  }
  writeFileSync(file, config)
  const child = spawn(BINARY as string, ['-db', '-f', file], { stdio: ['ignore', 'ignore', 'pipe'] })
  const said = text(child.stderr)
  const exited = once(child, 'exit')
  t.teardown(async () => {
    child.kill('SIGTERM')
    await exited
  })
  await until(async () => {
    if (child.exitCode !== null) throw new Error(await said)
    return answers(port)
  })
  return { url: `http://127.0.0.1:${port}` }
}
