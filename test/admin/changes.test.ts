import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import type { OwnAttempts } from '../../src/admin/changes.ts'
import { RecordLookup } from '../../src/admin/lookup.ts'
import type { RecordId } from '../../src/core/record.ts'
import { Audit, type AuditLine } from '../../src/observe/audit.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { PREFIX } from '../../src/store/record/codec.ts'
import { Records } from '../../src/store/records.ts'
import { type Register, type Store, StoreUnavailable } from '../../src/store/register.ts'
import { load, UPSTREAM } from '../config/support.ts'
import { response as answer, bytesOf, HOUR, newId, newToken, SPANS } from '../store/fixtures.ts'
import { type AdminAnswer, injecting } from '../support/admin.ts'

/** Somebody else who writes at the worst moment: called before the change reaches the store. */
type Meanwhile = (register: Register, id: RecordId) => Promise<unknown>

async function world(t: Test, meanwhile: Meanwhile, route = '', own: Partial<OwnAttempts> = {}) {
  const register = memoryStore({ clock: Date.now, maxBytes: MEMORY_BYTES })
  const between = Object.assign(Object.create(register) as Store, {
    name: 'memory',
    swap: async (...args: Parameters<Register['swap']>) => {
      await meanwhile(register, args[0])
      return register.swap(...args)
    },
    remove: async (...args: Parameters<Register['remove']>) => {
      await meanwhile(register, args[0])
      return register.remove(...args)
    },
  })
  for (const name of ['put', 'get', 'list', 'ping'] as const)
    Object.assign(between, { [name]: register[name].bind(register) })
  const records = new Records(between)
  const lines: AuditLine[] = []
  const told: RecordId[] = []
  const bugs: unknown[] = []
  const config = load(`${UPSTREAM}defaults: { ${route} }\n`)
  const audit = await Audit.open(null, 'test', (line) => void lines.push(line))
  t.teardown(() => audit.close())
  const ask = await injecting(
    {
      version: '0',
      config,
      records,
      store: between,
      subjects: new RecordLookup(config),
      waiters: { tell: (id) => void told.push(id) },
      own: { isRunning: () => false, tell: async () => true, ...own },
      audit,
      history: { add: () => {} },
      announceDrain: () => {
        throw new Error('a bug')
      },
    },
    (error) => void bugs.push(error),
  )
  return { register, records, ask, lines, told, bugs }
}

async function unknown(register: Register, id = newId()): Promise<{ id: RecordId; tag: string }> {
  const put = await register.put(id, bytesOf('unknown', newToken()), SPANS)
  return { id, tag: `"${put.now}"` }
}

/** Writes the record as the sweeper or the owner would. */
async function touch(
  register: Register,
  id: RecordId,
  state: 'unknown' | 'completed' = 'unknown',
): Promise<void> {
  const { bytes } = await register.get(id)
  if (bytes === null) return
  const version = bytes.readUIntBE(4, 6)
  await register.swap(id, { version }, bytesOf(state, newToken()), SPANS, false)
}

const RETRYABLE = { outcome: 'retryable' }
const codeOf = ({ body }: AdminAnswer): unknown => (body !== null && 'code' in body ? body.code : undefined)

void t.test('a decision about a record that moves on meanwhile gets 412, audited as withdrawn', async (t) => {
  const { register, ask, lines, told } = await world(t, (register, id) => touch(register, id, 'completed'))
  for (const [method, suffix, body] of [
    ['POST', '/resolve', RETRYABLE],
    ['DELETE', '', undefined],
  ] as const) {
    const { id, tag } = await unknown(register)
    const answer = await ask(method, `/v1/records/${id}${suffix}`, tag, body)
    t.same([answer.status, codeOf(answer)], [412, 'version_mismatch'])
    t.match(answer.body, { record: { id, state: 'completed' } })
    t.ok((await register.get(id)).bytes)
  }
  t.match(
    lines.map(({ what }) => what),
    ['resolve', 'withdrawn', 'delete', 'withdrawn'],
  )
  t.same(told, [])
})

void t.test('a decision about a record that vanishes meanwhile is record_not_found', async (t) => {
  const gone: Meanwhile = async (register, id) => {
    const { bytes } = await register.get(id)
    await register.remove(id, bytes?.readUIntBE(4, 6) ?? 0)
  }
  const { register, ask, lines } = await world(t, gone)
  for (const [method, suffix, body] of [
    ['POST', '/resolve', RETRYABLE],
    ['DELETE', '', undefined],
  ] as const) {
    const { id, tag } = await unknown(register)
    t.equal(codeOf(await ask(method, `/v1/records/${id}${suffix}`, tag, body)), 'record_not_found')
  }
  t.equal(lines.filter(({ what }) => what === 'withdrawn').length, 2)
})

