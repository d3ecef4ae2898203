import { randomBytes } from 'node:crypto'
import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import type { OutcomeDraft, PendingOutcome } from '../../src/core/settle.ts'
import { encodeDraft } from '../../src/store/record/codec.ts'
import { Sealer } from '../../src/store/record/sealing.ts'
import { Spool } from '../../src/store/spool/log.ts'
import { decodeEntry, encodeEntry, Outbox, type OutboxOptions } from '../../src/store/spool/outbox.ts'
import { SERVICE } from '../support/service.ts'
import { draft, newId, newToken, response, SPANS } from './fixtures.ts'
import { folder, MiB } from './spool-fixtures.ts'

/** How an entry of this service begins. */
const BEGIN = Buffer.from(`\x02\x04${SERVICE}`)

function outcome(
  state: OutcomeDraft['state'],
  over: Partial<PendingOutcome> = {},
  of: Partial<OutcomeDraft> = {},
): PendingOutcome {
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

/** Opens the outbox of a folder, which has nothing to say unless the test listens. */
function open(directory: string, over: Partial<OutboxOptions> = {}) {
  return Outbox.open({
    service: SERVICE,
    sealer: null,
    directory,
    maxBytes: MiB,
    say: () => t.fail(),
    ...over,
  })
}

/** Leaves these in a folder, all of them kept. */
async function leave(
  t: Test,
  directory: string,
  all: readonly PendingOutcome[],
  over: Partial<OutboxOptions> = {},
) {
  const { outbox } = await open(directory, over)
  const kept = all.map((one) => outbox.keep(one))
  for (const { done } of kept) t.equal(await done, 'kept')
  return { kept, outbox }
}

async function reopened(
  t: Test,
  directory: string,
  sealer: Sealer | null = null,
): Promise<{ left: PendingOutcome[]; said: string[] }> {
  const said: string[] = []
  const { outbox, left } = await open(directory, { sealer, say: (message) => void said.push(message) })
  await outbox.close()
  t.ok(left.every(({ unsettled: { usefulFor } }) => usefulFor > 0 && usefulFor <= 60_000))
  return { left: left.map(({ unsettled }) => ({ ...unsettled, usefulFor: 60_000 })), said }
}

void t.test('every outcome is restored unchanged, with everything needed to write it', async (t) => {
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
  const { outbox } = await leave(t, directory, all)
  await outbox.close()
  t.strictSame(await reopened(t, directory), { left: all, said: [] })
})

void t.test('a sealed outcome is unreadable on disk, and is restored only with its key', async (t) => {
  const directory = folder(t)
  const [one, two] = ['one', 'two'].map((id, n) => ({ id, key: Buffer.alloc(32, n) }))
  if (one === undefined || two === undefined) return
  const all = [
    outcome('completed', {}, { result: response(Buffer.from('a secret body')) }),
    outcome('unknown', {}, { key: 'a secret key', lastError: 'a secret error', path: '/a/secret/path' }),
  ]
  const { outbox } = await leave(t, directory, all, { sealer: new Sealer([one]) })
  await outbox.close()
  const lying = readdirSync(directory).map((name) => readFileSync(join(directory, name), 'latin1'))
  t.notMatch(lying.join(), /secret/)
  const unreadable = all.map(() => 'this version cannot read an entry of the spool; it is left in place')
  t.strictSame(await reopened(t, directory), { left: [], said: unreadable })
  t.strictSame(await reopened(t, directory, new Sealer([two])), { left: [], said: unreadable })
  t.strictSame(await reopened(t, directory, new Sealer([two, one])), { left: all, said: [] })
})

void t.test('a dropped outcome does not come back, nor does one that outlived its record', async (t) => {
  const directory = folder(t)
  const [lapsed, left] = [outcome('completed', { usefulFor: 0 }), outcome('unknown')]
  const { kept, outbox } = await leave(t, directory, [outcome('completed'), lapsed, left])
  kept[0]?.drop()
  await outbox.close()
  t.strictSame(await reopened(t, directory), {
    left: [left],
    said: ['outcomes in the spool have outlived their records; they are dropped'],
  })
  t.strictSame(await reopened(t, directory), { left: [left], said: [] })
})

void t.test('an outcome is of use for its time from when it was kept, by the wall clock', async (t) => {
  const directory = folder(t)
  let now = Date.now()
  t.intercept(Date, 'now', { value: () => now })
  const said: unknown[] = []
  const say = (message: string, detail: object): void => void said.push([message, detail])
  const { outbox } = await leave(t, directory, [outcome('completed'), outcome('unknown')], { say })
  await outbox.close()
  for (const [passed, usefulFor] of [
    [0, 60_000],
    [10_000, 50_000],
    [59_999, 1],
    [-3_600_000, 60_000],
  ] as const) {
    now += passed
    const { outbox, left } = await open(directory, { say })
    await outbox.close()
    t.same(
      left.map(({ unsettled }) => unsettled.usefulFor),
      [usefulFor, usefulFor],
      `${passed} ms later`,
    )
    now -= passed
  }
  t.same(said, [])
  now += 60_000
  const late = await open(directory, { say })
  await late.outbox.close()
  t.same(late.left, [])
  t.same(said, [['outcomes in the spool have outlived their records; they are dropped', { outcomes: 2 }]])
})

void t.test('an entry has the layout of docs/record-format.md', async (t) => {
  t.intercept(Date, 'now', { value: () => 0x0605_0403_0201 })
  for (const [flags, over] of [
    [0, {}],
    [1, { claimed: true }],
    [2, { withdrawn: true }],
    [4, { over: 0x0102_0304_0506 }],
    [8, { onLeaseExpired: 'retry' }],
    [15, { claimed: true, withdrawn: true, over: 0, onLeaseExpired: 'retry' }],
  ] as const) {
    const one = outcome('unknown', { spans: { dueIn: 1, dropIn: 2 }, usefulFor: 3, ...over })
    const entry = encodeEntry(one, SERVICE, null)
    const numbers = [(over as { over?: number }).over ?? 0, 1, 2, 3, 0x0605_0403_0201]
    const hex = numbers.map((number) => number.toString(16).padStart(12, '0')).join('')
    t.equal(entry.subarray(0, 6).toString('latin1'), `\x02\x04${SERVICE}`)
    t.equal(entry[6], flags)
    t.equal(entry.subarray(7, 39).toString('base64url'), one.id)
    t.equal(entry.subarray(39, 69).toString('hex'), hex)
    t.ok(entry.subarray(69).equals(encodeDraft(one.draft)), 'then the record')
    t.strictSame(decodeEntry(entry, SERVICE, null), { kind: 'own', unsettled: one })
    entry[0] = 3
    t.match(decodeEntry(entry, SERVICE, null), { kind: 'unreadable' }, 'of a later version')
  }
})

void t.test('an entry that this version cannot read is reported and left in place', async (t) => {
  const directory = folder(t)
  const unreadable = [
    Buffer.alloc(0),
    Buffer.from([3]),
    Buffer.from([2]),
    Buffer.from([2, 200, 0x74]),
    Buffer.concat([BEGIN, randomBytes(20)]),
    Buffer.concat([BEGIN, Buffer.alloc(63), Buffer.from('no record')]),
    ...(['in_progress', 'expired'] as const).map((state) =>
      Buffer.concat([BEGIN, Buffer.alloc(63), encodeDraft(draft(state, newToken()))]),
    ),
  ]
  const { spool } = await Spool.open({ directory, maxBytes: MiB, say: () => t.fail() })
  await Promise.all(unreadable.map((payload) => spool.append(payload).done))
  await spool.close()
  for (let restart = 0; restart < 2; restart++)
    t.strictSame(await reopened(t, directory), {
      left: [],
      said: unreadable.map(() => 'this version cannot read an entry of the spool; it is left in place'),
    })
  t.equal(readdirSync(directory).length, 2)
})

void t.test('V01 outcomes of another service are reported once, and stay on disk for it', async (t) => {
  const directory = folder(t)
  const say = (message: string, detail: object): void => void said.push([message, detail])
  let said: [string, object][] = []
  const theirs = [outcome('completed'), outcome('unknown', { usefulFor: 60_000 })]
  for (const [service, all] of [
    ['orders', theirs],
    ['__proto__', [outcome('failed_retryable')]],
  ] as const) {
    const { outbox } = await leave(t, directory, all, { service, say })
    await outbox.close()
  }
  const files = (): [string, string][] =>
    readdirSync(directory)
      .filter((name) => name.startsWith('spool-'))
      .map((name) => [name, readFileSync(join(directory, name), 'hex')])
  const before = files()
  const bytes = before.reduce((sum, [, hex]) => sum + hex.length / 2, 0)

  said = []
  const { outbox, left } = await open(directory, { maxBytes: bytes + 10_000, say })
  t.strictSame(left, [])
  t.match(said, [
    [
      /do not belong to this service.*: run a proxy of their service/,
      { service: SERVICE, bytes, room: 10_000 },
    ],
  ])
  t.equal(said.length, 1)
  const [, detail] = said[0] as [string, { services: object }]
  t.strictSame(Object.entries(detail.services), [
    ['orders', 2],
    ['__proto__', 1],
  ])

  // This service keeps and drops outcomes in many segments: theirs all stay, and none of its own.
  for (let n = 0; n < 50; n++) {
    const kept = [0, 1].map(() => outbox.keep(outcome('completed')))
    for (const { done } of kept) t.equal(await done, 'kept')
    for (const one of kept) one.drop()
  }
  t.match(
    await outbox.keep(outcome('completed', {}, { result: response(randomBytes(10_000)) })).done,
    { message: /^the spool is full/ },
    'the outcomes of the others take up room',
  )
  await outbox.close()
  t.strictSame(files(), before)

  const found = await open(directory, { service: 'orders', say })
  t.strictSame(
    found.left.map(({ unsettled }) => ({ ...unsettled, usefulFor: 60_000 })),
    theirs,
  )
  for (const { kept } of found.left) kept.drop()
  await found.outbox.close()
  t.strictSame(files(), before.slice(1))
})

void t.test('a bug is not mistaken for a damaged entry', async (t) => {
  const directory = folder(t)
  const { outbox } = await leave(t, directory, [outcome('completed')])
  await outbox.close()
  const { now } = Date
  t.intercept(Date, 'now', {
    value: () => {
      throw new Error('no clock')
    },
  })
  await t.rejects(open(directory), { message: 'no clock' })
  t.intercept(Date, 'now', { value: now })
})
