import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import type { Test } from 'tap'
import { dispatch } from '../../src/commands/dispatch.ts'
import { adminYaml } from './admin.ts'
import { gate, newKey, send, tempDir } from './e2e.ts'
import { proxyInProcess, type TestProxy } from './proxy.ts'
import { serviceLine } from './service.ts'
import { type UpstreamStub, upstreamStub } from './upstream.ts'

export interface Said {
  readonly code: number
  readonly out: string
  readonly err: string
}

/**
 * Runs a command in this process. `answers`: what the user types at the terminal; without it there is no terminal. `isTerminal`:
 * errors go to one. `heard` gets what goes to standard error, at once.
 */
export async function command(
  words: readonly string[],
  answers?: readonly string[],
  env: Readonly<Record<string, string>> = {},
  isTerminal = false,
  heard: (text: string) => void = () => {},
): Promise<Said> {
  let out = ''
  let err = ''
  const left = [...(answers ?? [])]
  const code = await dispatch(words, {
    out: (text) => void (out += text),
    err: (text) => {
      err += text
      heard(text)
    },
    env,
    isTerminal,
    ask:
      answers === undefined
        ? null
        : async (question) => {
            err += question
            return left.shift() ?? ''
          },
  })
  return { code, out, err }
}

export interface Operated {
  readonly proxy: TestProxy
  readonly upstream: UpstreamStub
  readonly dir: string
  /** Options that point a command to the proxy or its store. */
  readonly where: { readonly admin: readonly string[]; readonly config: readonly string[] }
  readonly audit: string
  /** Lets `/gated` answer. */
  readonly finish: () => void
  /** Makes a record whose outcome is unknown; returns its id. */
  readonly unknown: (key?: string) => Promise<string>
}

/** A proxy and its configuration file. The upstream breaks off at `/break`, answers 503 at `/busy`, waits at `/gated`, and executes the rest. */
export async function operated(t: Test, store: string, more = '', timeout = '500ms'): Promise<Operated> {
  const dir = tempDir(t)
  const { opened, open } = gate()
  const upstream = await upstreamStub(async (seen, response) => {
    if (seen.target === '/break') return void response.destroy()
    if (seen.target === '/gated') await opened
    if (seen.target === '/busy') return void response.writeHead(503, { 'Retry-After': '1' }).end()
    response.writeHead(201, { 'Set-Cookie': 'sid=secret', 'Content-Type': 'text/plain' }).end('stored-body')
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const audit = join(dir, 'audit.log')
  const admin = adminYaml(t)
  const yaml = [
    `audit: { file: ${audit} }`,
    `upstream: { url: "${upstream.url}" }`,
    `store: { url: "${store}", timeout: ${timeout} }`,
    'routes: [{ name: pay, match: { path: /pay } }, { name: break, match: { path: /break } }]',
    more,
  ].join('\n')
  const service = serviceLine(yaml)
  const file = join(dir, 'proxy.yaml')
  writeFileSync(file, `${service}${yaml}`)
  const proxy = await proxyInProcess(`${admin}\n${yaml}`)
  t.teardown(() => proxy.drain())
  t.teardown(open)
  const token = /tokenFile: "?([^",}\s]+)/.exec(admin)?.[1] as string
  const unknown = async (key = newKey()): Promise<string> => {
    const broken = await send(proxy, key, { path: '/break' })
    t.equal(broken.code, 'upstream_failed')
    return (JSON.parse(broken.body) as { instance: string }).instance
  }
  const where = {
    admin: ['--admin', proxy.adminUrl, '--token-file', token],
    config: ['--config', file],
  }
  return { proxy, upstream, dir, where, audit, finish: open, unknown }
}
