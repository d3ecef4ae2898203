import type { Millis, Spans } from '../core/record.ts'
import { markDraft, UPSTREAM_MARK } from './marks.ts'
import { decodeRecord, encodeDraft } from './record/codec.ts'
import type { Store } from './register.ts'

/** As unresolved records by default: longer than anyone retries. */
const KEPT_FOR: Millis = 30 * 24 * 60 * 60_000
const SPANS: Spans = { dueIn: KEPT_FOR, dropIn: KEPT_FOR }
const TOKEN = Buffer.alloc(16, 'upstream')

/**
 * Whether the last proxy of this service on this store forwarded to another upstream, perhaps another API; from now on it is this one. For
 * stores without a mark of live replicas ({@link file://./agreement.ts}).
 * @throws {StoreUnavailable | CorruptRecord}
 */
export async function hadOtherUpstream(
  store: Pick<Store, 'get' | 'put' | 'swap'>,
  tag: string,
): Promise<boolean> {
  const { bytes } = await store.get(UPSTREAM_MARK)
  const mark = bytes === null ? null : decodeRecord(bytes)
  const about = 'where the last proxy of this service forwarded to'
  const draft = encodeDraft(markDraft({ token: TOKEN, route: 'upstream', path: tag, about }))
  await (mark === null
    ? store.put(UPSTREAM_MARK, draft, SPANS, 'claim')
    : store.swap(UPSTREAM_MARK, { version: mark.version }, draft, SPANS, false))
  return mark !== null && mark.path !== tag
}
