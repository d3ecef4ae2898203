import type { Asked } from '../core/decide.ts'
import { deriveKey } from '../core/derive.ts'
import { fingerprintOf, rawDigestOf, recipeOf } from '../core/fingerprint.ts'
import { recordId } from '../core/identity.ts'
import { type KeyReading, keyNeedsBody, otherSpelling, readKey, sourceName } from '../core/key.ts'
import type { DerivePolicy } from '../core/policy.ts'
import { asksByKey } from '../core/reconcile.ts'
import type { Millis, Operation, RecordId } from '../core/record.ts'
import { readFirstSent } from '../core/repeatability.ts'
import { StoreUnavailable } from '../store/register.ts'
import { refuse, storeUnavailable } from './answers.ts'
import type { Answer, Call, Trace } from './call.ts'
import { type Caller, refuseStranger, whoCalls } from './caller.ts'
import type { Ports } from './ports.ts'

/** What a request is called and what it asks for: everything that a claim needs. */
export interface Named {
  readonly kind: 'named'
  readonly id: RecordId
  readonly key: string
  /** The proxy made the key (`key.derive`). */
  readonly derived: boolean
  readonly caller: readonly (string | null)[]
  readonly operation: Operation
  readonly asked: Asked
  /** False: an issued key that has expired. It finds its record and makes none. */
  readonly mayClaim: boolean
}

/** Who calls, and the key as far as the head of the request says it. */
export interface Introduced {
  readonly kind: 'introduced'
  readonly caller: Caller
  readonly reading: Exclude<KeyReading, { kind: 'invalid' }>
}

type NamingPorts = Pick<Ports, 'records' | 'secret' | 'verifyToken' | 'checkIssued' | 'observer'>

/** Reads what stands in the head, before the body is asked for and before the store is. */
export async function introduce(ports: NamingPorts, call: Call, trace: Trace): Promise<Introduced | Answer> {
  const { route, headers } = call
  const { presence } = route.key
  const reading = readKey(headers, route.key, null)
  if (reading.kind === 'invalid') return refuseKey(trace, reading.detail)
  const mayFollow = keyNeedsBody(route.key) || route.key.derive !== null
  if (reading.kind === 'missing' && presence === 'required' && !mayFollow) return refuseMissing(call, trace)
  const caller = await whoCalls(ports, call)
  // Without a key nobody needs to know, and where none is required the request may go on without one.
  const needed = reading.kind === 'key' || presence === 'required'
  return caller.kind === 'stranger' && needed
    ? refuseStranger(trace, caller)
    : { kind: 'introduced', caller, reading }
}

/** Says of an answer that the proxy made the key (contract §4). */
export const DERIVED_MARK: readonly string[] = ['Idempotency-Key-Derived', 'true']

/** In no key that a client sends: a derived one can be computed by anybody. */
const DERIVED = ['derived']

/** `unnamed`: no key, and none is required. */
export async function name(
  ports: NamingPorts,
  call: Call,
  trace: Trace,
  { caller, reading: head }: Introduced,
  body: Buffer,
): Promise<Named | Answer | { readonly kind: 'unnamed' }> {
  const { route, method, path, headers } = call
  const reading = keyNeedsBody(route.key) ? readKey(headers, route.key, body) : head
  if (reading.kind === 'invalid') return refuseKey(trace, reading.detail)
  const derive = reading.kind === 'missing' ? route.key.derive : null
  if (reading.kind === 'missing' && (derive === null || deriveKey(headers, body, [], derive, 0) === null))
    return route.key.presence === 'required' ? refuseMissing(call, trace) : { kind: 'unnamed' }
  if (caller.kind === 'stranger') return refuseStranger(trace, caller)
  const sent = readFirstSent(headers)
  if (sent.kind === 'invalid') return refuseKey(trace, sent.detail)

  const timed = sent.kind === 'sent' || route.key.issuedOnly || (derive !== null && derive.bucket !== null)
  const now = timed ? await storeTime(ports, call) : 0
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
    return derive === null ? answer : { ...answer, marks: DERIVED_MARK }
  }
  const issued = route.key.issuedOnly ? await ports.checkIssued(key, now) : 'valid'
  if (issued === 'forged') return refuseKey(trace, 'not a key that the issuer of this proxy made')

  const content = { ...call, body }
  const recipe = recipeOf(route.fingerprint)
  const operation: Operation = {
    route: route.name,
    method,
    path,
    fingerprint: fingerprintOf(content, route.fingerprint),
    rawDigest: rawDigestOf(content, recipe),
    recipe,
    ...keptKey(call, key),
    span: call.span,
  }
  const id = recordId(route, parts, method, path, key, ports.secret, qualifier)
  trace.id = id
  return {
    kind: 'named',
    id,
    key,
    derived: derive !== null,
    caller: parts,
    operation,
    asked: { ...operation, rawDigestUnder: (other) => rawDigestOf(content, other) },
    mayClaim: issued === 'valid',
  }
}

/** The key is kept only where the upstream is asked by it, and as it got it (contract §1). */
function keptKey({ route, headers }: Call, key: string): Pick<Operation, 'key' | 'keySent'> {
  if (route.reconcile === null || !asksByKey(route.reconcile)) return { key: null }
  const keySent = otherSpelling(headers, route.key, key)
  return keySent === null ? { key } : { key, keySent }
}

/** Null: the store cannot be asked, and the route does not go on without it. */
async function storeTime(ports: NamingPorts, { route }: Call): Promise<Millis | null> {
  try {
    return await ports.records.ping()
  } catch (error) {
    if (!(error instanceof StoreUnavailable)) throw error
    return route.onStoreUnavailable === 'bypass' ? Date.now() : null
  }
}

function refuseKey(trace: Trace, detail: string): Answer {
  return refuse(trace, 'key_invalid', 'idempotency_key_invalid', detail)
}

function refuseMissing({ route }: Call, trace: Trace): Answer {
  const sources = route.key.from.map(sourceName).join(', ')
  const derivable = route.key.derive === null ? '' : ', or what a key can be derived from'
  return refuse(trace, 'key_missing', 'idempotency_key_missing', `send one of: ${sources}${derivable}`)
}
