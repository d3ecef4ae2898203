import t from 'tap'
import { openDynamoDbStore } from '../../src/store/dynamodb.ts'
import type { Clock } from '../../src/store/dynamodb-client.ts'
import { DynamoDbServer } from '../support/dynamodb.ts'
import { registerContract } from './contract.ts'

t.setTimeout(300_000)

const server = await DynamoDbServer.start()
t.teardown(() => server[Symbol.asyncDispose]())
let skew = 0
const exact = () => Date.now() + skew
const clock: Clock = { saw: () => {}, earliest: exact, latest: exact }
const open = (service = 'pay') =>
  openDynamoDbStore({ url: server.url, service, timeoutMs: 5000, onEvent: () => {}, clock })

registerContract(t, 'dynamodb', async () => {
  await server.empty()
  const [register, peer, other] = await Promise.all([open(), open(), open('pay.eu')])
  return {
    register,
    peer,
    other,
    tellsPeers: false,
    advance: (ms) => void (skew += ms),
    [Symbol.asyncDispose]: async () =>
      void (await Promise.all([register.close(), peer.close(), other.close()])),
  }
})
