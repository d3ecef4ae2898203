import { RECORD_ID } from '../core/record.ts'
import { CorruptRecord, StoreUnavailable } from '../store/register.ts'
import { type AdminAnswer, ok, problem } from './answers.ts'
import { ENDPOINTS, type Endpoint } from './endpoints.ts'
import { DESCRIPTION, description } from './openapi.ts'
import type { AdminPorts, AdminRequest } from './ports.ts'

export type Found =
  | { readonly kind: 'endpoint'; readonly endpoint: Endpoint; readonly id: string }
  | { readonly kind: 'refused'; readonly answer: AdminAnswer }

/** The admin API behind the gate (contract §12): no sockets, no headers but those that it names. */
export class AdminApi {
  readonly #ports: AdminPorts
  readonly #onBug: (error: unknown) => void
  readonly #endpoints: readonly Endpoint[]

  constructor(ports: AdminPorts, version: string, onBug: (error: unknown) => void) {
    this.#ports = ports
    this.#onBug = onBug
    const told = description(version)
    this.#endpoints = [...ENDPOINTS, { ...DESCRIPTION, run: () => ok(told) }]
  }

  /** `path`: as sent, without the query. HEAD is asked for as GET. */
  find(method: string, path: string): Found {
    const there = this.#endpoints.flatMap((endpoint) => {
      const id = idIn(endpoint.path, path)
      return id === null ? [] : [{ kind: 'endpoint' as const, endpoint, id }]
    })
    const wanted = method === 'HEAD' ? 'GET' : method
    const found = there.find(({ endpoint }) => endpoint.method === wanted)
    if (found !== undefined) return found
    if (there.length === 0)
      return { kind: 'refused', answer: problem('not_found', 'see /v1/openapi.json for what there is') }
    const allow = there
      .flatMap(({ endpoint }) => (endpoint.method === 'GET' ? ['GET', 'HEAD'] : [endpoint.method]))
      .join(', ')
    const answer = problem('method_not_allowed', `allowed: ${allow}`, { headers: { allow } })
    return { kind: 'refused', answer }
  }

  async run(endpoint: Endpoint, request: AdminRequest): Promise<AdminAnswer> {
    try {
      return await endpoint.run(this.#ports, request)
    } catch (error) {
      if (error instanceof StoreUnavailable)
        return problem('store_unavailable', error.message, { headers: { 'retry-after': '1' } })
      if (error instanceof CorruptRecord) return problem('record_unreadable', error.message)
      this.#onBug(error)
      return problem('internal_error', 'see the log')
    }
  }
}

/** Empty where the template names none; null: it does not match. */
function idIn(template: string, path: string): string | null {
  const [before = '', after] = template.split('{id}')
  if (after === undefined) return path === template ? '' : null
  if (!path.startsWith(before) || !path.endsWith(after)) return null
  const id = path.slice(before.length, path.length - after.length)
  return RECORD_ID.test(id) ? id : null
}
