/**
 * The protocol of contract §2, §3 and §9 for one key, as a state machine: what a client, the replicas, the store and the upstream may do
 * next. `explore.ts` goes through every state that can be reached. Read {@link steps} from top to bottom: one line for each thing that can
 * happen. Two stores at once, while a fleet moves from one to the other, are `migration.ts`.
 *
 * Time is whatever may have passed by now: a lease can run out as soon as its owner no longer relies on it. Messages arrive late, or
 * their replies never; processes die at any point. What is assumed: the store does each command whole or not at all and forgets nothing
 * (but see `Bounds`); clocks differ by less than a third of a lease; "not found" is believed only when nothing of the request is on its
 * way any more (`reconcile.after`). After a failover, every replica that lives writes again what it knows before the grace is over; what is
 * older than it remembers (15 s) the promoted server has. Keys that were made after the failover, which need not wait, are left out: no
 * claim of theirs can have been lost.
 */

export type State = 'in_progress' | 'unknown' | 'failed_retryable' | 'completed'
export type Outcome = Exclude<State, 'in_progress'>

export interface Record {
  readonly state: State
  /** The attempt whose token it carries; {@link NOBODY} after a decision by somebody else. */
  readonly by: number
  /** `in_progress` past its lease, or `unknown` only because of that. */
  readonly lapsed: boolean
  /** Grows with each claim. */
  readonly fence: number
  /** The fence of the claim that made it (`createdAt`): after a loss, another one begins. */
  readonly life: number
}
export const NOBODY = -1

/** A request of a client, and what one replica does for it. */
export interface Attempt {
  /**
   * `unsure`: the reply to its claim did not come; `hearing`: the reply is on its way. `settling`: its outcome is on its way to the store,
   * again and again; `withdrawing`: the same, of one that never heard whether it had claimed.
   */
  readonly at:
    | 'asking'
    | 'hearing'
    | 'unsure'
    | 'claimed'
    | 'sent'
    | 'settling'
    | 'withdrawing'
    | 'over'
    | 'dead'
  /** Its claim has not reached the store, and still may. */
  readonly claiming: boolean
  /** Two thirds of the lease have not passed since it was asked for, by the owner's own clock. */
  readonly sure: boolean
  /** Of its claim; 0: it was not told. */
  readonly fence: number
  readonly life: number
  /** What became of its request at the upstream. */
  readonly request: 'unsent' | 'travelling' | 'executed' | 'lost'
  readonly outcome: Outcome | null
  /** What it has written as its outcome, which it remembers where the store may lose it. */
  readonly wrote: Outcome | null
  /** The store has failed over, and it has not yet written again what it knows. */
  readonly owes: boolean
}

export interface World {
  readonly record: Record | null
  /** What the server has that would be promoted, while there may be a failover. */
  readonly behind: Record | null
  /** The store has failed over and hands nothing out yet. */
  readonly isInGrace: boolean
  readonly attempts: readonly Attempt[]
  /** So many more executions have been allowed by name: see `permit` in {@link steps}. */
  readonly permits: number
  readonly left: Bounds
}

/** How often it may still happen: otherwise there would be no end of states. */
export interface Bounds {
  readonly attempts: number
  /** The store forgets the record. */
  readonly losses: number
  /** The store goes on with what a replica of it has: the record as it was at some time before. */
  readonly failovers: number
  /** An operator says that it may be executed again. */
  readonly decisions: number
  readonly retentions: number
}

/** What differs between routes, and mistakes that others have made: each is found (protocol.test.ts). */
export interface Rules {
  readonly bounds: Bounds
  /** `onLeaseExpired: retry`. */
  readonly retryLapsed: boolean
  /** Some replicas have `store.grace: off`, or are of a release without it: they claim without asking. */
  readonly isPartOfFleetGraceless: boolean
  readonly mistake: Mistake | null
}

export const MISTAKES = [
  'the lease is the expiry',
  'an error frees the key',
  'outcomes are not checked',
  'a takeover ignores the state',
  'a refused request overwrites the record',
  'a lost claim is sent all the same',
  'a withdrawal deletes the record',
  'the first byte leaves on an old lease',
  'not found is believed at once',
  'a broken exchange is sent again',
  'a sweep frees what fell silent',
  'a lapsed owner gives up its outcome',
  'the grace is off',
  'takeovers are not held in the grace',
  'claims are not written again',
  'outcomes are not written again',
  'an outcome that was refused is not remembered',
  'a late reply of the server before is forgotten',
  'a renewal makes an old lease good for a first byte',
  'a reclaim ignores what another has claimed',
] as const
export type Mistake = (typeof MISTAKES)[number]

