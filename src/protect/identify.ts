import { essence } from '../core/body/content.ts'
import type { RequestDigests } from '../core/decide.ts'
import { fingerprintOf, rawDigestOf, recipeOf } from '../core/fingerprint.ts'
import { RESPONSE_HEADER } from '../core/headers.ts'
import { type KeyQualifier, recordId } from '../core/identity.ts'
import { deriveKey, type KeyReading, keyNeedsBody, readFirstSent, readKey, sourceName } from '../core/key.ts'
import type { DerivePolicy } from '../core/policy.ts'
import { asksByKey } from '../core/reconcile/answer.ts'
import { identifiersSent } from '../core/reconcile/identifiers.ts'
import type { Millis, Operation, RecordId } from '../core/record.ts'
import { StoreUnavailable } from '../store/register.ts'
import { refuse, storeUnavailable } from './answers.ts'
import { type Caller, identifyCaller, refuseCaller } from './caller.ts'
import type { Ports } from './ports.ts'
import type { Answer, ProtectedRequest, Trace } from './request.ts'

/** What a request is called and what it asks for: everything that a claim needs. */
export interface Identified {
  readonly kind: 'identified'
  readonly id: RecordId
  readonly key: string
  /** The proxy made the key (`key.derive`). */
  readonly derived: boolean
  readonly caller: readonly (string | null)[]
  readonly operation: Operation
  readonly asked: RequestDigests
  /** False: an issued key that has expired. It finds its record and makes none. */
  readonly mayClaim: boolean
}

/** Who calls, and the key as far as the head of the request says it. */
export interface RequestHead {
  readonly kind: 'head'
  readonly caller: Caller
  readonly reading: Exclude<KeyReading, { kind: 'invalid' }>
}

type NamingPorts = Pick<
  Ports,
  'store' | 'namespace' | 'upstream' | 'verifyToken' | 'checkIssued' | 'observer'
>

/** Reads what stands in the head, before the body is asked for and before the store is. */
export async function readHead(
  ports: NamingPorts,
  request: ProtectedRequest,
  trace: Trace,
): Promise<RequestHead | Answer> {
  const { route } = request
  const { presence } = route.key
  const reading = readKey(request, route.key, null)
  if (reading.kind === 'invalid') return refuseKey(trace, reading.detail)
  const mayFollow = keyNeedsBody(route.key) || route.key.derive !== null
  if (reading.kind === 'missing' && presence === 'required' && !mayFollow)
    return refuseMissing(request, trace)
  const caller = await identifyCaller(ports, request)
  // Without a key nobody needs to know, and where none is required the request may go on without one.
  const needed = reading.kind === 'key' || presence === 'required'
  return caller.kind === 'unidentified' && needed
    ? refuseCaller(trace, caller)
    : { kind: 'head', caller, reading }
}

/** Says of an answer that the proxy made the key (contract §4). */
export const DERIVED_HEADER: readonly string[] = [RESPONSE_HEADER.derived, 'true']

/** In no key that a client sends: a derived one can be computed by anybody. */
const DERIVED = ['derived']

