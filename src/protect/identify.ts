import { SHORT_BODY } from '../core/body/json-text.ts'
import { Digests, type ReadableBody } from '../core/fingerprint.ts'
import { essence, firstOf, isEncoded, linesOf, RESPONSE_HEADER } from '../core/headers.ts'
import { type KeyQualifier, readCaller, recordId } from '../core/identity.ts'
import {
  derivedParts,
  deriveKey,
  issuedAt,
  type KeyBody,
  type KeyReading,
  keyNeedsBody,
  readFirstSent,
  readKey,
  readKeyBody,
  sourceName,
} from '../core/key.ts'
import { readLabel } from '../core/label.ts'
import type { DerivePolicy, JwtPolicy } from '../core/policy.ts'
import { asksByKey } from '../core/reconcile/answer.ts'
import { identifiersSent } from '../core/reconcile/identifiers.ts'
import type { Millis, Operation, RecordId } from '../core/record.ts'
import { refusal } from '../core/refusal.ts'
import { type FramedProtocol, messagesIn } from '../core/rpc/messages.ts'
import { methodName } from '../core/rpc/protocol.ts'
import { completionTerms } from '../core/settle.ts'
import { atOnce, type Steps } from '../core/steps.ts'
import { readableBody } from '../runtime/coding.ts'
import { inSteps } from '../runtime/scheduling.ts'
import { nullIfUnavailable } from '../store/records.ts'
import { refuse, refuseBody, storeUnavailable, streamRefused } from './answers.ts'
import type { WalkPorts } from './ports.ts'
import type { Answer, Problem, ProtectedRequest } from './request.ts'

/** The caller, or why it cannot be identified (contract §5). */
export type Caller =
  | { readonly kind: 'caller'; readonly parts: readonly (string | null)[] }
  | UnidentifiedCaller

interface UnidentifiedCaller {
  readonly kind: 'unidentified'
  readonly detail: string
  /** For the log; null: nothing beyond the detail. */
  readonly cause: string | null
  /** 503: the caller may be known in a moment. */
  readonly status: 400 | 401 | 503
}

/** The caller, and the key if the head carries it. */
export interface RequestHead {
  readonly kind: 'head'
  readonly caller: Caller
  readonly key: Exclude<KeyReading, { kind: 'invalid' }>
}

/** The record and the operation of a request: everything a claim needs. */
export interface Identified {
  readonly kind: 'identified'
  readonly id: RecordId
  readonly key: string
  /** The proxy made the key (`key.derive`). */
  readonly derived: boolean
  readonly caller: readonly (string | null)[]
  /** Computes the fingerprint unless that has been done. */
  readonly operation: () => Operation
  readonly asked: Digests
  /** False: an expired issued key, which finds its record but creates none. */
  readonly mayClaim: boolean
  /** When the key was created, as {@link isBornSince} takes it. */
  readonly bornAt: Millis | null
}

type IdentifyPorts = Pick<
  WalkPorts,
  'store' | 'namespace' | 'upstream' | 'verifyToken' | 'checkIssued' | 'observer' | 'budget' | 'descriptors'
>

/** Reads the head, before the body is read or the store asked. */
export function readHead(
  ports: Pick<WalkPorts, 'verifyToken'>,
  request: ProtectedRequest,
): RequestHead | Answer | Promise<RequestHead | Answer> {
  const { route } = request
  const { presence, derive } = route.key
  const key = readKey(request, route.key, null)
  if (key.kind === 'invalid') return refuseKey(key.detail)
  const mayFollow = keyNeedsBody(route.key) || derive !== null
  if (key.kind === 'missing' && presence === 'required' && !mayFollow) return refuseMissing(request)
  // Without a key the caller does not matter; if no key is required, the request may proceed without one.
  const needed = key.kind === 'key' || presence === 'required'
  const headOf = (caller: Caller): RequestHead | Answer =>
    caller.kind === 'unidentified' && needed ? refuseCaller(caller) : { kind: 'head', caller, key }
  const { scope } = route
  return scope.jwt === null
    ? headOf(asCaller(readCaller(request, scope, null)))
    : verifyCaller(ports, request, scope.jwt).then(headOf)
}

