import type { Model, Move } from './explore.ts'

/**
 * One key while a fleet moves from one store to another (contract §9, docs/adr/0101): what replicas in the phases of a migration do with
 * two stores, of which each command is whole, and what a crash, a lost reply or another replica does in between. Read {@link steps} from top
 * to bottom. Left out: leases, status queries and operators, which `protocol.ts` has; and a claim's second try beside its first
 * (test/store/migrating.test.ts). A replica that dies leaves its record as it is.
 */

export type Phase = 'plain' | 'mirror' | 'both' | 'new'
/** Whoever is not next to each other is kept apart by marks (src/store/moving/phases.ts), as long as it lives and its messages do. */
const PHASES: readonly Phase[] = ['plain', 'mirror', 'both', 'new']
const APART: Readonly<Record<Phase, readonly Phase[]>> = {
  plain: ['new'],
  mirror: ['new'],
  both: [],
  new: ['plain', 'mirror'],
}

/** A claim that was taken back is nobody's: its attempt may claim again. */
const NOBODY = -1

export interface Held {
  readonly state: 'in_progress' | 'unknown' | 'failed_retryable' | 'completed'
  readonly by: number
  readonly fence: number
  /** The fence of the first claim (`createdAt`). */
  readonly life: number
}

interface Attempt {
  readonly phase: Phase
  /**
   * `looking`: a claim of its own was refused, or it has brought the deciding store up to the other. `looked`: it knows what the deciding store has (`own`) and the other one (`seen`), and has claimed nothing. `half`: its claim is in the
   * old store, not yet in the new one. `refused`: the new one did not take it. `settling` in that store, then in the other.
   */
  readonly at:
    | 'asking'
    | 'looking'
    | 'looked'
    | 'half'
    | 'refused'
    | 'claimed'
    | 'settling'
    | 'telling'
    | 'over'
    | 'dead'
  readonly own: Held | null
  readonly seen: Held | null
  readonly fence: number
  readonly life: number
  readonly hasExecuted: boolean
  readonly outcome: Exclude<Held['state'], 'in_progress'> | null
}

export interface World {
  readonly from: Held | null
  readonly to: Held | null
  readonly attempts: readonly Attempt[]
  readonly left: number
}

export const MISTAKES = [
  'two phases run beside each other that share no deciding store',
  'a claim of both is believed once the old store has it',
  'the new phase does not ask the old store',
  'a free key is believed without the other store',
] as const
export type Mistake = (typeof MISTAKES)[number]

export type StepName =
  | 'a client asks'
  | 'it claims in the old store'
  | 'it looks into both stores'
  | 'it claims in the new store'
  | 'the new store has its claim, too'
  | 'the new store is told of its claim'
  | 'it takes its claim back'
  | 'the reply is lost'
  | 'it sends, and the upstream executes it'
  | 'it cannot send'
  | 'its outcome is written'
  | 'the other store is told of its outcome'
  | 'its process dies'
export interface Step extends Move<World> {
  readonly name: StepName
}

export function migration(attempts: number, mistake: Mistake | null): Model<World, Step> {
  return {
    first: { from: null, to: null, attempts: [], left: attempts },
    steps: (world) => steps(world, mistake),
    keyOf,
    wrongState,
    wrongStep: () => null,
    // Leases and status queries do the rest.
    isSettled: () => true,
  }
}

