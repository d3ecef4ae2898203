import t from 'tap'
import { PHASES } from '../../src/core/copies.ts'
import { migrating } from '../../src/store/migrating.ts'
import { registerContract } from './contract.ts'
import { answeringLater } from './migrating-fixtures.ts'

for (const phase of PHASES)
  registerContract(t, `two stores in phase ${phase}`, async () => {
    let now = 1_795_000_000_000
    const [from, to] = [answeringLater(() => now), answeringLater(() => now)]
    return {
      register: migrating(from, to, phase),
      peer: migrating(from, to, phase),
      other: null,
      tellsPeers: true,
      advance: (ms) => void (now += ms),
      [Symbol.asyncDispose]: () => from.close(),
    }
  })
