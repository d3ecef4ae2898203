import type { Test } from 'tap'
import type { Reply } from './e2e.ts'
import { essenceOf } from './replicas.ts'

export const WAIT = 'defaults: { lease: 20s, inFlight: { mode: wait, wait: 30s } }\ndrain: { timeout: 3s }'

export function yamlOf(upstream: { readonly url: string }, store: string, more = WAIT): string {
  return `upstream: { url: "${upstream.url}" }\nstore: { url: "${store}" }\n${more}`
}

export function many(count: number, ask: (i: number) => Promise<Reply>): Promise<Reply>[] {
  return Array.from({ length: count }, (_, i) => ask(i))
}

/** All got the bytes of one execution, exactly one of them as the live response. */
export function oneAnswer(t: Test, replies: readonly Reply[], live = 1): void {
  t.equal(
    replies.filter(({ replayed }) => !replayed).length,
    live,
    'live responses; all others are marked as replays',
  )
  for (const reply of replies) t.same(essenceOf(reply), essenceOf(replies[0] as Reply))
  t.equal(replies[0]?.status, 201)
}