async function verifyCaller(
  { verifyToken }: Pick<WalkPorts, 'verifyToken'>,
  request: ProtectedRequest,
  policy: JwtPolicy,
): Promise<Caller> {
  const {
    route: { scope },
    headers,
  } = request
  const verified = await verifyToken(policy, headers)
  switch (verified.kind) {
    case 'claims':
      return asCaller(readCaller(request, scope, verified.claims))
    case 'refused':
      return { kind: 'unidentified', detail: verified.detail, cause: null, status: 401 }
    case 'unavailable': {
      const detail = `the caller cannot be verified now: ${verified.detail}; nothing was executed`
      return { kind: 'unidentified', detail, cause: null, status: 503 }
    }
    case 'absent': {
      // A credential of another scheme still identifies somebody, who must not share keys with anonymous callers.
      const other = linesOf(headers, 'authorization').some((line) => line.trim() !== '')
      const detail = 'Authorization carries no bearer token, which is needed to identify the caller'
      return other
        ? { kind: 'unidentified', detail, cause: null, status: 401 }
        : asCaller(readCaller(request, scope, null))
    }
  }
}

function asCaller(reading: ReturnType<typeof readCaller>): Caller {
  return reading.kind === 'caller' ? reading : { ...reading, kind: 'unidentified' }
}

/** A single name for all parts of a caller; null: the caller is unidentified, or all callers are the same. */
export function callerName(caller: Caller): string | null {
  if (caller.kind === 'unidentified' || caller.parts.every((part) => part === null)) return null
  return caller.parts.join('\0')
}

/** Header lines that say that the proxy made the key (contract §4). */
export const DERIVED_HEADER: readonly string[] = [RESPONSE_HEADER.derived, 'true']

/** A qualifier that no client's key has: anybody can compute a derived key. */
const DERIVED = ['derived']

/** `no_key`: no key, and none is required. */
export type Identification = Identified | Answer | { readonly kind: 'no_key' }

/** A key as the record stores it. */
interface NamedKey {
  readonly key: string
  readonly qualifier: KeyQualifier
  readonly derived: boolean
}

export function identify(
  ports: IdentifyPorts,
  request: ProtectedRequest,
  head: RequestHead,
  body: Buffer,
): Identification | Promise<Identification> {
  const { headers, route, protocol } = request
  if (protocol !== null && protocol !== 'connect') return identifyCall(ports, request, head, body, protocol)
  const read = protocol === null ? identifyDecoded : identifyMessage
  if (!isEncoded(headers)) return read(ports, request, head, { sent: body, headers, body })
  return readableBody(headers, body, route.limits.request).then((readable) =>
    read(ports, request, head, { sent: body, ...readable }),
  )
}

/** Decoding, if there was any, took memory of its own, which is held as long as the body: a duplicate may still be compared with it. */
function identifyDecoded(
  ports: IdentifyPorts,
  request: ProtectedRequest,
  head: RequestHead,
  upload: Upload,
): Identification | Promise<Identification> {
  if (upload.body.buffer !== upload.sent.buffer) {
    const release = ports.budget.hold(upload.body.length)
    if (release === null) return refuseBody(request, 'no_room')
    request.progress.letGo = release
  }
  return identifyRead(ports, request, head, upload)
}

