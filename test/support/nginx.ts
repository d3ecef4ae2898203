import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs'
import { connect } from 'node:net'
import { join } from 'node:path'
import type { Test } from 'tap'
import { tempDir, until } from './e2e.ts'
import { freePort } from './redis.ts'

/** Debian installs it in a folder that is not on every PATH. */
const BINARY = [process.env['NGINX'] ?? 'nginx', '/usr/sbin/nginx'].find(
  (one) => spawnSync(one, ['-v']).status === 0,
)

export const NO_NGINX = BINARY === undefined ? 'nginx is not installed (or set NGINX to the binary)' : false

/** A file of examples/nginx with some words replaced; each of them must occur. */
export function example(name: string, changes: Readonly<Record<string, string>>): string {
  let text = readFileSync(new URL(`../../examples/nginx/${name}`, import.meta.url), 'utf8')
  for (const [from, to] of Object.entries(changes)) {
    if (!text.includes(from)) throw new Error(`${name} has no ${from}`)
    text = text.replaceAll(from, to)
  }
  return text
}

/** A real nginx with this `http` block, in which `LISTEN` stands for its port; it ends with the test. */
export async function nginx(t: Test, http: string): Promise<{ readonly url: string }> {
  const folder = tempDir(t)
  const port = await freePort()
  const file = join(folder, 'nginx.conf')
  const temporary = ['client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi']
  for (const what of temporary) mkdirSync(join(folder, what))
  writeFileSync(
    file,
    `daemon off; worker_processes 1; pid ${folder}/pid; error_log ${folder}/error.log warn;
${process.getuid?.() === 0 ? 'user root;' : ''}
events {}
http {
  access_log off;
  ${temporary.map((what) => `${what}_temp_path ${folder}/${what};`).join(' ')}
  ${http.replaceAll('LISTEN', `127.0.0.1:${port}`)}
}
`,
  )
  const child = spawn(BINARY as string, ['-p', folder, '-e', `${folder}/error.log`, '-c', file], {
    stdio: 'ignore',
  })
  const exited = once(child, 'exit')
  t.teardown(async () => {
    child.kill('SIGTERM')
    await exited
  })
  await until(() => {
    if (child.exitCode !== null) throw new Error(readFileSync(`${folder}/error.log`, 'utf8'))
    return answers(port)
  })
  return { url: `http://127.0.0.1:${port}` }
}

/** Whether something accepts connections there. */
export function answers(port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = connect(port, '127.0.0.1', () => resolve(true))
    socket.on('error', () => resolve(false))
    socket.on('connect', () => socket.destroy())
  })
}
