import t from 'tap'
import { RecordLookup } from '../../src/admin/lookup.ts'
import type { FullView } from '../../src/admin/schemas.ts'
import type { RecordDraft } from '../../src/core/record.ts'
import { NOBODY } from '../../src/core/settle.ts'
import { Audit } from '../../src/observe/audit.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { Records } from '../../src/store/records.ts'
import { load, UPSTREAM } from '../config/support.ts'
import { bytesOf, newId, newToken, SPANS } from '../store/fixtures.ts'
import { injecting } from '../support/admin.ts'

const note = (tag: string, detail: object) => ({
  tag,
  count: 1,
  firstAgo: 0,
  lastAgo: 0,
  text: JSON.stringify(detail),
})
const REPLAY = note('replayed:host:1', { status: 201 })

void t.test('the history shows a usual first execution from the record alone', async (t) => {
  const store = memoryStore({ clock: Date.now, maxBytes: MEMORY_BYTES })
  const config = load(UPSTREAM)
  const audit = await Audit.open(null, 'test', () => {})
  t.teardown(() => audit.close())
  const ask = await injecting(
    {
      version: '0',
      config,
      records: new Records(store),
      store,
      subjects: new RecordLookup(config),
      waiters: { tell() {} },
      own: { isRunning: () => false, tell: async () => true },
      audit,
      history: { add() {} },
      announceDrain: (draining) => draining,
    },
    (error) => t.fail(String(error)),
  )
  const shown = async (
    state: RecordDraft['state'],
    over: Partial<RecordDraft>,
    notes: (typeof REPLAY)[] = [],
    spans = SPANS,
  ) => {
    const id = newId()
    await store.put(id, bytesOf(state, newToken(), over), spans)
    if (notes.length > 0) await store.history.append(id, notes)
    return (await ask('GET', `/v1/records/${id}`)).body as unknown as FullView
  }
  const events = async (...record: Parameters<typeof shown>) =>
    (await shown(...record)).history.map(({ event }) => event)

  const usual = await shown('completed', {}, [REPLAY])
  t.match(usual.history, [
    {
      event: 'executed',
      text: 'Executed: the upstream answered 201',
      mood: 'good',
      first: usual.createdAt,
      last: usual.updatedAt,
      count: 1,
      detail: { fence: usual.fence, status: 201, before: 'absent', after: 'completed' },
    },
    { event: 'replayed' },
  ])
  t.equal(usual.explanation.verdict[0], 'It was executed once.')
  t.same(await events('completed', {}), ['executed'])
  const result = { kept: false, why: 'outcome_only', status: 204, location: null } as const
  t.match((await shown('completed', { result })).history, [{ detail: { status: 204 } }])
  // A tombstone.
  t.same(await events('completed', {}, [], { ...SPANS, dueIn: 0 }), ['executed'])

  // Somebody else decided; it was tried before; it is not completed.
  t.same(await events('completed', { token: NOBODY }), [])
  t.same(await events('completed', { attempts: 2 }, [REPLAY]), ['replayed'])
  for (const state of ['in_progress', 'failed_retryable', 'unknown'] as const)
    t.same(await events(state, {}), [])
  // There is a line about the attempt, whatever else is missing.
  for (const event of ['claimed', 'executed', 'bypassed', 'settled', 'shadowed'])
    t.same(await events('completed', {}, [note(`${event}:1`, {}), REPLAY]), [event, 'replayed'])
})