void t.test('an outcome reported from outside is retried while others write, up to a point', async (t) => {
  let times = 3
  const { register, ask, lines, told } = await world(t, async (register, id) => {
    if (times-- > 0) await touch(register, id)
  })
  const subject = { key: 'k', method: 'POST', path: '/p', ...RETRYABLE }
  const lookup = await ask('POST', '/v1/records/lookup', null, { key: 'k', method: 'POST', path: '/p' })
  const { instance } = lookup.body as { instance: RecordId }
  await unknown(register, instance)
  const answer = await ask('POST', '/v1/outcomes', null, subject)
  t.match(answer, { status: 200, body: { state: 'failed_retryable' } })
  t.same(told, [instance])
  t.same(
    lines.map(({ what }) => what),
    ['outcome', 'withdrawn', 'outcome', 'withdrawn', 'outcome', 'withdrawn', 'outcome'],
  )
  const { bytes } = await register.get(instance)
  await register.remove(instance, bytes?.readUIntBE(4, 6) ?? 0)
  await unknown(register, instance)
  times = Number.POSITIVE_INFINITY
  t.same(codeOf(await ask('POST', '/v1/outcomes', null, subject)), 'store_unavailable')
})

void t.test('a reported outcome is about one record, and refused if several have the key', async (t) => {
  const route = 'key: { from: ["header:ce-id", "json:/id"] }, scope: { caller: none }'
  const { register, ask } = await world(t, async () => {}, route)
  const subject = { key: 'evt-1', method: 'POST', path: '/hooks' }
  const idOf = async (caller: object): Promise<RecordId> => {
    const { body } = await ask('POST', '/v1/records/lookup', null, { ...subject, caller })
    return (body as { instance: RecordId }).instance
  }
  const report = async (caller: object) =>
    codeOf(await ask('POST', '/v1/outcomes', null, { ...subject, ...RETRYABLE, caller }))
  const plain = await idOf({})
  // The same id in a body that is not an event.
  const { ask: askPlain } = await world(t, async () => {}, route.replace('"header:ce-id", ', ''))
  const { body } = await askPlain('POST', '/v1/records/lookup', null, subject)
  const { instance: inBody } = body as { instance: RecordId }
  t.not(inBody, plain)
  await unknown(register, inBody)
  t.equal(await report({ 'ce-source': '/bank' }), 'record_not_found', 'another event')
  await unknown(register, plain)
  t.equal(await report({}), 'invalid_request', 'it could be either')
  await unknown(register, await idOf({ 'ce-source': '/bank' }))
  t.equal(await report({ 'ce-source': '/bank' }), undefined, 'this one')
})

void t.test('if the store does not answer, the audit log says that it may have been changed', async (t) => {
  const { register, ask, lines } = await world(t, async () => {
    throw new StoreUnavailable('no answer in time', true)
  })
  const { id, tag } = await unknown(register)
  t.equal(codeOf(await ask('POST', `/v1/records/${id}/resolve`, tag, RETRYABLE)), 'store_unavailable')
  t.match(lines.at(-1), {
    what: 'withdrawn',
    record: id,
    reason: /the record shows whether it was changed/,
  })
})

void t.test('a bug is a 500 whose details only the log has', async (t) => {
  const { ask, bugs } = await world(t, async () => {})
  t.match(await ask('POST', '/v1/drain', null), {
    status: 500,
    body: { code: 'internal_error', detail: 'see the log' },
  })
  t.match(bugs, [{ message: 'a bug' }])
})

void t.test('keep: outcome keeps no body of a resolution, and hop-by-hop headers are left out', async (t) => {
  const { register, ask } = await world(t, async () => {}, 'keep: outcome')
  const { id, tag } = await unknown(register)
  const response = {
    status: 201,
    headers: [
      ['Location', '/p/1'],
      ['Content-Length', '99'],
      ['Connection', 'x-hop'],
      ['X-Hop', '1'],
      ['Idempotent-Replayed', 'true'],
    ],
    bodyBase64: 'c2VjcmV0',
  }
  const body = { outcome: 'completed', response }
  t.match(await ask('POST', `/v1/records/${id}/resolve`, tag, body), {
    status: 200,
    body: { response: { status: 201, headers: [['Location', '/p/1']], size: null } },
  })
  t.notOk((await register.get(id)).bytes?.includes('secret'))
  const kept = await world(t, async () => {})
  const second = await unknown(kept.register)
  const { body: shown } = await kept.ask('POST', `/v1/records/${second.id}/resolve`, second.tag, body)
  const { headers } = (shown as { response: { headers: string[][] } }).response
  t.same(
    headers.map(([name]) => name),
    ['Location', 'Date'],
  )
})