/** Reads and compares the message of a call, without its prefix and compression. One with several messages is a stream: not protected. */
function identifyCall(
  ports: IdentifyPorts,
  request: ProtectedRequest,
  head: RequestHead,
  body: Buffer,
  protocol: FramedProtocol,
): Identification | Promise<Identification> {
  const { headers, route } = request
  const messages = messagesIn(protocol, body, 2)
  const [message] = messages ?? []
  if (messages === null || message === undefined || message.isTrailers)
    return refuseCall('the body is not a complete gRPC message; nothing was executed')
  if (messages.length > 1) {
    if (route.key.presence !== 'required') return { kind: 'no_key' }
    return { kind: 'problem', refusal: streamRefused(), proxyHeaders: [], facts: { outcome: 'key_invalid' } }
  }
  const { bytes, isCompressed } = message
  if (!isCompressed) return identifyMessage(ports, request, head, { sent: body, headers, body: bytes })
  const coding = firstOf(headers, 'grpc-encoding') ?? 'unknown'
  return readableBody(['content-encoding', coding], bytes, route.limits.request).then((readable) =>
    readable.body === bytes
      ? // Compared as sent.
        identifyRead(ports, request, head, { sent: body, headers, body, view: { headers: UNREADABLE, body } })
      : identifyMessage(ports, request, head, { sent: body, headers, body: readable.body }),
  )
}

/** Reads the fields that the route needs. The message is compared as bytes, since it may have fields that the descriptors do not. */
function identifyMessage(
  ports: IdentifyPorts,
  request: ProtectedRequest,
  head: RequestHead,
  upload: Upload,
): Identification | Promise<Identification> {
  const { target, headers, route } = request
  const readAs = (json: Buffer) =>
    identifyDecoded(ports, request, head, { ...upload, view: { headers: AS_JSON, body: json } })
  const isRead = keyNeedsBody(route.key) || route.record.label?.kind === 'json'
  // Fields cannot be read from a message that is still encoded.
  if (!isRead || isEncoded(upload.headers)) return identifyDecoded(ports, request, head, upload)
  if (essence(headers).endsWith('json')) return readAs(upload.body)
  const method = ports.descriptors?.methods.get(methodName(target))
  if (method === undefined) return identifyDecoded(ports, request, head, upload)
  const json = method.jsonOf(upload.body)
  return json === null
    ? refuseCall(`the message is not a request of ${method.name}; nothing was executed`)
    : readAs(Buffer.from(json))
}

const AS_JSON = ['content-type', 'application/json']
/** A field may hold the key: the call must not count as one without a key. */
const UNREADABLE = ['content-encoding', 'unknown']

function refuseCall(detail: string): Answer {
  return refuse('key_invalid', 'request_malformed', detail)
}

/** A body as sent and as it is read. */
interface Upload extends ReadableBody {
  readonly sent: Buffer
  /** Where keys and labels are read instead. */
  readonly view?: ReadableBody
}

function identifyRead(
  ports: IdentifyPorts,
  request: ProtectedRequest,
  head: RequestHead,
  upload: Upload,
): Identification | Promise<Identification> {
  const { key, record } = request.route
  if (record.label === null && !keyNeedsBody(key))
    return identifyBy(ports, request, head, upload, NOTHING_READ)
  const reading = readUpload(request, head, upload)
  if (upload.body.length <= SHORT_BODY) return identifyBy(ports, request, head, upload, atOnce(reading))
  return inSteps(reading).then((read) => identifyBy(ports, request, head, upload, read))
}

/** Reads the parts of the body that the key needs, and the label. */
function* readUpload(request: ProtectedRequest, head: RequestHead, upload: Upload): Steps<KeyBody> {
  const {
    route: { key, record },
    progress,
  } = request
  const { headers, body } = upload.view ?? upload
  if (record.label !== null) progress.label = yield* readLabel(record.label, request, { headers, body })
  if (!keyNeedsBody(key)) return NOTHING_READ
  return yield* readKeyBody(headers, body, key, head.key.kind === 'missing')
}

const NOTHING_READ: KeyBody = { json: null, isUnreadable: false, fields: new Map(), values: new Map() }