export function begin({ bounds }: Rules): World {
  return { record: null, behind: null, isInGrace: false, attempts: [], permits: 0, left: bounds }
}

export interface Step {
  readonly name: StepName
  /** The attempt that it is about; null: none. */
  readonly attempt: number | null
  readonly to: World
}

export const STEPS = [
  'a client asks',
  'its claim arrives',
  'its claim arrives, the reply is lost',
  'it hears that it has claimed',
  'it waits no longer for the reply',
  'it asks for its claim again',
  'it withdraws',
  'its lease grows old',
  'it renews',
  'the lease lapses',
  'it sends',
  'it cannot send',
  'the upstream executes it',
  'it never arrives',
  'it is answered',
  'the answer says that nothing was done',
  'the answer says nothing',
  'the exchange breaks off',
  'its outcome arrives',
  'its outcome arrives, the reply is lost',
  'its process dies',
  'the sweeper writes down that it fell silent',
  'the upstream is asked, and has done it',
  'the upstream is asked, and knows nothing',
  'an operator says: completed',
  'an operator says: retryable',
  'its retention ends',
  'the store loses the record',
  'a replica of the store hears of the record',
  'the store fails over',
  'it writes its claim again',
  'it writes its outcome again',
  'the grace ends',
] as const
export type StepName = (typeof STEPS)[number]

