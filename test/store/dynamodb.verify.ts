import t from 'tap'
import type { Clock } from '../../src/store/dynamodb/client.ts'
import { openDynamoDbStore } from '../../src/store/dynamodb/store.ts'
import { openStore } from '../../src/store/open.ts'
import type { Store } from '../../src/store/register.ts'
import { DynamoDbServer } from '../support/dynamodb.ts'
import { registerContract } from './contract.ts'
import { exactContract } from './exact.ts'
import { claim, PLAIN_STORE } from './fixtures.ts'

t.setTimeout(600_000)

const server = await DynamoDbServer.start()
let skew = 0
const exact = () => Date.now() + skew
const clock: Clock = { saw: () => {}, earliest: exact, latest: exact }
const open = (service: string) =>
  openDynamoDbStore({ url: server.url, service, timeoutMs: 60_000, onEvent: () => {}, clock })
const stores: [Store, Store, Store] = [await open('pay'), await open('pay'), await open('pay.eu')]
t.teardown(async () => {
  for (const store of stores) await store.close()
  await server[Symbol.asyncDispose]()
})

registerContract(t, 'dynamodb', async () => {
  await server.empty()
  const [register, peer, other] = stores
  const advance = (ms: number) => void (skew += ms)
  return { register, peer, other, tellsPeers: false, advance, async [Symbol.asyncDispose]() {} }
})

const now = 1_795_000_000_000
const still = () => now + skew
exactContract(t, 'dynamodb', async () => {
  await server.empty()
  const frozen = { saw: () => {}, earliest: still, latest: still }
  const options = { url: server.url, service: 'pay', timeoutMs: 60_000, onEvent: () => {}, clock: frozen }
  const register = await openDynamoDbStore(options)
  return { register, advance: (ms) => void (skew += ms), [Symbol.asyncDispose]: () => register.close() }
})

void t.test('store.url opens it, and it prunes by itself', async (t) => {
  const pruned: number[] = []
  const hooks = {
    onEvent: () => {},
    onBreaker: () => {},
    onPruned: (records: number) => pruned.push(records),
  }
  const store = await openStore({ service: 'pay', store: { ...PLAIN_STORE, url: server.url } }, hooks)
  t.match([store.name, pruned], ['dynamodb', []])
  t.ok((await claim(store)).done)
  await store.close()
})
