import t from 'tap'
import { openStore } from '../../src/store/open.ts'
import { DynamoDbServer } from '../support/dynamodb.ts'
import { bytesOf, newId, newToken, PLAIN_STORE, SPANS } from './fixtures.ts'

void t.test('dynamodb: opens its store', async (t) => {
  await using server = await DynamoDbServer.start()
  const pruned: number[] = []
  const store = await openStore(
    { service: 'pay', store: { ...PLAIN_STORE, url: server.url } },
    { onEvent: () => {}, onBreaker: () => {}, onPruned: (records) => pruned.push(records) },
  )
  t.equal(store.name, 'dynamodb')
  t.same(pruned, [], 'which prunes by itself')
  const id = newId()
  t.ok((await store.put(id, bytesOf('in_progress', newToken()), SPANS)).done)
  t.ok((await store.get(id)).bytes)
  await store.close()
})