/** Everything that can happen next. */
export function steps(world: World, rules: Rules): Step[] {
  const { record, behind, isInGrace, attempts, permits, left } = world
  const found: Step[] = []
  const wrong = (mistake: Mistake): boolean => rules.mistake === mistake
  const add = (name: StepName, attempt: number | null, change: Partial<World>): void =>
    void found.push({ name, attempt, to: { ...world, ...change } })
  /** The world with another attempt n, and what else changes. */
  const become = (name: StepName, n: number, change: Partial<Attempt>, more: Partial<World> = {}): void =>
    add(name, n, {
      attempts: attempts.with(n, forgetful({ ...(attempts[n] as Attempt), ...change })),
      ...more,
    })

  if (left.attempts > 0)
    add('a client asks', null, {
      attempts: [...attempts, NEW],
      left: { ...left, attempts: left.attempts - 1 },
    })

  for (const [n, attempt] of attempts.entries()) {
    const { at, claiming, sure, request, outcome } = attempt
    const own = record?.by === n

    if (claiming) {
      const { granted, isHeld, ...change } = claimed(world, n, at === 'asking', rules)
      // It matters only in a failover how long the reply takes.
      const then = left.failovers > 0 ? 'hearing' : 'claimed'
      const told = granted ? ({ at: then, ...claimOf(world) } as const) : ({ at: 'over' } as const)
      // What is held in the grace is asked again.
      if (!isHeld || at !== 'asking')
        become('its claim arrives', n, { claiming: false, ...(at === 'asking' ? told : {}) }, change)
      if (!isHeld && at === 'asking')
        become('its claim arrives, the reply is lost', n, { claiming: false, at: 'unsure' }, change)
    }
    if (at === 'hearing') {
      become('it hears that it has claimed', n, { at: 'claimed' })
      become('it waits no longer for the reply', n, { at: 'unsure', fence: 0, life: 0, owes: false })
    }
    if (at === 'asking') become('it waits no longer for the reply', n, { at: 'unsure' })
    if (at === 'unsure') {
      const isOwn = own && (record.state === 'in_progress' || (record.state === 'unknown' && record.lapsed))
      if (isOwn || wrong('a lost claim is sent all the same'))
        become('it asks for its claim again', n, {
          at: 'claimed',
          fence: record?.fence ?? 0,
          life: record?.life ?? 0,
        })
      else {
        const { granted, isHeld, ...change } = claimed(world, n, true, rules)
        const told = granted ? ({ at: 'claimed', ...claimOf(world) } as const) : ({ at: 'over' } as const)
        if (!isHeld) become('it asks for its claim again', n, told, change)
      }
      if (wrong('a withdrawal deletes the record'))
        become('it withdraws', n, { at: 'over' }, { record: null })
      else become('it withdraws', n, { at: 'withdrawing', outcome: 'failed_retryable' })
    }

    const holdsLease = at === 'claimed' || at === 'sent'
    if (sure && (at === 'asking' || at === 'hearing' || at === 'unsure' || holdsLease))
      become('its lease grows old', n, { sure: false })
    if (
      holdsLease &&
      own &&
      (record.state === 'in_progress' || (record.state === 'unknown' && record.lapsed))
    )
      become(
        'it renews',
        n,
        // A store that has gone back may confirm what it had ended.
        { sure: sure || at === 'sent' || wrong('a renewal makes an old lease good for a first byte') },
        { record: { ...record, state: 'in_progress', lapsed: false } },
      )

    if (at === 'claimed') {
      if (sure || wrong('the first byte leaves on an old lease'))
        become('it sends', n, { at: 'sent', request: 'travelling' })
      become('it cannot send', n, { at: 'settling', outcome: 'failed_retryable' })
    }
    if (request === 'travelling') {
      become('the upstream executes it', n, { request: 'executed' })
      become('it never arrives', n, { request: 'lost' })
    }
    if (at === 'sent') {
      if (request === 'executed') {
        become('it is answered', n, { at: 'settling', outcome: 'completed' })
        // permit: the upstream's own answer said that nothing was done.
        become(
          'the answer says that nothing was done',
          n,
          { at: 'settling', outcome: 'failed_retryable' },
          { permits: permits + 1 },
        )
        become('the answer says nothing', n, { at: 'settling', outcome: 'unknown' })
      }
      if (wrong('a broken exchange is sent again') && request === 'executed')
        add('the exchange breaks off', n, {
          attempts: [
            ...attempts.with(n, { ...attempt, at: 'over' }),
            { ...NEW, claiming: false, at: 'sent', request: 'travelling' },
          ],
        })
      else
        become('the exchange breaks off', n, {
          at: 'settling',
          outcome: wrong('an error frees the key') ? 'failed_retryable' : 'unknown',
        })
    }
    if (outcome !== null) {
      const written = { record: settled(world, n, outcome, rules) }
      const isRefused = record !== null && written.record === record
      // Its attempt has ended: by an earlier try whose reply was lost, or by somebody else. Or the store has gone back.
      const isKnown = record?.life === attempt.life && record.fence <= attempt.fence
      const isRemembered = !isRefused || (isKnown && !wrong('an outcome that was refused is not remembered'))
      const wrote = isRemembered && (left.failovers > 0 || isInGrace) ? outcome : null
      const owes = attempt.owes && isRefused && wrote !== null
      become('its outcome arrives', n, { at: 'over', outcome: null, wrote, owes }, written)
      // Otherwise nothing is new.
      if (written.record !== record) become('its outcome arrives, the reply is lost', n, {}, written)
    }
    if (isInGrace && attempt.owes) {
      if (holdsLease)
        become('it writes its claim again', n, { owes: false }, reclaimed(world, n, 'in_progress', rules))
      if (at === 'over' && attempt.wrote !== null)
        become('it writes its outcome again', n, { owes: false }, reclaimed(world, n, attempt.wrote, rules))
    }
    if (at !== 'dead' && (at !== 'over' || attempt.wrote !== null)) {
      // permit: what a replica knew alone dies with it.
      const isLost = attempt.owes && mayHaveExecuted(attempt)
      const dead = { at: 'dead', outcome: null, wrote: null, owes: false } as const
      become('its process dies', n, dead, { permits: permits + Number(isLost) })
    }
  }

  if (left.failovers > 0) {
    if (!isSame(behind, record)) add('a replica of the store hears of the record', null, { behind: record })
    const isNoticed = !wrong('the grace is off')
    // permit: what a replica had claimed that died before the failover is lost with it.
    const lost = attempts.filter((one) => one.at === 'dead' && mayHaveExecuted(one) && !holds(behind, one))
    add('the store fails over', null, {
      record: behind,
      behind: null,
      isInGrace: isNoticed,
      attempts: attempts.map((one) => forgetful({ ...one, owes: isNoticed && mustWriteAgain(one, rules) })),
      permits: permits + lost.length,
      left: { ...left, failovers: left.failovers - 1 },
    })
  }
  if (isInGrace && !attempts.some(({ owes }) => owes))
    add('the grace ends', null, {
      isInGrace: false,
      attempts: attempts.map((one) => forgetful({ ...one, wrote: null })),
    })

  if (record === null) return found
  const owner = attempts[record.by]
  // A replica that stopped relying on its lease, or is gone: no other may be told so before.
  const isSilent = owner === undefined || !owner.sure
  const write = (name: StepName, to: Record | null, more: Partial<World> = {}): void =>
    add(name, null, { record: to, ...more })
  const { state, lapsed } = record
  const decided = (to: State, by = record.by): Record => ({ ...record, state: to, by, lapsed: false })
  if (state === 'in_progress' && !lapsed && isSilent)
    write('the lease lapses', wrong('the lease is the expiry') ? null : { ...record, lapsed: true })
  if (state === 'in_progress' && lapsed)
    write('the sweeper writes down that it fell silent', {
      ...record,
      state: wrong('a sweep frees what fell silent') ? 'failed_retryable' : 'unknown',
    })
  if (readsUnknown(record)) {
    // Both compare the version: what has changed meanwhile is looked at again.
    if (attempts.some(({ request }) => request === 'executed'))
      write('the upstream is asked, and has done it', decided('completed', NOBODY))
    else if (wrong('not found is believed at once') || !attempts.some(mayExecute))
      write('the upstream is asked, and knows nothing', decided('failed_retryable'))
    write('an operator says: completed', decided('completed', NOBODY))
    // permit: an operator decided.
    if (left.decisions > 0)
      write('an operator says: retryable', decided('failed_retryable'), {
        permits: permits + 1,
        left: { ...left, decisions: left.decisions - 1 },
      })
  }
  // permit: the promise ends with `ttl`.
  if (state === 'completed' && left.retentions > 0)
    write('its retention ends', null, {
      permits: permits + 1,
      left: { ...left, retentions: left.retentions - 1 },
    })
  // permit: what the store loses is told in the promise of each topology.
  if (left.losses > 0)
    write('the store loses the record', null, {
      permits: permits + 1,
      left: { ...left, losses: left.losses - 1 },
    })
  return found
}

