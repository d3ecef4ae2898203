/** The wire suites over HTTP/2: what a client sees is the same, but for what only HTTP/1.1 has. */
process.env['TRAFFIC_HTTP2'] = '1'

await import('./suites.ts')
