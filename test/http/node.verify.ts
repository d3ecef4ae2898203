/** The wire suites on Node's own reader and undici's pool (`http: node`): what a client sees is the same, but for what ADR 128 lists. */
process.env['TRAFFIC_HTTP'] = 'node'

await import('./wire.test.ts')
await import('./passthrough.test.ts')
await import('./framing.test.ts')
await import('./heads.test.ts')
await import('./hygiene.test.ts')
await import('./live.test.ts')
await import('./early-refusals.test.ts')
await import('./pipelining.test.ts')
await import('./upgrade.test.ts')
