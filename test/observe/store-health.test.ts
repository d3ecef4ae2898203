import { pino } from 'pino'
import t from 'tap'
import { Metrics } from '../../src/observe/metrics.ts'
import { StoreHealth } from '../../src/observe/store-health.ts'
import type { StoreTraits } from '../../src/store/register.ts'

const log = pino({ level: 'silent' })
const traits = (evicts: boolean | null): StoreTraits => ({ durable: true, evicts, findings: [] })

/** A store whose answers the test gives, one after the other. */
function asked() {
  const waiting: PromiseWithResolvers<StoreTraits>[] = []
  const store = {
    name: 'redis',
    traits: () => {
      const reply = Promise.withResolvers<StoreTraits>()
      waiting.push(reply)
      return reply.promise
    },
  }
  return { store, waiting }
}

void t.test('V09 only a store that says that it does not evict is fit for strict', async (t) => {
  for (const [evicts, mayEvict] of [
    [false, false],
    [true, true],
    [null, true],
  ] as const) {
    const store = { name: 'redis', traits: async () => traits(evicts) }
    const fitness = new StoreHealth(store.name, new Metrics(), log)
    await fitness.watch(store)
    t.teardown(() => fitness.stop())
    t.equal(fitness.mayEvict(), mayEvict, `evicts: ${evicts}`)
  }
})

void t.test('V09 an answer from before a reconnect says nothing about the server of now', async (t) => {
  const { store, waiting } = asked()
  const fitness = new StoreHealth(store.name, new Metrics(), log)
  const watching = fitness.watch(store)
  waiting[0]?.resolve(traits(false))
  await watching
  t.teardown(() => fitness.stop())
  t.equal(fitness.mayEvict(), false)
  fitness.checkAgain()
  t.equal(fitness.mayEvict(), true, 'until it has answered')
  fitness.checkAgain()
  waiting[1]?.resolve(traits(false))
  await waiting[1]?.promise
  await new Promise(setImmediate)
  t.equal(fitness.mayEvict(), true, 'the first look was of another connection')
  waiting[2]?.reject(new Error('down'))
  await new Promise(setImmediate)
  t.equal(fitness.mayEvict(), true)
})
