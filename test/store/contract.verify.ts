import t from 'tap'
import { packedContract, registerContract } from './contract.ts'
import { memoryHarness, pairHarness } from './fixtures.ts'

/* The contract where the first tier shows less of it. */

packedContract(t, 'memory', async () => memoryHarness())
registerContract(t, 'two stores in phase mirror', async () => pairHarness('mirror'))
