import type { Test } from 'tap'
import type { UpstreamConfig } from '../../src/config/config.ts'
import { Budget } from '../../src/runtime/limits.ts'
import { forwarder } from '../../src/upstream/forward.ts'
import type { Forward, UpstreamRequest } from '../../src/upstream/port.ts'
import {
  DATA,
  END_HEADERS,
  type FrameUpstream,
  fields,
  frame,
  frameUpstream,
  HEADERS,
} from '../support/frames.ts'
import { opened as openedFor } from './support.ts'

export async function opened(t: Test, url: string, more: Partial<UpstreamConfig> = {}) {
  const upstream = await openedFor(url, { http2: true, ...more })
  t.teardown(() => upstream.close())
  return upstream
}

export async function forwarding(t: Test, url: string, more: Partial<UpstreamConfig> = {}): Promise<Forward> {
  const { dispatcher } = await opened(t, url, more)
  const budget = new Budget(100_000_000)
  return forwarder(dispatcher, { timeout: () => more.timeout ?? 10_000, idleTimeout: 10_000, budget })
}

export const REQUEST: UpstreamRequest = {
  method: 'POST',
  target: '/p',
  headers: ['Host', 'a.test', 'X-A', '1'],
  body: Buffer.from('{}'),
  responseLimit: 10_000_000,
}

export const head = (stream: number, lines: readonly (readonly [string, string])[], flags = 0): Buffer =>
  frame(HEADERS, END_HEADERS | flags, stream, fields(lines))
export const ok = (stream: number, flags = 0): Buffer => head(stream, [[':status', '200']], flags)
export const data = (stream: number, text = 'ok', flags = 0): Buffer =>
  frame(DATA, flags, stream, Buffer.from(text))

/** More than `limits.responseHead`, and than a frame. */
export const BLOCK = fields(Array.from({ length: 8 }, (_, n) => [`x${n}`, 'x'.repeat(9000)] as const))

export type Said = (stream: number) => readonly Buffer[]

/** An upstream that says this about each request, and then, if asked, ends the connection. */
export function saying(t: Test, said: Said, ends = false): Promise<FrameUpstream> {
  return frameUpstream(t, {
    request(socket, stream) {
      socket.write(Buffer.concat(said(stream)))
      if (ends) socket.end()
    },
  })
}

/** One exchange; in the next turns of the event loop nothing is sent again. */
export async function proofOf(t: Test, upstream: FrameUpstream): Promise<string> {
  const forward = await forwarding(t, upstream.url)
  const result = await forward(REQUEST)
  for (let turn = 0; turn < 20; turn++) await new Promise((resolve) => setImmediate(resolve))
  t.equal(upstream.requests, 1, 'never sent again')
  if (result.proof !== 'responded') return result.proof
  const { status, body } = result.response
  return `${status} ${body.toString()}`
}
