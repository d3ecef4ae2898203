/** What a client sees on the wire, the same for every way in: the suites run as the environment says (support/service.ts, front.ts). */
import { IS_HTTP2 } from '../support/front.ts'

await import('./wire.test.ts')
await import('./passthrough.test.ts')
await import('./framing.test.ts')
await import('./hygiene.test.ts')
await import('./live.test.ts')
// Heads in text, and requests behind another, are of HTTP/1.1.
if (!IS_HTTP2) {
  await import('./heads.test.ts')
  await import('./pipelining.test.ts')
}
