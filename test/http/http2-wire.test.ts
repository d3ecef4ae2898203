/** The table of what a client sees on the wire, over HTTP/2; all suites: http2.verify.ts. */
process.env['TRAFFIC_HTTP2'] = '1'

await import('./wire.test.ts')
