import { randomBytes } from 'node:crypto'
import { mkdtempSync, readdirSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import type { OutcomeDraft } from '../../src/core/settle.ts'
import type { Unsettled } from '../../src/core/unsettled.ts'
import { encodeDraft } from '../../src/store/codec.ts'
import { Outbox } from '../../src/store/outbox.ts'
import { Spool } from '../../src/store/spool.ts'
import { draft, newId, newToken, response, SPANS } from './fixtures.ts'

const MiB = 1024 ** 2

function folder(t: Test): string {
  const path = mkdtempSync(join(tmpdir(), 'outbox-'))
  t.teardown(() => rmSync(path, { recursive: true, force: true }))
  return path
}

function outcome(
  state: OutcomeDraft['state'],
  over: Partial<Unsettled> = {},
  of: Partial<OutcomeDraft> = {},
): Unsettled {
  return {
    id: newId(),
    draft: draft(state, newToken(), { fence: 1_795_000_000_000, attempts: 3, ...of }) as OutcomeDraft,
    spans: SPANS,
    claimed: false,
    withdrawn: false,
    over: null,
    onLeaseExpired: 'unknown',
    usefulFor: 60_000,
    ...over,
  }
}

async function reopened(t: Test, directory: string): Promise<{ left: Unsettled[]; said: string[] }> {
  const said: string[] = []
  const { outbox, left } = await Outbox.open({
    directory,
    maxBytes: MiB,
    say: (message) => void said.push(message),
  })
  await outbox.close()
  t.ok(left.every(({ unsettled: { usefulFor } }) => usefulFor > 0 && usefulFor <= 60_000))
  return { left: left.map(({ unsettled }) => ({ ...unsettled, usefulFor: 60_000 })), said }
}

void t.test('every outcome comes back as it was, with all that writing it needs', async (t) => {
  const directory = folder(t)
  const all = [
    outcome('completed', { claimed: true }, { createdAt: 1_795_000_000_001 }),
    outcome('completed', { onLeaseExpired: 'retry', over: 1_795_000_000_002 }, { key: 'a key "ü"' }),
    outcome('completed', {}, { result: response(randomBytes(200_000)) }),
    outcome(
      'completed',
      {},
      {
        result: { kept: false, why: 'too_large', status: 201, location: '/1' },
      },
    ),
    outcome('failed_retryable', { withdrawn: true, over: 0 }, { lastError: 'refused' }),
    outcome('unknown', { claimed: true }, { lastError: 'reset', status: 502 }),
    outcome('unknown', { spans: { dueIn: 1, dropIn: 2 } }),
  ]
  const { outbox } = await Outbox.open({ directory, maxBytes: MiB, say: () => t.fail() })
  const kept = all.map((one) => outbox.keep(one))
  for (const { done } of kept) t.equal(await done, 'kept')
  await outbox.close()
  t.strictSame(await reopened(t, directory), { left: all, said: [] })
})

void t.test('what is dropped does not come back, nor what is older than its record', async (t) => {
  const directory = folder(t)
  const { outbox } = await Outbox.open({ directory, maxBytes: MiB, say: () => t.fail() })
  const [dropped, lapsed, left] = [
    outcome('completed'),
    outcome('completed', { usefulFor: 0 }),
    outcome('unknown'),
  ]
  const [one] = [dropped, lapsed, left].map((each) => outbox.keep(each))
  await one?.done
  one?.drop()
  await outbox.close()
  t.strictSame(await reopened(t, directory), {
    left: [left],
    said: ['outcomes in the spool are older than any record of theirs; they are dropped'],
  })
  t.strictSame(await reopened(t, directory), { left: [left], said: [] })
})

void t.test('an entry that this version cannot read is told of and left where it is', async (t) => {
  const directory = folder(t)
  const unreadable = [
    Buffer.alloc(0),
    Buffer.from([2]),
    Buffer.concat([Buffer.from([1, 0]), randomBytes(20)]),
    Buffer.concat([Buffer.from([1, 0]), Buffer.alloc(62), Buffer.from('no record')]),
    ...(['in_progress', 'expired'] as const).map((state) =>
      Buffer.concat([Buffer.from([1, 0]), Buffer.alloc(62), encodeDraft(draft(state, newToken()))]),
    ),
  ]
  const { spool } = await Spool.open({ directory, maxBytes: MiB, say: () => t.fail() })
  await Promise.all(unreadable.map((payload) => spool.append(payload).done))
  await spool.close()
  for (let restart = 0; restart < 2; restart++)
    t.strictSame(await reopened(t, directory), {
      left: [],
      said: unreadable.map(() => 'an entry of the spool cannot be read by this version; it is left there'),
    })
  t.equal(readdirSync(directory).length, 2)
})

void t.test('a bug is no damage', async (t) => {
  const directory = folder(t)
  const { outbox } = await Outbox.open({ directory, maxBytes: MiB, say: () => t.fail() })
  await outbox.keep(outcome('completed')).done
  await outbox.close()
  const { now } = Date
  t.intercept(Date, 'now', {
    value: () => {
      throw new Error('no clock')
    },
  })
  await t.rejects(Outbox.open({ directory, maxBytes: MiB, say: () => t.fail() }), { message: 'no clock' })
  t.intercept(Date, 'now', { value: now })
})