const NEW: Attempt = {
  at: 'asking',
  claiming: true,
  sure: true,
  fence: 0,
  life: 0,
  request: 'unsent',
  outcome: null,
  wrote: null,
  owes: false,
}

/** One more than the record's; without one, the store's time, which is later than whatever was ever claimed. */
function nextFence({ record, behind, attempts }: World): number {
  const all = [behind, ...attempts].map((one) => one?.fence ?? 0)
  return 1 + (record?.fence ?? Math.max(...all))
}

/** What the owner of a claim that is granted now is told of it. */
function claimOf(world: World): Pick<Attempt, 'fence' | 'life'> {
  const fence = nextFence(world)
  return { fence, life: world.record?.life ?? fence }
}

/** Without what makes no difference any more: fewer states to go through. */
function forgetful(attempt: Attempt): Attempt {
  const { at, request } = attempt
  if (at !== 'settling' && at !== 'withdrawing' && at !== 'over' && at !== 'dead') return attempt
  return { ...attempt, sure: false, request: request === 'lost' ? 'unsent' : request }
}

export function readsUnknown(record: Record): boolean {
  return record.state === 'unknown' || (record.state === 'in_progress' && record.lapsed)
}

/** Its request is on its way, or may still be sent: its owner believes that it holds the lease. */
function mayExecute({ at, sure, request }: Attempt): boolean {
  const mayBegin = at === 'asking' || at === 'hearing' || at === 'unsure' || at === 'claimed'
  return request === 'travelling' || (sure && mayBegin)
}

function mayHaveExecuted({ request }: Attempt): boolean {
  return request === 'travelling' || request === 'executed'
}

/** What a replica has to say again after a failover (`Reclaimer.begin`). */
function mustWriteAgain({ at, wrote }: Attempt, { mistake }: Rules): boolean {
  switch (at) {
    case 'hearing':
      return mistake !== 'a late reply of the server before is forgotten'
    case 'claimed':
    case 'sent':
      return mistake !== 'claims are not written again'
    case 'settling':
      return true
    case 'over':
      return wrote !== null && mistake !== 'outcomes are not written again'
    case 'asking':
    case 'unsure':
    case 'withdrawing':
    case 'dead':
      return false
  }
}

/** Whether the record lets nobody execute what the attempt may have. */
function holds(record: Record | null, { fence }: Attempt): boolean {
  return record !== null && record.fence >= fence && record.state !== 'failed_retryable'
}

function isSame(one: Record | null, other: Record | null): boolean {
  return JSON.stringify(one) === JSON.stringify(other)
}