/** Everything that can happen next. */
function steps(world: World, mistake: Mistake | null): Step[] {
  const { from, to, attempts, left } = world
  const found: Step[] = []
  const wrong = (one: Mistake): boolean => mistake === one
  const become = (name: StepName, n: number, change: Partial<Attempt>, more: Partial<World> = {}): void =>
    void found.push({
      name,
      attempt: n,
      to: { ...world, attempts: attempts.with(n, { ...(attempts[n] as Attempt), ...change }), ...more },
    })

  const alive = attempts.filter(({ at }) => at !== 'over' && at !== 'dead')
  for (const phase of left > 0 ? PHASES : []) {
    const isApart = alive.some((one) => APART[phase].includes(one.phase))
    // Nobody goes back to before what the fleet has left behind, and nobody skips a phase.
    const furthest = Math.max(0, ...attempts.map((one) => PHASES.indexOf(one.phase)))
    const isOrdered = Math.abs(PHASES.indexOf(phase) - furthest) <= 1
    if (wrong(MISTAKES[0]) || (!isApart && isOrdered))
      found.push({
        name: 'a client asks',
        attempt: null,
        to: { ...world, attempts: [...attempts, { ...NEW, phase }], left: left - 1 },
      })
  }

  for (const [n, attempt] of attempts.entries()) {
    const { phase, at, own, seen, fence, life, outcome, hasExecuted } = attempt
    const mine = (state: Held['state']): Held => ({ state, by: n, fence, life })
    const isNew = phase === 'new'
    switch (at) {
      case 'asking':
      case 'looking':
        // What the old store does not have is claimed at once; what it has as free, `both` asks the new store about.
        if (isNew || at === 'looking' || (phase === 'both' && from?.state === 'failed_retryable'))
          become('it looks into both stores', n, {
            at: 'looked',
            own: isNew ? to : from,
            seen: isNew ? (wrong('the new phase does not ask the old store') ? null : from) : to,
          })
        else claimIn('from', n, null)
        break
      case 'looked':
        claimIn(isNew ? 'to' : 'from', n, seen)
        break
      case 'half': {
        // Exactly what was seen there is replaced.
        const isTaken = to === null ? seen === null : seen !== null && isSame(to, seen)
        if (isTaken || to?.by === n)
          become(
            'the new store has its claim, too',
            n,
            { at: 'claimed', own: null, seen: null },
            { to: mine('in_progress') },
          )
        else become('the new store has its claim, too', n, { at: 'refused', seen: to })
        become('the reply is lost', n, { at: 'settling', own: null, seen: null, outcome: 'failed_retryable' })
        break
      }
      case 'refused': {
        // Not removed: a first try of the same claim that is still under way must find something.
        const isOwn = from?.by === n && from.state === 'in_progress'
        const nobodys = { state: 'failed_retryable', by: NOBODY, fence: fence + 1, life } as const
        const instead = own ?? (seen?.state === 'failed_retryable' ? seen : nobodys)
        const back = { ...instead, fence: Math.max(instead.fence, fence), life }
        become('it takes its claim back', n, LOOKING, { from: isOwn ? back : from })
        break
      }
      case 'claimed':
        if (phase === 'mirror' && follows(mine('in_progress'), to, true))
          become('the new store is told of its claim', n, {}, { to: mine('in_progress') })
        become('it sends, and the upstream executes it', n, {
          at: 'settling',
          outcome: 'completed',
          hasExecuted: true,
        })
        become('it sends, and the upstream executes it', n, {
          at: 'settling',
          outcome: 'unknown',
          hasExecuted: true,
        })
        become('it cannot send', n, { at: 'settling', own: null, seen: null, outcome: 'failed_retryable' })
        break
      case 'settling': {
        const ended = mine(outcome as Held['state'])
        const lead = isNew ? 'to' : 'from'
        const there = world[lead]
        const isAccepted = there === null || (there.by === n && there.state !== 'completed')
        const written = isAccepted ? { [lead]: ended } : {}
        const isTold = phase === 'plain' || !isAccepted
        become('its outcome is written', n, { at: isTold ? 'over' : 'telling' }, written)
        break
      }
      case 'telling': {
        const ended = mine(outcome as Held['state'])
        const other = isNew ? from : to
        // `new` writes the old store only where it would hold what was freed.
        const isWritten = isNew ? outcome === 'failed_retryable' && other !== null : true
        const change =
          isWritten && follows(ended, other, phase === 'mirror')
            ? { [isNew ? 'from' : 'to']: over(ended, other) }
            : {}
        become('the other store is told of its outcome', n, { at: 'over' }, change)
        // A mirror promises nothing yet.
        if (phase === 'mirror') become('the reply is lost', n, { at: 'over' })
        break
      }
      case 'over':
      case 'dead':
        continue
    }
    become('its process dies', n, {
      at: 'dead',
      own: null,
      seen: null,
      outcome: hasExecuted ? outcome : null,
    })
  }
  return found

  /** Claims in the store that leads; `other`: what the other one was seen to have. */
  function claimIn(lead: 'from' | 'to', n: number, other: Held | null): void {
    const { phase, at, own: seen } = attempts[n] as Attempt
    const name = lead === 'from' ? 'it claims in the old store' : 'it claims in the new store'
    const there = world[lead]
    // What it decides about: what it has looked at, or what its claim is answered with.
    const own = at === 'looked' ? seen : there
    const asks = phase === 'both' || phase === 'new'
    const isBelieved = own?.state === 'completed' || wrong('a free key is believed without the other store')
    if (asks && !isBelieved && other !== null && (own === null || isAhead(other, own))) {
      // The lead is brought up to the other, and looked at again.
      const isStill = there === null || isAhead(other, there)
      become(name, n, LOOKING, isStill ? { [lead]: over(other, there) } : {})
      return
    }
    const isOwn = own?.by === n && own.state === 'in_progress' && to?.by === n && to.state === 'in_progress'
    // Somebody else has brought it from one store to the other.
    if (isOwn) return become(name, n, { at: 'claimed', own: null, seen: null })
    if (own !== null && own.state !== 'failed_retryable') return become(name, n, OVER)
    // Somebody else was faster.
    if (at === 'looked' && !isEqual(own, there))
      return become(name, n, there === null || there.state === 'failed_retryable' ? ASKING : OVER)
    const fences = [own, other, ...attempts].map((one) => one?.fence ?? 0)
    const fence =
      1 + (own === null ? Math.max(...fences) : Math.max(own.fence, asks ? (other?.fence ?? 0) : 0))
    const claim = { state: 'in_progress', by: n, fence, life: own?.life ?? fence } as const
    const isWhole = phase !== 'both' || wrong('a claim of both is believed once the old store has it')
    become(
      name,
      n,
      {
        at: isWhole ? 'claimed' : 'half',
        fence,
        life: claim.life,
        own: isWhole ? null : own,
        seen: isWhole ? null : other,
      },
      { [lead]: claim },
    )
  }
}