void t.test('a tombstone shows as expired, cannot be resolved and can be deleted', async (t) => {
  const { register, ask } = await world(t, async () => {})
  const id = newId()
  const put = await register.put(id, bytesOf('completed', newToken()), { dueIn: 0, dropIn: HOUR })
  const shown = await ask('GET', `/v1/records/${id}`, null)
  t.match(shown.body, { state: 'expired', response: null, leaseUntil: null })
  t.equal(codeOf(await ask('POST', `/v1/records/${id}/resolve`, `"${put.now}"`, RETRYABLE)), 'not_unknown')
  t.equal((await ask('DELETE', `/v1/records/${id}`, `"${put.now}"`)).status, 204)
})

/** A record of a later format, which this version cannot read. */
async function strange(
  register: Register,
  state: 'in_progress' | 'completed',
  dueIn: number,
): Promise<{ id: RecordId; tag: string }> {
  const id = newId()
  const bytes = bytesOf(state, newToken())
  bytes[PREFIX.schema] = 2
  const put = await register.put(id, bytes, { dueIn, dropIn: HOUR })
  return { id, tag: `"${put.now}"` }
}

void t.test('an unreadable record can be deleted at its version, unless its lease still runs', async (t) => {
  const { register, ask, lines, told } = await world(t, async () => {})
  const { id, tag } = await strange(register, 'completed', HOUR)
  const shown = await ask('GET', `/v1/records/${id}`, null)
  t.match(shown, {
    status: 500,
    headers: { etag: tag },
    body: { instance: id, version: Number(JSON.parse(tag)) },
  })
  t.same(lines, [])
  t.equal(codeOf(await ask('DELETE', `/v1/records/${id}`, '"1"')), 'version_mismatch')
  t.equal((await ask('DELETE', `/v1/records/${id}`, tag, { reason: 'lost', by: 'ann' })).status, 204)
  t.match(lines, [
    {
      what: 'delete',
      record: id,
      reason: 'lost',
      before: { state: 'completed', unreadable: /schema version 2/ },
    },
  ])
  t.same(told, [id])
  const leased = await strange(register, 'in_progress', HOUR)
  const refused = await ask('DELETE', `/v1/records/${leased.id}`, leased.tag)
  t.match(refused.body, {
    code: 'still_running',
    version: Number(JSON.parse(leased.tag)),
    detail: /lease lasts until/,
  })
  const lapsed = await strange(register, 'in_progress', 0)
  t.equal((await ask('DELETE', `/v1/records/${lapsed.id}`, lapsed.tag)).status, 204)
  const done = await strange(register, 'completed', HOUR)
  t.equal(
    codeOf(await ask('POST', `/v1/records/${done.id}/resolve`, done.tag, RETRYABLE)),
    'record_unreadable',
  )
})

void t.test('an unreadable record that this replica is still working on is not deleted', async (t) => {
  const { register, ask, lines } = await world(t, async () => {}, '', { isRunning: () => true })
  const { id, tag } = await strange(register, 'in_progress', 0)
  t.equal(codeOf(await ask('DELETE', `/v1/records/${id}`, tag)), 'still_running')
  t.same(lines, [])
})

void t.test('an unreadable record that is replaced or vanishes meanwhile is not deleted', async (t) => {
  const replaced: Meanwhile = async (register, id) => {
    await register.remove(id, Number((await register.get(id)).bytes?.readUIntBE(4, 6)))
    const bytes = bytesOf('completed', newToken())
    bytes[PREFIX.schema] = 2
    // Not in the same millisecond, or its version would be the same.
    await wait(2)
    await register.put(id, bytes, SPANS)
  }
  const gone: Meanwhile = async (register, id) =>
    register.remove(id, Number((await register.get(id)).bytes?.readUIntBE(4, 6)))
  for (const [meanwhile, code] of [
    [replaced, 'record_unreadable'],
    [gone, 'record_not_found'],
  ] as const) {
    const { register, ask, lines } = await world(t, meanwhile)
    const { id, tag } = await strange(register, 'completed', HOUR)
    t.equal(codeOf(await ask('DELETE', `/v1/records/${id}`, tag)), code)
    t.match(
      lines.map(({ what }) => what),
      ['delete', 'withdrawn'],
    )
  }
})

void t.test('an unreadable record that vanishes between two reads is not found', async (t) => {
  const { register, ask, records } = await world(t, async () => {})
  const { id, tag } = await strange(register, 'completed', HOUR)
  const { get } = records
  records.get = async (asked) => {
    const reply = await get.call(records, asked)
    await register.remove(asked, Number((await register.get(asked)).bytes?.readUIntBE(4, 6)))
    return reply
  }
  t.equal(codeOf(await ask('GET', `/v1/records/${id}`, null)), 'record_not_found')
  const again = await strange(register, 'completed', HOUR)
  t.equal(codeOf(await ask('DELETE', `/v1/records/${again.id}`, tag)), 'record_not_found')
})

