import { essence } from '../core/body/content.ts'
import type { RequestDigests } from '../core/decide.ts'
import { fingerprintOf, rawDigestOf, recipeOf } from '../core/fingerprint.ts'
import { linesOf, RESPONSE_HEADER } from '../core/headers.ts'
import { type KeyQualifier, readCaller, recordId } from '../core/identity.ts'
import { deriveKey, type KeyReading, keyNeedsBody, readFirstSent, readKey, sourceName } from '../core/key.ts'
import type { DerivePolicy, JwtPolicy } from '../core/policy.ts'
import { asksByKey } from '../core/reconcile/answer.ts'
import { identifiersSent } from '../core/reconcile/identifiers.ts'
import type { Millis, Operation, RecordId } from '../core/record.ts'
import { refusal } from '../core/refusal.ts'
import { nullIfUnavailable } from '../store/records.ts'
import { refuse, storeUnavailable } from './answers.ts'
import type { Ports } from './ports.ts'
import type { Answer, Problem, ProtectedRequest } from './request.ts'

/** Who calls, or why nobody can say (contract §5). */
export type Caller =
  | { readonly kind: 'caller'; readonly parts: readonly (string | null)[] }
  | UnidentifiedCaller

interface UnidentifiedCaller {
  readonly kind: 'unidentified'
  readonly detail: string
  /** For the log; null: the detail says it all. */
  readonly cause: string | null
  /** 503: it may be known in a moment. */
  readonly status: 400 | 401 | 503
}

/** The caller, and the key as far as the request's head has it. */
export interface RequestHead {
  readonly kind: 'head'
  readonly caller: Caller
  readonly key: Exclude<KeyReading, { kind: 'invalid' }>
}

/** The record that a request is about, and what it asks for: all that a claim needs. */
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

type IdentifyPorts = Pick<
  Ports,
  'store' | 'namespace' | 'upstream' | 'verifyToken' | 'checkIssued' | 'observer'
>

/** Reads the head, before the body and the store are asked for anything. */
export function readHead(
  ports: Pick<Ports, 'verifyToken'>,
  request: ProtectedRequest,
): RequestHead | Answer | Promise<RequestHead | Answer> {
  const { route, headers } = request
  const { presence, derive } = route.key
  const key = readKey(request, route.key, null)
  if (key.kind === 'invalid') return refuseKey(key.detail)
  const mayFollow = keyNeedsBody(route.key) || derive !== null
  if (key.kind === 'missing' && presence === 'required' && !mayFollow) return refuseMissing(request)
  // Without a key nobody needs to know who calls, and where none is required the request may go on without one.
  const needed = key.kind === 'key' || presence === 'required'
  const headOf = (caller: Caller): RequestHead | Answer =>
    caller.kind === 'unidentified' && needed ? refuseCaller(caller) : { kind: 'head', caller, key }
  const { scope } = route
  return scope.jwt === null
    ? headOf(asCaller(readCaller(headers, scope, null)))
    : verifyCaller(ports, request, scope.jwt).then(headOf)
}

async function verifyCaller(
  { verifyToken }: Pick<Ports, 'verifyToken'>,
  { route: { scope }, headers }: ProtectedRequest,
  policy: JwtPolicy,
): Promise<Caller> {
  const verified = await verifyToken(policy, headers)
  switch (verified.kind) {
    case 'claims':
      return asCaller(readCaller(headers, scope, verified.claims))
    case 'refused':
      return { kind: 'unidentified', detail: verified.detail, cause: null, status: 401 }
    case 'unavailable': {
      const detail = `who calls cannot be verified now: ${verified.detail}; nothing was executed`
      return { kind: 'unidentified', detail, cause: null, status: 503 }
    }
    case 'absent': {
      // Another scheme's credential is one all the same: its callers must not share the keys of those without any.
      const other = linesOf(headers, 'authorization').some((line) => line.trim() !== '')
      const detail = 'Authorization carries no bearer token, which is what tells callers apart here'
      return other
        ? { kind: 'unidentified', detail, cause: null, status: 401 }
        : asCaller(readCaller(headers, scope, null))
    }
  }
}

function asCaller(reading: ReturnType<typeof readCaller>): Caller {
  return reading.kind === 'caller' ? reading : { ...reading, kind: 'unidentified' }
}

/** One name for all parts of a caller; null: nobody knows who calls, or everybody is the same caller. */
export function callerName(caller: Caller): string | null {
  if (caller.kind === 'unidentified' || caller.parts.every((part) => part === null)) return null
  return caller.parts.join('\0')
}

/** Header lines that say that the proxy made the key (contract §4). */
export const DERIVED_HEADER: readonly string[] = [RESPONSE_HEADER.derived, 'true']

/** In no key that a client sends: a derived one can be computed by anybody. */
const DERIVED = ['derived']

/** `no_key`: no key, and none is required. */
export type Identification = Identified | Answer | { readonly kind: 'no_key' }

