/** The wire suites on Node's own reader and undici's pool (`http: node`): what a client sees is the same, but for what ADR 128 lists. */
process.env['TRAFFIC_HTTP'] = 'node'

await import('./suites.ts')
await import('./early-refusals.test.ts')
await import('./upgrade.test.ts')
