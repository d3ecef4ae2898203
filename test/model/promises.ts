import type { Model } from './explore.ts'
import {
  type Attempt,
  begin,
  type Record,
  type Rules,
  readsUnknown,
  type Step,
  type StepName,
  steps,
  type World,
} from './protocol.ts'

/** The protocol under these rules, and what the contract forbids of it. */
export function protocol(rules: Rules): Model<World, Step> {
  return {
    first: begin(rules),
    steps: (world) => steps(world, rules),
    keyOf,
    wrongState,
    wrongStep,
    isSettled: ({ record }) => record === null || !(record.state === 'in_progress' || readsUnknown(record)),
  }
}

/** What the contract forbids of a state (§2). */
function wrongState({ record, attempts, permits }: World): string | null {
  const executed = attempts.filter(({ request }) => request === 'executed').length
  if (executed > 1 + permits) return 'executed more often than allowed'
  if (record?.state === 'completed' && record.by >= 0 && attempts[record.by]?.request !== 'executed')
    return 'completed by an attempt that did not execute'
  // After a failover that is so until all have written again what they know.
  const isGoneBack = attempts.some(({ owes }) => owes)
  if (record?.state === 'failed_retryable' && permits === 0 && executed > 0 && !isGoneBack)
    return 'free to execute, although it was executed'
  return null
}

const CLAIMS: ReadonlySet<StepName> = new Set([
  'its claim arrives',
  'its claim arrives, the reply is lost',
  'it asks for its claim again',
])
const OUTCOMES: ReadonlySet<StepName> = new Set([
  'its outcome arrives',
  'its outcome arrives, the reply is lost',
])
const RECLAIMS: ReadonlySet<StepName> = new Set(['it writes its claim again', 'it writes its outcome again'])
/** What ends the life of a record by name. */
const LOSSES: ReadonlySet<StepName> = new Set([
  'its retention ends',
  'the store loses the record',
  'the store fails over',
])

/** What the contract forbids of a step (§2, §9). */
function wrongStep(
  { record, attempts, isInGrace, permits }: World,
  { name, attempt, to }: Step,
): string | null {
  const own = attempt === null ? undefined : attempts[attempt]
  const isOwn = record === null || record.by === attempt
  if (OUTCOMES.has(name) && own?.outcome === 'completed' && isOwn && to.record?.state !== 'completed')
    return 'the outcome of the latest attempt was lost'
  const isGranted = to.record !== null && to.record.by === attempt && to.record.fence !== record?.fence
  if (isInGrace && CLAIMS.has(name) && isGranted && to.permits === permits)
    return 'something was handed out in the grace'
  const isAnothers = record?.state === 'in_progress' && !isOwn && record.life !== own?.life
  // Whoever claimed after an attempt that did nothing was free to.
  const isNothing = own?.wrote === 'failed_retryable' && to.record === record
  if (RECLAIMS.has(name) && isAnothers && !isNothing && to.record?.state !== 'unknown')
    return 'a reclaim that met another owner was no split'
  if (LOSSES.has(name)) return null
  if (record?.state === 'completed' && (to.record?.state !== 'completed' || to.record.by !== record.by))
    return 'a completed record was changed'
  if (record !== null && to.record === null) return 'a record vanished'
  return null
}

const AT = [
  'asking',
  'hearing',
  'unsure',
  'claimed',
  'sent',
  'settling',
  'withdrawing',
  'over',
  'dead',
] as const
const REQUESTS = ['unsent', 'travelling', 'executed', 'lost'] as const
const STATES = ['in_progress', 'unknown', 'failed_retryable', 'completed'] as const

/** Attempts in an order of their own, and fences by their rank: what differs in these only goes on in the same way. */
function keyOf({ record, behind, isInGrace, attempts, permits, left }: World): string {
  const ranks = ranksOf(record, behind, attempts)
  const rank = (fence: number): number => (fence === 0 ? 0 : 1 + ranks.indexOf(fence))
  const told = (one: Record | null): number =>
    one === null
      ? 0
      : bits([1, 1], [STATES.indexOf(one.state), 2], [Number(one.lapsed), 1], [Number(one.by < 0), 1]) +
        2 ** 5 * bits([rank(one.fence), 4], [rank(one.life), 4])
  const each = attempts.map((one, n) =>
    String.fromCharCode(
      bits(
        [AT.indexOf(one.at), 4],
        [Number(one.claiming), 1],
        [Number(one.sure), 1],
        [REQUESTS.indexOf(one.request), 2],
        [one.outcome === null ? 0 : STATES.indexOf(one.outcome), 2],
        [one.wrote === null ? 0 : STATES.indexOf(one.wrote), 2],
        [Number(one.owes), 1],
        [Number(record?.by === n), 1],
        [Number(behind?.by === n), 1],
      ),
      bits([rank(one.fence), 4], [rank(one.life), 4]),
    ),
  )
  const { attempts: asked, losses, failovers, decisions, retentions } = left
  return (
    each.sort().join('') +
    String.fromCharCode(
      told(record),
      told(behind),
      bits([permits, 4], [asked, 2], [losses, 2], [failovers, 2], [decisions, 2], [retentions, 2]),
      Number(isInGrace),
    )
  )
}

function ranksOf(record: Record | null, behind: Record | null, attempts: readonly Attempt[]): number[] {
  const all = [record, behind, ...attempts].flatMap((one) => (one === null ? [] : [one.fence, one.life]))
  return [...new Set(all)].sort((a, b) => a - b).filter((fence) => fence > 0)
}

function bits(...fields: readonly (readonly [value: number, width: number])[]): number {
  let all = 0
  for (const [value, width] of fields) all = all * 2 ** width + value
  return all
}
