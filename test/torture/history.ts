/** One thing that a client, the upstream or a fault did, `at` milliseconds after the beginning. */
export interface Event {
  readonly at: number
  readonly what: string
}

/** The upstream did the work: this is the response that it gave, or would have given. */
export interface Execution {
  readonly status: number
  readonly body: string
  /** The payload that was executed. */
  readonly payload: string
}

/** The response that a client got. Status 0: the connection ended first, or the client left. */
export interface Answer {
  readonly status: number
  /** `code` of the proxy's own responses. */
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
  /** The last response after everything has healed. */
  final: Answer | null = null

  constructor(route: string, caller: string, key: string) {
    this.route = route
    this.caller = caller
    this.key = key
  }

  /** The name under which the upstream finds it. */
  get name(): string {
    return `${this.caller} ${this.key}`
  }
}

/** The operations of one round, and its faults: a million requests do not fit in memory. */
export class History {
  readonly operations = new Map<string, Operation>()
  /** By the `Idempotency-Record` that the upstream got. */
  readonly byRecord = new Map<string, Operation>()
  /** Operations that the upstream was sent after an earlier round had judged them. */
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

  /** What happened to one operation, with the faults around it, for a person to read. */
  timeline(operation: Operation): string {
    const { events } = operation
    const faults = this.#faults
      .filter((fault) => events.some(({ at }) => fault.at >= at - 3000 && fault.at <= at + 1000))
      .map(({ at, what }) => ({ at, what: `          ${what}` }))
    // It often ends with the same retry a hundred times.
    const shown = events.length > 60 ? [...events.slice(0, 40), ...events.slice(-20)] : events
    return [...shown, ...faults]
      .sort((a, b) => a.at - b.at)
      .map(({ at, what }) => `${String(at).padStart(9)} ms  ${what}`)
      .join('\n')
  }
}
