import t from 'tap'
import { UPSTREAM_MARK, withoutMarks } from '../../src/store/marks.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { hadOtherUpstream } from '../../src/store/other-upstream.ts'
import { StoreUnavailable } from '../../src/store/register.ts'
import { down, failing } from './fixtures.ts'

const empty = () => memoryStore({ clock: () => 1_795_000_000_000, maxBytes: MEMORY_BYTES })

void t.test('a file knows where the last proxy of a service forwarded to', async (t) => {
  const store = empty()
  t.equal(await hadOtherUpstream(store, 'a'), false, 'the first')
  t.equal(await hadOtherUpstream(store, 'a'), false, 'the same again')
  t.equal(await hadOtherUpstream(store, 'b'), true)
  t.equal(await hadOtherUpstream(store, 'b'), false, 'told once')
  const page = await store.list('all', null, 10)
  t.same(page.ids, [UPSTREAM_MARK])
  t.same(withoutMarks(page).ids, [], 'it is no record of a request')
})

void t.test('a store that does not answer is no other upstream', async (t) => {
  const store = failing(empty(), down)
  await t.rejects(hadOtherUpstream(store, 'a'), StoreUnavailable)
})
