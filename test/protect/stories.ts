import { BROKEN, NOT_SENT, Replica, route, type Store, Stream } from './harness.ts'
import type { Story } from './processes.ts'

async function releasedBefore(store: Store): Promise<void> {
  const earlier = new Replica({ store })
  earlier.script.push(NOT_SENT)
  await earlier.get()
  earlier.close()
}

const whole: Story['reply'] = (r, executed) => {
  executed()
  return r.responded(201, 'once')
}
const breaks: Story['reply'] = (_, executed) => {
  executed()
  return BROKEN
}
const streams: Story['reply'] = (_, executed) => {
  executed()
  const stream = new Stream()
  stream.end('complete')
  return stream.reply()
}
const declines: Story['reply'] = (r) => r.responded(200, 'x', { declaredOutcome: 'not-applied' })
const before = releasedBefore

/** The store goes on; some calls fail. */
export const STORIES: readonly Omit<Story, 'policy'>[] = [
  { name: 'a complete answer', reply: whole },
  { name: 'a complete answer over failed_retryable', before, reply: whole },
  { name: 'the reply to the claim is lost', reply: whole, faults: ['lost'] },
  { name: 'the claim is dropped', reply: whole, faults: ['dropped'] },
  { name: 'both tries of the claim are lost', reply: whole, faults: ['dropped', 'lost'] },
  { name: 'the reply to the takeover is lost', before, reply: whole, faults: [null, 'lost'] },
  {
    name: 'the takeover is lost, then the store is down',
    before,
    reply: whole,
    faults: [null, 'lost', 'down'],
  },
  { name: 'the reply to the completion is lost', reply: whole, faults: [null, 'lost'] },
  { name: 'the completion is dropped', reply: whole, faults: [null, 'dropped', 'down'] },
  { name: 'no bytes were sent', reply: () => NOT_SENT },
  { name: 'the upstream declares not-applied', reply: declines },
  { name: 'bytes were sent, no answer came', reply: breaks },
  { name: 'a stream', reply: streams },
]

const BYPASS = route({ onStoreUnavailable: 'bypass' })
const policy = route()

/** The store is down from the completion on: the spool has to keep the outcome. */
const deferred: readonly Story[] = [
  { name: 'a complete answer', policy, reply: whole, faults: [null] },
  { name: 'a completion whose reply is lost', policy, reply: whole, faults: [null, 'lost'] },
  { name: 'a completion that arrives late', policy, reply: whole, faults: [null, 'late'] },
  { name: 'no bytes were sent', policy, reply: () => NOT_SENT, faults: [null] },
  { name: 'bytes were sent, no answer came', policy, reply: breaks, faults: [null] },
  { name: 'a stream', policy, reply: streams, faults: [null] },
  { name: 'a lost claim', policy, reply: whole, faults: ['dropped', 'lost'] },
  { name: 'bypass', policy: BYPASS, reply: whole },
  { name: 'bypass after a lost claim', policy: BYPASS, reply: whole, faults: ['late', 'dropped'] },
]
export const SPOOLED = deferred.map((story): Story => ({ ...story, afterwards: 'down' }))
