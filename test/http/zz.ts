import { upstreamStub, tcpStub, wholeRequest } from '../support/upstream.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { post, rawRequest } from '../support/raw.ts'
const bytes = process.argv.slice(2)
for (const [name, b] of Object.entries({
  plain: 'HTTP/1.1 201 Made It\r\nContent-Length: 2\r\nX-a: 1\r\nx-A: 2\r\n\r\nok',
  chunkedTrailerHeader: 'HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n2\r\nok\r\n0\r\n\r\n',
  ctl: 'HTTP/1.1 201 Created\r\nContent-Length: 2\r\nX-a: a\x01b\r\n\r\nok',
  del: 'HTTP/1.1 201 Created\r\nContent-Length: 2\r\nX-a: a\x7fb\r\n\r\nok',
  s600: 'HTTP/1.1 600 Odd\r\nContent-Length: 2\r\n\r\nok',
  s999: 'HTTP/1.1 999 Odd\r\nContent-Length: 2\r\n\r\nok',
  s1000: 'HTTP/1.1 1000 Odd\r\nContent-Length: 2\r\n\r\nok',
  s099: 'HTTP/1.1 099 Odd\r\nContent-Length: 2\r\n\r\nok',
  s199: 'HTTP/1.1 199 Odd\r\nContent-Length: 2\r\n\r\nok',
  twoconn: 'HTTP/1.1 201 Odd\r\nConnection: x-a\r\nConnection: x-b\r\nX-A: 1\r\nX-B: 2\r\nContent-Length: 2\r\n\r\nok',
  latin: 'HTTP/1.1 201 Cr\xe9\xe9\r\nX-A: caf\xe9\r\nContent-Length: 2\r\n\r\nok',
  utf: Buffer.from('HTTP/1.1 201 Créé\r\nX-A: café\r\nContent-Length: 2\r\n\r\nok').toString('latin1'),
  badname: 'HTTP/1.1 201 OK\r\nX Y: caf\r\nContent-Length: 2\r\n\r\nok',
  badname2: 'HTTP/1.1 201 OK\r\nX@Y: caf\r\nContent-Length: 2\r\n\r\nok',
  c204: 'HTTP/1.1 204 \r\nContent-Length: 0\r\n\r\n',
  c204len: 'HTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\n',
  c205: 'HTTP/1.1 205 No\r\nContent-Length: 0\r\n\r\n',
  c304: 'HTTP/1.1 304 No\r\nContent-Length: 5000\r\nETag: "a"\r\n\r\n',
  twoCL: 'HTTP/1.1 201 No\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok',
  clte: 'HTTP/1.1 201 No\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n',
  pct: 'HTTP/1.1 201 No\r\nContent-Length: 0002\r\n\r\nok',
  empty: 'HTTP/1.1 201\r\nContent-Length: 2\r\n\r\nok',
  tablat: 'HTTP/1.1 201 a\tb\x01\r\nContent-Length: 2\r\n\r\nok',
  trailers: 'HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-T: caf\xe9\x01\r\nDate: x\r\n\r\n',
  multi: 'HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 OK\r\nContent-Length: 2\r\n\r\nok',
})) {
  if (bytes.length && !bytes.includes(name)) continue
  await using up = await tcpStub(async (s) => { for (;;) { const q = await wholeRequest(s); s.write(Buffer.from(b, 'latin1')) } })
  await using proxy = await proxyInProcess(`upstream: { url: "${up.url}", timeout: 500ms, idleTimeout: 500ms }\nstore: { url: "memory:" }\nroutes: [{name: r, match: {path: "/p"}}]`)
  for (const [how, req] of [['live', post('/p','k1','{}')], ['replay', post('/p','k1','{}')], ['1.0', post('/p','k1','{}').replace('HTTP/1.1','HTTP/1.0')], ['pass', post('/q',null,'{}')], ['pass1.0', post('/q',null,'{}').replace('HTTP/1.1','HTTP/1.0')]] as const) {
    try { const a = await rawRequest(proxy.port, req); console.log(name, how, JSON.stringify(a.bytes.toString('latin1').slice(0, 700))) } catch (e) { console.log(name, how, 'ERR', (e as Error).message) }
  }
  for (const l of proxy.log) if (l.msg === 'internal error') console.log('BUG', (l.err as {message:string}).message)
}
