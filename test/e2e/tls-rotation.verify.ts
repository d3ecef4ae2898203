import { once } from 'node:events'
import { Agent, request } from 'node:https'
import t from 'tap'
import { certificate } from '../support/certificates.ts'
import { newKey, until } from '../support/e2e.ts'
import { Mount } from '../support/mount.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { upstreamStub } from '../support/upstream.ts'

/** `TLS_SECONDS=600` for ten minutes. */
const SECONDS = Number(process.env['TLS_SECONDS'] ?? 10)
t.setTimeout((SECONDS + 60) * 1000)

void t.test('certificates rotate under load without a failed request', async (t) => {
  using one = certificate('IP:127.0.0.1')
  using other = certificate('IP:127.0.0.1')
  const ca = [one.cert, other.cert]
  const textOf = (own: typeof one) => ({ cert: String(own.cert), key: String(own.key) })
  const mount = new Mount(t, textOf(one))
  await using upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end('done'))
  await using proxy = await proxyInProcess(
    `listen: { address: "127.0.0.1:0", tls: { cert: ${mount.file('cert')}, key: ${mount.file('key')} } }\nupstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\nlimits: { request: 1KiB }\ndefaults: { ttl: 60s }`,
  )
  const endsAt = performance.now() + SECONDS * 1000
  const failed: unknown[] = []
  const shown = new Set<string>()
  let answered = 0
  const client = async (keepAlive: boolean): Promise<void> => {
    const agent = new Agent({ ca, keepAlive, maxSockets: 1, maxCachedSessions: 0 })
    while (performance.now() < endsAt) {
      const asked = request(proxy.url, {
        agent,
        method: 'POST',
        headers: { 'idempotency-key': newKey(), authorization: 'Bearer a' },
      }).end('{}')
      try {
        const [response] = await once(asked, 'response')
        shown.add(response.socket.getPeerCertificate().serialNumber)
        await once(response.resume(), 'end')
        if (response.statusCode !== 201) failed.push(response.statusCode)
      } catch (error) {
        failed.push(String(error))
      }
      answered++
    }
    agent.destroy()
  }
  const clients = [true, true, false, false].map(client)
  const said = (text: RegExp): number => proxy.log.filter(({ msg }) => text.test(String(msg))).length
  let rotations = 0
  for (let next = other; performance.now() < endsAt; next = next === one ? other : one) {
    // Half of it comes first, as some tools write it.
    mount.swap({ ...textOf(next === one ? other : one), key: String(next.key) })
    await until(() => said(/cannot be used/) > rotations || performance.now() > endsAt)
    mount.swap(textOf(next))
    const before = answered
    await until(
      () => (said(/were read again/) > rotations && answered > before + 20) || performance.now() > endsAt,
    )
    rotations++
  }
  await Promise.all(clients)
  t.comment(`${answered} requests, ${rotations} rotations`)
  t.strictSame(failed, [])
  t.equal(shown.size, 2, 'both certificates were shown')
})