/** What a claim makes of the record. `decides`: its owner hears of what it finds, and may take it over. */
function claimed(
  world: World,
  n: number,
  decides: boolean,
  { retryLapsed, isPartOfFleetGraceless, mistake }: Rules,
): Partial<World> & { readonly granted: boolean; readonly isHeld: boolean } {
  const { record, isInGrace, permits } = world
  const mine: Record = { state: 'in_progress', by: n, lapsed: false, ...claimOf(world) }
  const refused = { granted: false, isHeld: false }
  const grant = (permitted = 0): ReturnType<typeof claimed> => {
    const isTakeover = record !== null
    const isHeld = isInGrace && !(isTakeover && mistake === 'takeovers are not held in the grace')
    // permit: a replica with `store.grace: off` beside the others.
    if (isHeld && !isPartOfFleetGraceless) return { granted: false, isHeld: true }
    return { granted: true, isHeld: false, record: mine, permits: permits + permitted + Number(isHeld) }
  }
  if (record === null) return grant()
  if (mistake === 'a refused request overwrites the record')
    return { ...refused, record: { ...record, state: 'failed_retryable' } }
  if (!decides) return refused
  if (record.state === 'failed_retryable') return grant()
  // permit: the route retries after silence.
  if (retryLapsed && record.lapsed && readsUnknown(record)) return grant(1)
  if (mistake === 'a takeover ignores the state' && readsUnknown(record)) return grant()
  return refused
}

/** The record after the outcome of attempt n has arrived (contract §2): the same one where it is refused. */
function settled(world: World, n: number, outcome: Outcome, { mistake }: Rules): Record | null {
  const { record, attempts } = world
  const own = attempts[n] as Attempt
  const fence = own.fence || nextFence(world)
  const mine: Record = { state: outcome, by: n, lapsed: false, fence, life: own.life || fence }
  if (record === null || mistake === 'outcomes are not checked') return mine
  const { state, by, life } = record
  if (mistake === 'a lapsed owner gives up its outcome' && readsUnknown(record)) return record
  const accepts =
    outcome === 'unknown' ? state === 'in_progress' || state === 'failed_retryable' : state !== 'completed'
  // Its owner was not silent after all: nothing is left for `onLeaseExpired: retry`.
  const isOwnSilence = outcome === 'unknown' && state === 'unknown' && record.lapsed
  if (by === n)
    return accepts || isOwnSilence ? { ...mine, fence: Math.max(own.fence, record.fence), life } : record
  if (own.at !== 'settling') return record
  // Of an earlier attempt, which the store had gone back to; or of another life, which came to nothing.
  const isEarlier = record.fence < own.fence && life <= own.life
  const cameToNothing = life > own.life && state === 'failed_retryable' && outcome !== 'failed_retryable'
  const mayReplace = outcome === 'completed' ? state !== 'completed' : state === 'failed_retryable'
  return (isEarlier && mayReplace) || cameToNothing
    ? { ...mine, fence: Math.max(own.fence, record.fence), life }
    : record
}

/** The record after attempt n has written again what the store may have lost (contract §9, core/reclaim.ts). */
function reclaimed(world: World, n: number, state: State, { mistake }: Rules): Pick<World, 'record'> {
  const { record, attempts } = world
  const { fence, life } = attempts[n] as Attempt
  const mine: Record = { state, by: n, lapsed: false, fence, life }
  // One that was withdrawn knows neither.
  if (record === null)
    return { record: { ...mine, fence: fence || nextFence(world), life: life || nextFence(world) } }
  const replaced = { record: { ...mine, fence: Math.max(fence, record.fence), life: record.life } }
  if (record.by === n) {
    const isBefore = record.state === 'in_progress' || (state === 'completed' && record.state !== 'completed')
    return state !== 'in_progress' && isBefore ? replaced : { record }
  }
  if (state === 'failed_retryable') return { record }
  if (record.life === life) {
    if (record.fence < fence && record.state !== 'completed') return replaced
    if (record.by === NOBODY || (state === 'unknown' && record.fence > fence)) return { record }
  }
  if (record.state === 'failed_retryable' || mistake === 'a reclaim ignores what another has claimed')
    return replaced
  if (record.state === 'completed') return { record }
  // A split: neither outcome decides by itself.
  const higher = Math.max(record.fence, fence)
  return { record: { ...record, state: 'unknown', by: NOBODY, lapsed: false, fence: higher } }
}