const ASKING = { at: 'asking', own: null, seen: null } as const
const LOOKING = { ...ASKING, at: 'looking' } as const
const OVER = { at: 'over', own: null, seen: null } as const

const NEW: Omit<Attempt, 'phase'> = {
  ...ASKING,
  fence: 0,
  life: 0,
  hasExecuted: false,
  outcome: null,
}

/** In place of a record of the same life, it keeps the higher fence. */
function over(ours: Held, there: Held | null): Held {
  return there?.life === ours.life ? { ...ours, fence: Math.max(ours.fence, there.fence) } : ours
}

function isEqual(one: Held | null, other: Held | null): boolean {
  return one === null || other === null ? one === other : isSame(one, other)
}

function isSame(one: Held, other: Held): boolean {
  return one.by === other.by && one.state === other.state && one.fence === other.fence
}

const ORDER = { in_progress: 0, failed_retryable: 1, unknown: 2, completed: 3 } as const

/** As src/core/copies.ts has it. */
function isAhead(ours: Held, there: Held): boolean {
  if (there.state === 'completed') return false
  const [isOpen, isFree] = [ours.state === 'failed_retryable', there.state === 'failed_retryable']
  const isSameAttempt = ours.by === there.by
  if (isSameAttempt) return ORDER[ours.state] > ORDER[there.state]
  if (!isOpen && isFree) return true
  if (ours.life !== there.life) return false
  if (ours.state === 'completed') return true
  return isOpen && isFree && ours.fence > there.fence
}

/** Whether what the lead says is written over the other's; of a mirror, which nobody claims in, every later attempt's is. */
function follows(ours: Held, there: Held | null, isMirror: boolean): boolean {
  if (there === null || isAhead(ours, there)) return true
  if (there.state === 'completed') return false
  return ours.by === there.by || (isMirror && ours.life === there.life && ours.fence > there.fence)
}

/** What the contract forbids of a state. */
function wrongState({ attempts }: World): string | null {
  return attempts.filter(({ hasExecuted }) => hasExecuted).length > 1
    ? 'executed more often than allowed'
    : null
}

function keyOf(world: World): string {
  return JSON.stringify(world)
}
