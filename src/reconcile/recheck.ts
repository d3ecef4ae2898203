import { buildQuestion, pathParameters } from '../core/reconcile/answer.ts'
import { type Verification, verifyStored } from '../core/reconcile/verify.ts'
import type { Completed, Millis, RecordId } from '../core/record.ts'
import { askUpstream } from './ask.ts'
import { reconcileOf } from './inspect-due.ts'
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
  async ask(id: RecordId, record: Completed): Promise<Verification> {
    const route = this.#ports.policyOf(record.route)
    const policy = reconcileOf(route)
    if (route === null || policy === null) return { kind: 'not_asked', why: 'its route has no `reconcile`' }
    const once = async (key: string | null): Promise<Verification | 'not_found'> => {
      const parameters = pathParameters(route.match, record.path)
      const question = buildQuestion(policy, id, key, parameters)
      if (typeof question === 'string') return { kind: 'not_asked', why: question }
      const { heard, release } = await askUpstream(
        this.#ports,
        { id, key, parameters, route, policy },
        question,
      )
      try {
        if (heard.kind === 'not_sent') return { kind: 'not_asked', why: heard.why }
        return heard.kind === 'not_found' ? 'not_found' : verifyStored(record.result, heard)
      } finally {
        release()
      }
    }
    const first = await once(record.key)
    const last = first === 'not_found' ? await once(record.keySent ?? record.key) : first
    return last === 'not_found' ? verifyStored(record.result, { kind: 'not_found' }) : last
  }
}
