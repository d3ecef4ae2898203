/** One thing that may happen, by whichever attempt it concerns; null: none. */
export interface Move<World> {
  readonly name: string
  readonly attempt: number | null
  readonly to: World
}

/** A model: everything that may happen, and what of it the contract forbids. */
export interface Model<World, Step extends Move<World>> {
  readonly first: World
  steps(world: World): Step[]
  /** Equal for worlds that differ in nothing but the names of their attempts and the size of numbers of which only the order counts. */
  keyOf(world: World): string
  /** What the contract forbids of a state. */
  wrongState(world: World): string | null
  /** What the contract forbids of a step. */
  wrongStep(world: World, step: Step): string | null
  /** From everywhere some path must lead to such a state. */
  isSettled(world: World): boolean
}

export interface Exploration<Step> {
  readonly states: number
  readonly steps: number
  /** The shortest way to a state, or a step, that the contract forbids; null: there is none. */
  readonly broken: {
    readonly what: string
    readonly path: readonly Step[]
    readonly trace: readonly string[]
  } | null
  /** A shortest way to the n-th state, in the order in which they were found. */
  readonly pathTo: (n: number) => Step[]
}

/** What grows to millions. */
class Numbers {
  #items = new Int32Array(1024)
  size = 0
  push(item: number): void {
    if (this.size === this.#items.length) {
      const more = new Int32Array(2 * this.size)
      more.set(this.#items)
      this.#items = more
    }
    this.#items[this.size++] = item
  }
  at(n: number): number {
    return this.#items[n] as number
  }
}

/** Goes through every state that can be reached, breadth first. */
export function explore<World, Step extends Move<World>>(model: Model<World, Step>): Exploration<Step> {
  const numbers = new Map([[model.keyOf(model.first), 0]])
  /** Of those whose steps have not been taken yet; the others only by how they were reached. */
  const worlds: (World | null)[] = [model.first]
  const from = new Numbers()
  /** Which step of `from` it was. */
  const by = new Numbers()
  const settled: boolean[] = [model.isSettled(model.first)]
  /** Where the steps of each state lead, and where those of the n-th begin. */
  const leads = new Numbers()
  const begins = new Numbers()
  from.push(-1)
  by.push(-1)

  const pathTo = (end: number): Step[] => {
    const taken: number[] = []
    for (let n = end; n > 0; n = from.at(n)) taken.unshift(by.at(n))
    let world = model.first
    return taken.map((which) => {
      const step = model.steps(world)[which] as Step
      world = step.to
      return step
    })
  }
  const broken = (what: string, path: readonly Step[]): Exploration<Step> => ({
    states: numbers.size,
    steps: leads.size,
    broken: { what, path, trace: path.map(told) },
    pathTo,
  })

  for (let here = 0; here < worlds.length; here++) {
    const world = worlds[here] as World
    worlds[here] = null
    begins.push(leads.size)
    for (const [which, step] of model.steps(world).entries()) {
      const key = model.keyOf(step.to)
      const there = numbers.get(key) ?? numbers.size
      leads.push(there)
      const what = model.wrongStep(world, step) ?? model.wrongState(step.to)
      if (what !== null) return broken(what, [...pathTo(here), step])
      if (there < numbers.size) continue
      numbers.set(key, there)
      worlds.push(step.to)
      from.push(here)
      by.push(which)
      settled.push(model.isSettled(step.to))
    }
  }
  begins.push(leads.size)
  const stuck = stuckIn(settled, leads, begins)
  if (stuck >= 0) return broken('nobody can settle the record any more', pathTo(stuck))
  return { states: numbers.size, steps: leads.size, broken: null, pathTo }
}

/** A state from which no path leads to one that is `fine`; -1: there is none. */
function stuckIn(fine: boolean[], leads: Numbers, begins: Numbers): number {
  // Most steps lead to later states: few rounds are enough.
  for (let isChanged = true; isChanged; ) {
    isChanged = false
    for (let n = fine.length - 1; n >= 0; n--) {
      if (fine[n] === true) continue
      for (let step = begins.at(n); step < begins.at(n + 1) && fine[n] === false; step++)
        fine[n] = fine[leads.at(step)] as boolean
      if (fine[n] === true) isChanged = true
    }
  }
  return fine.indexOf(false)
}

export function told({ name, attempt }: Pick<Move<unknown>, 'name' | 'attempt'>): string {
  return attempt === null ? name : `${attempt + 1}: ${name}`
}

/** So many of the longer paths, evenly taken: they pass through most of the others. */
export function* sample<S>({ states, pathTo }: Exploration<S>, size: number): Generator<readonly S[]> {
  const half = Math.floor(states / 2)
  const every = Math.ceil((states - half) / size)
  for (let n = half; n < states; n += every) yield pathTo(n)
}
