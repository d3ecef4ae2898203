import { agreement, type Rechecked } from '../core/recheck.ts'
import { questionOf } from '../core/reconcile.ts'
import type { Completed, Millis, RecordId } from '../core/record.ts'
import { hear } from './ask.ts'
import { reconcileOf } from './look.ts'
import type { ReconcilePorts } from './ports.ts'

/** Asks the upstream anew about completed records, as the reconciler asks about unknown ones. Changes nothing. */
export class Recheck {
  readonly #ports: Pick<ReconcilePorts, 'forward' | 'policyOf'>

  constructor(ports: Pick<ReconcilePorts, 'forward' | 'policyOf'>) {
    this.#ports = ports
  }

  /** How old a record of the route must be: before, "not found" says nothing. Null: its records cannot be asked about. */
  from(route: string): Millis | null {
    return reconcileOf(this.#ports.policyOf(route))?.after ?? null
  }

  /**
   * One question, and a second one where the first was answered "not found", as it takes two to resolve a record: by the key as
   * it was sent, where that is another spelling.
   */
  async ask(id: RecordId, record: Completed): Promise<Rechecked> {
    const route = this.#ports.policyOf(record.route)
    const policy = reconcileOf(route)
    if (route === null || policy === null) return { kind: 'not_asked', why: 'its route has no `reconcile`' }
    const once = async (key: string | null): Promise<Rechecked | 'not_found'> => {
      const question = questionOf(policy, id, key)
      if (typeof question === 'string') return { kind: 'not_asked', why: question }
      const { heard, release } = await hear(this.#ports, { id, key, route, policy }, question)
      try {
        if (heard.kind === 'not_sent') return { kind: 'not_asked', why: heard.why }
        return heard.kind === 'not_found' ? 'not_found' : agreement(record.result, heard)
      } finally {
        release()
      }
    }
    const first = await once(record.key)
    const last = first === 'not_found' ? await once(record.keySent ?? record.key) : first
    return last === 'not_found' ? agreement(record.result, { kind: 'not_found' }) : last
  }
}
