import type { Millis } from '../core/record.ts'
import { refusal } from '../core/refusal.ts'
import { StoreUnavailable } from '../store/register.ts'
import type { Ports } from './ports.ts'
import type { Problem } from './request.ts'

/** Makes keys (contract §4, `issuer`). Times are of the store's clock. */
export interface KeyIssuer {
  issue(now: Millis): Promise<IssuedKey>
}

export interface IssuedKey {
  readonly key: string
  readonly expiresAt: Millis
}

/** A signed key that expires. The store tells the time, so that all replicas agree on when. */
export async function issueKey(
  { store }: Pick<Ports, 'store'>,
  issuer: KeyIssuer,
): Promise<(IssuedKey & { readonly kind: 'issued' }) | Problem> {
  let now: Millis
  try {
    now = await store.ping()
  } catch (error) {
    if (!(error instanceof StoreUnavailable)) throw error
    const detail = 'the store does not tell the time; no key was issued'
    return {
      kind: 'problem',
      refusal: refusal('idempotency_store_unavailable', detail, { retryAfter: 1 }),
      proxyHeaders: [],
    }
  }
  return { kind: 'issued', ...(await issuer.issue(now)) }
}