function identifyBy(
  ports: IdentifyPorts,
  request: ProtectedRequest,
  head: RequestHead,
  upload: Upload,
  read: KeyBody,
): Identification | Promise<Identification> {
  const { route, headers } = request
  const { caller } = head
  const sentKey = keyNeedsBody(route.key) ? readKey(request, route.key, read) : head.key
  if (sentKey.kind === 'invalid') return refuseKey(sentKey.detail)
  const derive = sentKey.kind === 'missing' ? route.key.derive : null
  const derivedFrom = derive === null ? null : derivedParts(request, read, derive)
  if (sentKey.kind === 'missing' && derivedFrom === null)
    return route.key.presence === 'required' ? refuseMissing(request) : { kind: 'no_key' }
  if (caller.kind === 'unidentified') return refuseCaller(caller)
  const firstSent = readFirstSent(headers)
  if (firstSent.kind === 'invalid') return refuseKey(firstSent.detail)

  const { parts } = caller
  const keyAt = (now: Millis): NamedKey =>
    sentKey.kind === 'key'
      ? { ...sentKey, derived: false }
      : {
          key: deriveKey(derivedFrom as readonly string[], parts, derive as DerivePolicy, now),
          qualifier: DERIVED,
          derived: true,
        }
  const timed =
    firstSent.kind === 'sent' || route.key.issuedOnly || (derive !== null && derive.bucket !== null)
  if (!timed) return identified(ports, request, parts, keyAt(0), upload, read, true, null)
  const firstSentAt = firstSent.kind === 'sent' ? firstSent.at : null
  return identifyByTime(ports, request, parts, keyAt, firstSentAt, upload, read)
}

/** For requests whose key or validity depends on the store's time. */
async function identifyByTime(
  ports: IdentifyPorts,
  request: ProtectedRequest,
  caller: Identified['caller'],
  keyAt: (now: Millis) => NamedKey,
  firstSentAt: Millis | null,
  upload: Upload,
  read: KeyBody,
): Promise<Identification> {
  const { route } = request
  const ownClock = (): Millis | null => (route.onStoreUnavailable === 'bypass' ? Date.now() : null)
  const now = (await ports.store.ping().catch(nullIfUnavailable)) ?? ownClock()
  if (now === null) {
    const detail = 'the time of the store is not available; nothing was executed for this request'
    return storeUnavailable(ports, request, null, detail)
  }
  const named = keyAt(now)
  if (firstSentAt !== null && now - firstSentAt > route.ttl) {
    const detail = `the request was first sent at ${new Date(firstSentAt).toISOString()}, longer ago than this route keeps responses (${route.ttl / 1000} s); nothing was executed now, and it is not known whether it was executed then`
    const answer = refuse('expired', 'idempotency_key_expired', detail, { status: 412 })
    return named.derived ? { ...answer, proxyHeaders: DERIVED_HEADER } : answer
  }
  const issued = route.key.issuedOnly ? await ports.checkIssued(named.key, now) : 'valid'
  if (issued === 'forged') return refuseKey('not a key issued by this proxy')
  const mayClaim = issued === 'valid'
  const bornAt = route.key.issuedOnly ? issuedAt(named.key) : null
  return identified(ports, request, caller, named, upload, read, mayClaim, bornAt ?? firstSentAt)
}

function identified(
  ports: IdentifyPorts,
  request: ProtectedRequest,
  caller: Identified['caller'],
  { key, qualifier, derived }: NamedKey,
  upload: Upload,
  read: KeyBody,
  mayClaim: boolean,
  toldBirth: Millis | null,
): Identified | Promise<Identified> {
  const { route, method, path, host, span, progress } = request
  const id = recordId(ports.namespace, route, caller, method, path, key, qualifier, host)
  progress.id = id
  const asked = new Digests(request, upload.sent, route.fingerprint, ports.namespace.secret, upload)
  const operation = (): Operation => {
    const { fingerprint, rawDigest, recipe, parts } = asked
    const { label } = progress
    const usual = {
      route: route.name,
      method,
      path,
      fingerprint,
      rawDigest,
      recipe,
      parts,
      label,
      key: null,
      span,
    }
    const sent = identifiersOf(ports, request, id, key, qualifier, read)
    const draft = sent === null ? usual : { ...usual, ...sent, lease: route.lease }
    return route.key.forwardFence ? { ...draft, completion: completionTerms(route) } : draft
  }
  // The data a key is derived from may be older than this request.
  const bornAt = derived ? 0 : toldBirth
  const found = { kind: 'identified', id, key, derived, caller, operation, asked, mayClaim, bornAt } as const
  return asked.takesSteps ? inSteps(asked.begin()).then(() => found) : found
}

