/** The wire suites over TLS: what a client sees is the same. */
process.env['TRAFFIC_TLS'] = '1'

await import('./wire.test.ts')
await import('./passthrough.test.ts')
await import('./framing.test.ts')
await import('./heads.test.ts')
await import('./hygiene.test.ts')
await import('./live.test.ts')
await import('./pipelining.test.ts')