/** `no_key`: no key, and none is required. */
export async function identify(
  ports: NamingPorts,
  request: ProtectedRequest,
  trace: Trace,
  { caller, reading: head }: RequestHead,
  body: Buffer,
): Promise<Identified | Answer | { readonly kind: 'no_key' }> {
  const { route, method, path, headers } = request
  const reading = keyNeedsBody(route.key) ? readKey(request, route.key, body) : head
  if (reading.kind === 'invalid') return refuseKey(trace, reading.detail)
  const derive = reading.kind === 'missing' ? route.key.derive : null
  if (reading.kind === 'missing' && (derive === null || deriveKey(headers, body, [], derive, 0) === null))
    return route.key.presence === 'required' ? refuseMissing(request, trace) : { kind: 'no_key' }
  if (caller.kind === 'unidentified') return refuseCaller(trace, caller)
  const sent = readFirstSent(headers)
  if (sent.kind === 'invalid') return refuseKey(trace, sent.detail)

  const timed = sent.kind === 'sent' || route.key.issuedOnly || (derive !== null && derive.bucket !== null)
  const now = timed ? await storeTime(ports, request) : 0
  if (now === null)
    return storeUnavailable(
      ports,
      trace,
      null,
      'the store does not tell the time; nothing was executed for this request',
    )
  const { parts } = caller
  const { key, qualifier } =
    reading.kind === 'key'
      ? reading
      : {
          key: deriveKey(headers, body, parts, derive as DerivePolicy, now) as string,
          qualifier: DERIVED,
        }
  if (sent.kind === 'sent' && now - sent.at > route.ttl) {
    const detail = `the request was first sent at ${new Date(sent.at).toISOString()}, longer ago than this route keeps answers (${route.ttl / 1000} s); nothing was executed now, and whether it was executed then is not known here`
    const answer = refuse(trace, 'expired', 'idempotency_key_expired', detail, { status: 412 })
    return derive === null ? answer : { ...answer, proxyHeaders: DERIVED_HEADER }
  }
  const issued = route.key.issuedOnly ? await ports.checkIssued(key, now) : 'valid'
  if (issued === 'forged') return refuseKey(trace, 'not a key that the issuer of this proxy made')

  const content = { ...request, body }
  const recipe = recipeOf(route.fingerprint)
  const id = recordId(ports.namespace, route, parts, method, path, key, qualifier, request.host)
  trace.id = id
  const operation: Operation = {
    route: route.name,
    method,
    path,
    fingerprint: fingerprintOf(content, route.fingerprint),
    rawDigest: rawDigestOf(content, recipe),
    recipe,
    ...identifiersOf(ports, request, id, key, qualifier, body),
    span: request.span,
  }
  return {
    kind: 'identified',
    id,
    key,
    derived: derive !== null,
    caller: parts,
    operation,
    asked: { ...operation, rawDigestUnder: (other) => rawDigestOf(content, other) },
    mayClaim: issued === 'valid',
  }
}

/**
 * What the upstream is told, and so what it may be asked by later. The key is kept only where it is asked by that (contract §1).
 * The id of an event names nothing without its source. Where nobody could ask, nothing is worked out.
 */
function identifiersOf(
  { upstream }: Pick<Ports, 'upstream'>,
  request: ProtectedRequest,
  id: RecordId,
  key: string,
  [qualifiedBy]: KeyQualifier,
  body: Buffer,
): Pick<Operation, 'key' | 'keySent' | 'told' | 'toldTo'> {
  const { route } = request
  // The question does not say which host was asked: another host's "not found" proves nothing.
  if (route.scope.host) return { key: null }
  const keepsKey = route.reconcile !== null && asksByKey(route.reconcile) && qualifiedBy !== 'ce-source'
  if (!keepsKey && !route.key.forwardFence) return { key: null }
  // Shadow mode lets the request pass as it is. The fence, which the claim makes, is nothing to ask by.
  const lines = request.upstreamHeaders(route.mode === 'shadow' ? null : { id, key, fence: 0 })
  const from = route.key.from.filter(({ kind }) => kind !== 'header')
  const inBody = from.length > 0 && readKey(request, { ...route.key, from }, body).kind === 'key'
  return identifiersSent(lines, route.key, id, key, inBody, keepsKey, upstream)
}

/** Null: the store cannot be asked, and the route does not go on without it. */
async function storeTime(ports: NamingPorts, { route }: ProtectedRequest): Promise<Millis | null> {
  try {
    return await ports.store.ping()
  } catch (error) {
    if (!(error instanceof StoreUnavailable)) throw error
    return route.onStoreUnavailable === 'bypass' ? Date.now() : null
  }
}

function refuseKey(trace: Trace, detail: string): Answer {
  return refuse(trace, 'key_invalid', 'idempotency_key_invalid', detail)
}

function refuseMissing({ route, headers }: ProtectedRequest, trace: Trace): Answer {
  const { from } = route.key
  const ofEvents = from.some((source) => source.kind === 'header' && source.name === 'ce-id')
  if (ofEvents && essence(headers) === 'application/cloudevents-batch+json') {
    const detail = 'a batch of events has no key; send its events one by one'
    return refuse(trace, 'key_missing', 'idempotency_key_missing', detail)
  }
  const sources = from.map(sourceName).join(', ')
  const derivable = route.key.derive === null ? '' : ', or what a key can be derived from'
  return refuse(trace, 'key_missing', 'idempotency_key_missing', `send one of: ${sources}${derivable}`)
}