void t.test('a response that is not kept shows why, without a size; a lapsed lease its end', async (t) => {
  const { register, ask } = await world(t, async () => {})
  const id = newId()
  const result = { kept: false, why: 'too_large', status: 303, location: null } as const
  const bytes = bytesOf('completed', newToken(), { result })
  await register.put(id, bytes, SPANS)
  t.match((await ask('GET', `/v1/records/${id}`, null)).body, {
    response: { status: 303, headers: [], size: null, notKept: 'too_large', bodyUntil: null },
  })
  const ending = newId()
  const ends = { ...answer(), afterBody: HOUR }
  const kept = await register.put(ending, bytesOf('completed', newToken(), { result: ends }), SPANS)
  const bodyUntil = new Date(kept.now + SPANS.dueIn).toISOString()
  const expiresAt = new Date(kept.now + SPANS.dueIn + HOUR).toISOString()
  t.match((await ask('GET', `/v1/records/${ending}`, null)).body, {
    expiresAt,
    response: { notKept: null, bodyUntil },
  })
  const ended = newId()
  await register.put(ended, bytesOf('completed', newToken(), { result: ends }), { dueIn: 0, dropIn: HOUR })
  const past = { status: 201, headers: [], size: null, notKept: 'past_ttl', bodyUntil: null }
  t.match((await ask('GET', `/v1/records/${ended}`, null)).body, { state: 'completed', response: past })
  const took = newId()
  const gone = { kept: false, why: 'past_ttl', status: 201, location: null } as const
  const createdAt = kept.now - HOUR
  await register.put(took, bytesOf('completed', newToken(), { result: gone, createdAt }), SPANS)
  const first = new Date(createdAt).toISOString()
  t.match((await ask('GET', `/v1/records/${took}`, null)).body, {
    response: past,
    history: [{ event: 'executed', first, last: first }],
  })
  const lapsed = newId()
  const put = await register.put(lapsed, bytesOf('in_progress', newToken()), { dueIn: 0, dropIn: HOUR })
  t.match((await ask('GET', `/v1/records/${lapsed}`, null)).body, {
    state: 'unknown',
    leaseUntil: new Date(put.now).toISOString(),
    reconciliation: { asked: 0, deadLettered: false },
  })
})

const KEY = 'told-from-outside'
const COMPLETED = { outcome: 'completed', response: { status: 200, body: 'by hand' } }
/** Everything an operator may decide about a record that reads unknown. */
const DECISIONS = [
  ['POST', '/resolve', RETRYABLE],
  ['POST', '/resolve', COMPLETED],
  ['DELETE', '', undefined],
  ['POST', null, RETRYABLE],
  ['POST', null, COMPLETED],
] as const

for (const [what, code, own] of [
  ['is still executing the request', 'still_running', { isRunning: () => true }],
  ['holds its outcome', 'outcome_held', { tell: async () => false }],
] as const)
  void t.test(`while this replica ${what}, a decision gets 409 ${code} and changes nothing`, async (t) => {
    const { register, ask, lines, told } = await world(t, async () => {}, '', own)
    const subject = { key: KEY, method: 'POST', path: '/pay', caller: { authorization: 'a' } }
    const missing = await ask('POST', '/v1/records/lookup', null, subject)
    const { instance } = missing.body as { instance: RecordId }
    const { id, tag } = await unknown(register, instance)
    const before = await register.get(id)
    for (const [method, suffix, body] of DECISIONS) {
      const answer =
        suffix === null
          ? await ask(method, '/v1/outcomes', null, { ...subject, ...body })
          : await ask(method, `/v1/records/${id}${suffix}`, tag, body)
      t.same([answer.status, codeOf(answer)], [409, code], `${method} ${suffix ?? 'outcomes'}`)
      t.match(answer.body, { instance: id, record: { id, state: 'unknown' } })
    }
    t.same((await register.get(id)).bytes, before.bytes)
    t.same([lines, told], [[], []])
  })

void t.test('an outcome that this replica holds is written before a decision', async (t) => {
  let write: () => Promise<void> = async () => {}
  const own = {
    tell: async () => {
      await write()
      return true
    },
  }
  const { register, ask } = await world(t, async () => {}, '', own)
  const { id, tag } = await unknown(register)
  write = () => touch(register, id, 'completed')
  const answer = await ask('POST', `/v1/records/${id}/resolve`, tag, RETRYABLE)
  t.same([answer.status, codeOf(answer)], [412, 'version_mismatch'])
  t.match(answer.body, { record: { state: 'completed' } })
})