/** A key as the record knows it. */
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
  const { route, headers } = request
  const { caller } = head
  const sentKey = keyNeedsBody(route.key) ? readKey(request, route.key, body) : head.key
  if (sentKey.kind === 'invalid') return refuseKey(sentKey.detail)
  const derive = sentKey.kind === 'missing' ? route.key.derive : null
  if (sentKey.kind === 'missing' && (derive === null || deriveKey(headers, body, [], derive, 0) === null))
    return route.key.presence === 'required' ? refuseMissing(request) : { kind: 'no_key' }
  if (caller.kind === 'unidentified') return refuseCaller(caller)
  const firstSent = readFirstSent(headers)
  if (firstSent.kind === 'invalid') return refuseKey(firstSent.detail)

  const { parts } = caller
  const keyAt = (now: Millis): NamedKey =>
    sentKey.kind === 'key'
      ? { ...sentKey, derived: false }
      : {
          key: deriveKey(headers, body, parts, derive as DerivePolicy, now) as string,
          qualifier: DERIVED,
          derived: true,
        }
  const timed =
    firstSent.kind === 'sent' || route.key.issuedOnly || (derive !== null && derive.bucket !== null)
  if (!timed) return identified(ports, request, parts, keyAt(0), body, true)
  return identifyByTime(ports, request, parts, keyAt, firstSent.kind === 'sent' ? firstSent.at : null, body)
}

/** What identifies the request, or whether it is refused, depends on the store's time. */
async function identifyByTime(
  ports: IdentifyPorts,
  request: ProtectedRequest,
  caller: Identified['caller'],
  keyAt: (now: Millis) => NamedKey,
  firstSentAt: Millis | null,
  body: Buffer,
): Promise<Identification> {
  const { route } = request
  const ownClock = (): Millis | null => (route.onStoreUnavailable === 'bypass' ? Date.now() : null)
  const now = (await ports.store.ping().catch(nullIfUnavailable)) ?? ownClock()
  if (now === null) {
    const detail = 'the store does not tell the time; nothing was executed for this request'
    return storeUnavailable(ports, request, null, detail)
  }
  const named = keyAt(now)
  if (firstSentAt !== null && now - firstSentAt > route.ttl) {
    const detail = `the request was first sent at ${new Date(firstSentAt).toISOString()}, longer ago than this route keeps answers (${route.ttl / 1000} s); nothing was executed now, and whether it was executed then is not known here`
    const answer = refuse('expired', 'idempotency_key_expired', detail, { status: 412 })
    return named.derived ? { ...answer, proxyHeaders: DERIVED_HEADER } : answer
  }
  const issued = route.key.issuedOnly ? await ports.checkIssued(named.key, now) : 'valid'
  if (issued === 'forged') return refuseKey('not a key that the issuer of this proxy made')
  return identified(ports, request, caller, named, body, issued === 'valid')
}

function identified(
  ports: IdentifyPorts,
  request: ProtectedRequest,
  caller: Identified['caller'],
  { key, qualifier, derived }: NamedKey,
  body: Buffer,
  mayClaim: boolean,
): Identified {
  const { route, method, path, host, span, progress } = request
  const content = { ...request, body }
  const recipe = recipeOf(route.fingerprint)
  const id = recordId(ports.namespace, route, caller, method, path, key, qualifier, host)
  progress.id = id
  const operation: Operation = {
    route: route.name,
    method,
    path,
    fingerprint: fingerprintOf(content, route.fingerprint),
    rawDigest: rawDigestOf(content, recipe),
    recipe,
    ...identifiersOf(ports, request, id, key, qualifier, body),
    span,
  }
  const asked = { ...operation, rawDigestUnder: (other: string) => rawDigestOf(content, other) }
  return { kind: 'identified', id, key, derived, caller, operation, asked, mayClaim }
}

/**
 * The identifiers that the upstream is sent, by which it may be asked later. The key is stored only if the question uses it
 * (contract §1). The id of an event names nothing without its source.
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
  const sources = from.map(sourceName).join(', ')
  const derivable = route.key.derive === null ? '' : ', or what a key can be derived from'
  return refuse('key_missing', 'idempotency_key_missing', `send one of: ${sources}${derivable}`)
}

export function refuseCaller({ detail, cause, status }: UnidentifiedCaller): Answer {
  const again = status === 503 ? ({ retryAfter: 1, retry: 'same-key' } as const) : {}
  return refuse('caller_missing', 'idempotency_caller_missing', detail, { status, ...again }, { cause })
}

/** Makes keys (contract §4, `issuer`). Times are of the store's clock. */
export interface KeyIssuer {
  issue(now: Millis): Promise<IssuedKey>
}

export interface IssuedKey {
  readonly key: string
  readonly expiresAt: Millis
}

/** A signed key that expires, by the store's clock, so that all replicas agree on when. */
export async function issueKey(
  { store }: Pick<Ports, 'store'>,
  issuer: KeyIssuer,
): Promise<(IssuedKey & { readonly kind: 'issued' }) | Problem> {
  const now = await store.ping().catch(nullIfUnavailable)
  if (now !== null) return { kind: 'issued', ...(await issuer.issue(now)) }
  const detail = 'the store does not tell the time; no key was issued'
  const more = { retryAfter: 1 }
  return {
    kind: 'problem',
    refusal: refusal('idempotency_store_unavailable', detail, more),
    proxyHeaders: [],
  }
}
