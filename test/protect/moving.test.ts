import t from 'tap'
import type { Phase } from '../../src/core/copies.ts'
import { migrating } from '../../src/store/migrating.ts'
import { HOUR, LEASE, replica, route, Store } from './harness.ts'

for (const onLeaseExpired of ['unknown', 'retry'] as const)
  for (const [executes, retries] of [
    ['new', 'both'],
    ['both', 'new'],
  ] as const satisfies readonly (readonly [Phase, Phase])[])
    void t.test(
      `V07 ${onLeaseExpired}: an owner in ${executes} that renews its lease is not silent to a replica in ${retries}`,
      async (t) => {
        const [from, to] = [new Store(), new Store()]
        to.now -= HOUR
        const on = (phase: Phase) => (by: unknown) => migrating(from.wire(by), to.wire(by), phase)
        const policy = route({ onLeaseExpired })
        const owner = replica(t, { store: executes === 'new' ? to : from, wire: on(executes) })
        const other = replica(t, { store: retries === 'new' ? to : from, wire: on(retries) })
        const running = await owner.working({ route: policy }, () => owner.responded(201, 'late'))
        const [[, run] = []] = [...owner.ports.running]
        const token = run?.attempt.token as Buffer
        for (let n = 0; n < 6; n++) {
          t.match(await other.get({ route: policy }), { code: 'idempotency_key_in_progress' })
          for (const store of [from, to]) store.now += LEASE / 2
          const renewal = { id: owner.id, token, dueIn: LEASE, dropIn: HOUR }
          t.same(await owner.wire.renew([renewal]), [true])
        }
        const { bytes } = await running.end()
        t.match(await other.get({ route: policy }), { replayed: true, bytes })
        t.equal(owner.n + other.n, 1)
      },
    )
