/** One thing that a client, the upstream or a fault did, `at` milliseconds after the beginning. */
export interface Event {
  readonly at: number
  readonly what: string
}

/** The upstream did the work: this is the answer that it gave, or would have given. */
export interface Execution {
  readonly status: number
  readonly body: string
  /** The payload that was executed. */
  readonly payload: string
}

/** What a client was answered. Status 0: the connection ended first, or the client left. */
export interface Answer {
  readonly status: number
  /** `code` of the proxy's own answers. */
  readonly code: string | null
  readonly replayed: boolean
  readonly body: string
  /** The payload that was sent. */
  readonly payload: string
}

/** A caller's key on a route, and everything that happened to it. */
export class Operation {
  readonly route: string
  readonly caller: string
  readonly key: string
  readonly executions: Execution[] = []
  readonly answers: Answer[] = []
  readonly events: Event[] = []
  /** The last answer after everything has healed. */
  final: Answer | null = null

  constructor(route: string, caller: string, key: string) {
    this.route = route
    this.caller = caller
    this.key = key
  }

  /** Under which the upstream finds it. */
  get name(): string {
    return `${this.caller} ${this.key}`
  }
}

/** The operations of one round, and its faults: a million requests do not fit in memory. */
export class History {
  readonly operations = new Map<string, Operation>()
  /** As `Idempotency-Record` told the upstream. */
  readonly byRecord = new Map<string, Operation>()
  /** What the upstream was sent for an operation that had been judged in an earlier round. */
  readonly strays: string[] = []
  /** Something was executed more than once: no need to go on. */
  hasDoubles = false
  readonly #faults: Event[] = []
  readonly #began = performance.now()

  get now(): number {
    return Math.round(performance.now() - this.#began)
  }

  open(route: string, caller: string, key: string): Operation {
    const operation = new Operation(route, caller, key)
    this.operations.set(operation.name, operation)
    return operation
  }

  note(operation: Operation, what: string): void {
    operation.events.push({ at: this.now, what })
  }

  fault(what: string): void {
    this.#faults.push({ at: this.now, what })
  }

  /** Forgets the operations that were judged. */
  forget(): void {
    this.operations.clear()
    this.byRecord.clear()
    this.#faults.length = 0
  }

  /** What happened to one operation, with the faults of its time, for a person to read. */
  timeline(operation: Operation): string {
    const { events } = operation
    const faults = this.#faults
      .filter((fault) => events.some(({ at }) => fault.at >= at - 3000 && fault.at <= at + 1000))
      .map(({ at, what }) => ({ at, what: `          ${what}` }))
    // The last of it is often the same question a hundred times.
    const shown = events.length > 60 ? [...events.slice(0, 40), ...events.slice(-20)] : events
    return [...shown, ...faults]
      .sort((a, b) => a.at - b.at)
      .map(({ at, what }) => `${String(at).padStart(9)} ms  ${what}`)
      .join('\n')
  }
}
