/** The wire suites over TLS: what a client sees is the same. */
process.env['TRAFFIC_TLS'] = '1'

await import('./suites.ts')
