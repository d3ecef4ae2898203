import type { Test } from 'tap'
import { answering, metricIs, type ProxyOptions, proxyBefore, values } from './exchange.ts'
import { sent } from './front.ts'
import { post, type RawAnswer, rawRequest } from './raw.ts'

const MARK = 'idempotent-replayed'

export interface Pair {
  readonly live: RawAnswer
  readonly replay: RawAnswer
}

/** Sends one request twice: the responses must be equal in every byte but the marker, and N is 1. */
export async function twice(
  t: Test,
  upstreamBytes: string,
  options: ProxyOptions = {},
  request?: string,
): Promise<Pair> {
  await using peer = await answering(upstreamBytes)
  await using proxy = await proxyBefore(peer, options)
  const sent = request ?? post('/p', 'k-1', '{"a":1}')
  const live = await rawRequest(proxy.port, sent)
  const replay = await rawRequest(proxy.port, sent)
  sameBytes(t, live, replay)
  t.equal(peer.requests.length, 1, 'N=1')
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  return { live, replay }
}

function sameBytes(t: Test, live: RawAnswer, replay: RawAnswer): void {
  t.same(values(live, MARK), [], 'a first answer carries no marker')
  t.same(values(replay, MARK), ['true'], 'a replay carries it once')
  const [name, value] = sent(['Idempotent-Replayed', 'true'])
  const unmarked = replay.bytes.toString('latin1').replace(`${name}: ${value}\r\n`, '')
  t.equal(unmarked, live.bytes.toString('latin1'))
}

/** Headers that the proxy may have added. */
export const OWN = ['date', 'connection', 'keep-alive', 'content-length', 'transfer-encoding']
