import { join } from 'node:path'
import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { outcomeDraft } from '../../src/core/settle.ts'
import { openStore } from '../../src/store/open.ts'
import { orThrow, Records } from '../../src/store/records.ts'
import { draft, HOUR, newToken, PLAIN_STORE, response } from '../store/fixtures.ts'
import { adminYaml, ask, linesOf, recordOf } from '../support/admin.ts'
import { tempDir } from '../support/e2e.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { emptyStore, KINDS, type StoreKind } from '../support/replicas.ts'
import { SERVICE } from '../support/service.ts'

t.setTimeout(600_000)

const COMPLETED = { outcome: 'completed', response: { status: 200, body: 'by hand' } } as const
const RETRYABLE = { outcome: 'retryable' } as const

/** An operator's decision and the owner's late completion at the same moment, on one store. */
async function race(t: Test, kind: StoreKind): Promise<void> {
  const url = await emptyStore(t, kind)
  const audit = join(tempDir(t), 'audit.log')
  await using proxy = await proxyInProcess(
    [
      adminYaml(t),
      `audit: { file: ${audit} }`,
      'upstream: { url: "http://127.0.0.1:9" }',
      `store: { url: "${url}" }`,
    ].join('\n'),
  )
  const store = { ...PLAIN_STORE, url }
  const service = kind === 'sqlite' ? 'default' : SERVICE
  const register = await openStore({ service, store }, { onEvent: () => {}, onBreaker: () => {} })
  t.teardown(() => register.close())
  const records = new Records(register)
  const won = { operator: 0, owner: 0 }
  for (let n = 0; n < 60; n++) {
    const token = newToken()
    const id = newToken().toString('hex').padEnd(43, 'A') as RecordId
    const body = n % 2 === 0 ? COMPLETED : RETRYABLE
    const claimed = draft('in_progress', token)
    const claim = await records.claim(id, claimed, { dueIn: 0, dropIn: HOUR })
    if (claim.kind !== 'claimed') throw new Error('claimed before')
    const headers = { 'if-match': `"${claim.stamp.version}"` }
    const own = outcomeDraft(
      claimed,
      { token, attempts: 1, fence: claim.stamp.fence },
      { kind: 'completed', result: response() },
      0,
    )
    const resolve = () => ask(proxy, `/v1/records/${id}/resolve`, { method: 'POST', headers, body })
    const late = () =>
      new Promise((next) => setTimeout(next, n % 5)).then(() =>
        records.settle(id, own, { dueIn: HOUR, dropIn: HOUR }),
      )
    const [reply, settled] = await Promise.all([resolve(), late()])
    const { status, state } = {
      status: reply.status,
      state: recordOf(await ask(proxy, `/v1/records/${id}`)).state,
    }
    t.equal(state, 'completed', 'one of them stands')
    const { body: kept } = await stored(records, id)
    if (reply.status === 200 && body.outcome === 'completed') {
      t.equal(settled.kind, 'refused')
      t.equal(kept, 'by hand')
      won.operator++
    } else {
      t.ok([200, 409, 412].includes(status), String(status))
      t.equal(
        settled.kind,
        'written',
        'a late proof beats "not executed", and a decision after it is refused',
      )
      t.not(kept, 'by hand')
      won.owner++
    }
  }
  t.comment(`${kind}: operator ${won.operator}, owner ${won.owner}`)
  t.ok(linesOf(audit).length > 0)
}

async function stored(records: Records, id: RecordId): Promise<{ body: string | null }> {
  const { record } = orThrow(await records.get(id))
  return {
    body: record?.state === 'completed' && record.result.kept ? record.result.response.body.toString() : null,
  }
}

for (const kind of KINDS.filter((one) => one !== 'memory'))
  void t.test(`O04 ${kind}: an operator and a late completion race: one winner`, (t) => race(t, kind))
