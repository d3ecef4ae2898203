import { writeFileSync } from 'node:fs'
import { dirname } from 'node:path'
import t, { type Test } from 'tap'
import type { Store } from '../../src/store/register.ts'
import { type Certificate, certificate } from '../support/certificates.ts'
import { RedisServer } from '../support/redis.ts'
import { RedisCluster } from '../support/redis-cluster.ts'
import { SentinelGroup } from '../support/redis-sentinel.ts'
import { bytesOf, claim, newId, newToken, SPANS, tempDir, until } from './fixtures.ts'
import { open, takesClaims } from './redis-fixtures.ts'

t.setTimeout(120_000)

/** The certificate of every server and of the proxy, and its own authority. */
const own = certificate('IP:127.0.0.1')
const stranger = certificate('IP:127.0.0.1')
t.teardown(() => {
  own[Symbol.dispose]()
  stranger[Symbol.dispose]()
})
const tls = { tls: dirname(own.certFile), mutual: true }
/** docs/redis.md: what a user of an ACL needs. */
const RIGHTS = 'on >p@ss ~idempotency:* &* +@all -@dangerous +info +role +cluster|slots +asking'.split(' ')

const storeOf = async (t: Test, url: string) => (await open(t, url)).store

function urlOf(url: string, { certFile, keyFile }: Certificate, more = ''): string {
  return `${url.replace('://', '://app:p%40ss@')}?cacert=${own.certFile}&cert=${certFile}&key=${keyFile}${more}`
}

async function works(t: Test, store: Store): Promise<void> {
  for (let n = 0; n < 20; n++) t.match(await claim(store), { done: true })
  const id = newId()
  const token = newToken()
  await store.put(id, bytesOf('in_progress', token), SPANS)
  let told = 0
  const stop = await store.watch(id, () => void told++)
  const own = { token, states: ['in_progress'] } as const
  t.match(await store.swap(id, own, bytesOf('completed', token), SPANS, false), { done: true })
  await until(() => told > 0)
  stop()
}

/** A client without a certificate of the authority gets nothing, and a server with another one is not used. */
async function refusesOthers(t: Test, url: string): Promise<void> {
  for (const [wrong, why] of [
    [urlOf(url, stranger), /./],
    [url.replace('://', '://app:p%40ss@').concat(`?cacert=${own.certFile}`), /./],
    [urlOf(url, own).replace(own.certFile, stranger.certFile), /certificate/],
  ] as const) {
    const store = await storeOf(t, wrong)
    await t.rejects(claim(store), { name: 'StoreUnavailable', message: why })
  }
}

void t.test('TLS with client certificates and an ACL user works with one server', async (t) => {
  await using server = await RedisServer.start(tls)
  await server.command('ACL', 'SETUSER', 'app', ...RIGHTS)
  await works(t, await storeOf(t, urlOf(server.url, own)))
  await refusesOthers(t, server.url)
})

void t.test('§15.20 a new connection has the latest certificates, or those of before', async (t) => {
  await using server = await RedisServer.start(tls)
  using folder = tempDir()
  const file = `${folder.path}/cert.pem`
  writeFileSync(file, own.cert)
  const { store, events } = await open(
    t,
    `${server.url}?cacert=${own.certFile}&cert=${file}&key=${own.keyFile}`,
  )
  t.match(await claim(store), { done: true })
  const again = async (): Promise<void> => {
    await server.command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')
    await until(takesClaims(store))
  }
  writeFileSync(file, own.cert.subarray(0, 100))
  await again()
  t.match(
    events.join('\n'),
    /error: store\.url: cert is not a complete PEM file; the previous files are used/,
  )
  const before = events.length
  writeFileSync(file, `${own.cert.toString()}\n`)
  await again()
  t.notMatch(events.slice(before).join('\n'), /previous files are used/)
})

void t.test('TLS with client certificates and an ACL user works with Sentinel', async (t) => {
  await using group = await SentinelGroup.start(tls)
  for (const server of group.servers) await server.command('ACL', 'SETUSER', 'app', ...RIGHTS)
  const sentinelRights = ['+sentinel|master', '+sentinel|get-master-addr-by-name', '+auth']
  for (const sentinel of group.sentinels)
    await sentinel.command('ACL', 'SETUSER', 'watcher', 'on', '>other', ...sentinelRights)
  const more = '&sentinelUsername=watcher&sentinelPassword=other'
  const { store, events } = await open(t, urlOf(group.url, own, more))
  await works(t, store)
  await refusesOthers(t, group.url)
  await group.failover()
  // The old master may answer until a Sentinel is asked again.
  await until(async () => {
    const now = await group.master()
    return now !== group.servers[0] && events.at(-1) === `connected: 127.0.0.1:${now?.port}`
  })
  await until(takesClaims(store))
  await works(t, store)
})

void t.test('TLS with client certificates and an ACL user works with a cluster', async (t) => {
  await using cluster = await RedisCluster.start(tls)
  for (const { server } of cluster.members) await server.command('ACL', 'SETUSER', 'app', ...RIGHTS)
  await works(t, await storeOf(t, urlOf(cluster.url, own)))
  await refusesOthers(t, cluster.url)
})