/**
 * The identifiers sent to the upstream, by which it may be asked later; null: none. The key is stored only if the status query uses it
 * (contract §1). An event's id means nothing without its source.
 */
function identifiersOf(
  { upstream }: Pick<WalkPorts, 'upstream'>,
  request: ProtectedRequest,
  id: RecordId,
  key: string,
  [qualifiedBy]: KeyQualifier,
  read: KeyBody,
): Pick<Operation, 'key' | 'keySent' | 'received' | 'receivedBy'> | null {
  const { route } = request
  // The status query does not name the host, and another host's "not found" proves nothing.
  if (route.scope.host) return null
  const keepsKey = route.reconcile !== null && asksByKey(route.reconcile) && qualifiedBy !== 'ce-source'
  if (!keepsKey && !route.key.forwardFence) return null
  // Shadow mode forwards the request unchanged. The fence, which the claim assigns, is not an identifier.
  const lines = request.upstreamHeaders(route.mode === 'shadow' ? null : { id, key, fence: 0 })
  const from = route.key.from.filter(({ kind }) => kind !== 'header')
  const inBody = from.length > 0 && readKey(request, { ...route.key, from }, read).kind === 'key'
  return identifiersSent(lines, route.key, id, key, inBody, keepsKey, upstream)
}

function refuseKey(detail: string): Answer {
  return refuse('key_invalid', 'idempotency_key_invalid', detail)
}

function refuseMissing({ route, headers }: ProtectedRequest): Answer {
  const { from } = route.key
  const ofEvents = from.some((source) => source.kind === 'header' && source.name === 'ce-id')
  if (ofEvents && essence(headers) === 'application/cloudevents-batch+json') {
    const detail = 'a batch of events has no key; send its events one by one'
    return refuse('key_missing', 'idempotency_key_missing', detail)
  }
  const [first, ...others] = from
  const sources =
    first?.kind === 'header' && others.length === 0
      ? `the header ${first.name}`
      : `one of: ${from.map(sourceName).join(', ')}`
  const derivable = route.key.derive === null ? '' : ', or the fields that a key is derived from'
  return refuse('key_missing', 'idempotency_key_missing', `send ${sources}${derivable}`)
}

export function refuseCaller({ detail, cause, status }: UnidentifiedCaller): Answer {
  const again = status === 503 ? ({ retryAfter: 1, retry: 'same-key' } as const) : {}
  return refuse('caller_missing', 'idempotency_caller_missing', detail, { status, ...again }, { cause })
}

/** Issues keys (contract §4, `issuer`). Times follow the store's clock. */
export interface KeyIssuer {
  issue(now: Millis): Promise<IssuedKey>
}

export interface IssuedKey {
  readonly key: string
  readonly expiresAt: Millis
}

/** Issues a signed key that expires by the store's clock, so that all replicas agree when. */
export async function issueKey(
  { store }: Pick<WalkPorts, 'store'>,
  issuer: KeyIssuer,
): Promise<(IssuedKey & { readonly kind: 'issued' }) | Problem> {
  const now = await store.ping().catch(nullIfUnavailable)
  if (now !== null) return { kind: 'issued', ...(await issuer.issue(now)) }
  const detail = 'the time of the store is not available; no key was issued'
  const more = { retryAfter: 1 }
  return {
    kind: 'problem',
    refusal: refusal('idempotency_store_unavailable', detail, more),
    proxyHeaders: [],
  }
}
