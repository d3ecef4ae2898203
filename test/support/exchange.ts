import type { Socket } from 'node:net'
import { until } from './e2e.ts'
import { proxyInProcess, type TestProxy } from './proxy.ts'
import type { RawAnswer } from './raw.ts'
import { type TcpStub, tcpStub, wholeRequest } from './upstream.ts'

export interface ProxyOptions {
  /** Further members of `upstream`, in flow-style YAML. */
  readonly upstream?: string
  /** The routes, in flow-style YAML; by default one that protects `/p`. */
  readonly routes?: string
  /** Further top-level lines. */
  readonly more?: string
}

/** An in-process proxy on a memory store, in front of the given upstream. */
export function proxyBefore(
  upstream: { readonly url: string },
  options: ProxyOptions = {},
): Promise<TestProxy> {
  return proxyInProcess(
    [
      `upstream: { url: "${upstream.url}"${options.upstream === undefined ? '' : `, ${options.upstream}`} }`,
      'store: { url: "memory:" }',
      `routes: [${options.routes ?? '{ name: r, match: { path: /p } }'}]`,
      options.more ?? '',
    ].join('\n'),
  )
}

export interface Peer extends TcpStub {
  /** The text of every whole request so far; its length is N. */
  readonly requests: string[]
}

/** An upstream that runs a script for each whole request. */
export async function scriptedPeer(
  answer: (socket: Socket, request: string, n: number) => void,
): Promise<Peer> {
  const requests: string[] = []
  const stub = await tcpStub((socket) => {
    const next = (): void =>
      void wholeRequest(socket).then((request) => {
        requests.push(request)
        answer(socket, request, requests.length)
        next()
      })
    next()
  })
  return Object.assign(stub, { requests })
}

/** An upstream that answers every request with these latin1 bytes. */
export function answering(bytes: string): Promise<Peer> {
  return scriptedPeer((socket) => void socket.write(bytes, 'latin1'))
}

/** The values of every line of this name (lower case). */
export function values(answer: RawAnswer, name: string): string[] {
  return answer.headers.filter((_, i) => i % 2 === 1 && answer.headers[i - 1]?.toLowerCase() === name)
}

/** The lines without those of these names (lower case). */
export function without(answer: RawAnswer, ...names: string[]): string[] {
  const kept: string[] = []
  for (let i = 0; i + 1 < answer.headers.length; i += 2) {
    const [name = '', value = ''] = answer.headers.slice(i, i + 2)
    if (!names.includes(name.toLowerCase())) kept.push(name, value)
  }
  return kept
}

export interface Problem {
  readonly type: string
  readonly title: string
  readonly status: number
  readonly detail: string
  readonly instance?: string
  readonly code: string
  readonly retry: string
  readonly originalStatus?: number
  readonly location?: string
}

/** The problem in the response; throws if it is not one or lacks a header that every problem has. */
export function problemOf(answer: RawAnswer): Problem {
  if (values(answer, 'content-type')[0] !== 'application/problem+json')
    throw new Error(`no problem: ${answer.bytes.toString('latin1').slice(0, 400)}`)
  const problem = JSON.parse(answer.body.toString()) as Problem
  const lines = [values(answer, 'idempotency-retry'), values(answer, 'cache-control')]
  if (JSON.stringify(lines) !== JSON.stringify([[problem.retry], ['no-store']]))
    throw new Error(`not the lines of a problem: ${answer.bytes.toString('latin1').slice(0, 400)}`)
  return problem
}

/** Resolves when a sample of /metrics reaches the value. */
export function metricIs(proxy: TestProxy, sample: string, value: number): Promise<void> {
  return until(async () => (await proxy.metric(sample)) === value)
}

/** Store operations so far, without those of the sweeper. */
export async function storeCalls(proxy: TestProxy): Promise<number> {
  const text = await (await fetch(`${proxy.adminUrl}/metrics`)).text()
  const lines = text
    .split('\n')
    .filter((line) => line.startsWith('idempotency_store_operation_seconds_count'))
  // Each sweep asks for the time and for due records.
  const weight = (line: string): number => (line.includes('operation="due"') ? -1 : 1)
  return lines.reduce((sum, line) => sum + weight(line) * Number(line.slice(line.lastIndexOf(' '))), 0)
}
