import type { Asked } from '../core/decide.ts'
import { deriveKey } from '../core/derive.ts'
import { fingerprintOf, rawDigestOf, recipeOf } from '../core/fingerprint.ts'
import { linesOf } from '../core/headers.ts'
import { readCaller, recordId } from '../core/identity.ts'
import { type KeyReading, keyNeedsBody, readKey, sourceName } from '../core/key.ts'
import type { Millis, Operation, RecordId } from '../core/record.ts'
import { readFirstSent } from '../core/repeatability.ts'
import { StoreUnavailable } from '../store/register.ts'
import { refuse, storeUnavailable } from './answers.ts'
import type { Answer, Call, Trace } from './call.ts'
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
  readonly caller: readonly (string | null)[]
  readonly reading: Exclude<KeyReading, { kind: 'invalid' }>
}

type NamingPorts = Pick<Ports, 'records' | 'secret' | 'verifyToken' | 'checkIssued' | 'observer'>

/** Reads what stands in the head, before the body is asked for and before the store is. */
export async function introduce(ports: NamingPorts, call: Call, trace: Trace): Promise<Introduced | Answer> {
  const { route, headers } = call
  const reading = readKey(headers, route.key, null)
  if (reading.kind === 'invalid') return refuseKey(trace, reading.detail)
  if (reading.kind === 'missing' && route.key.presence === 'required' && !mayFollow(call))
    return refuseMissing(call, trace)
  const verified =
    route.scope.jwt === null
      ? ({ kind: 'absent' } as const)
      : await ports.verifyToken(route.scope.jwt, headers)
  switch (verified.kind) {
    case 'refused':
      return refuse(trace, 'caller_missing', 'idempotency_caller_missing', verified.detail)
    case 'unavailable':
      return refuse(
        trace,
        'caller_missing',
        'idempotency_caller_missing',
        `who calls cannot be verified now: ${verified.detail}; nothing was executed`,
        { status: 503, retryAfter: 1 },
      )
    case 'absent':
      // Another scheme's credential is one all the same: its callers must not share the keys of those without any.
      if (route.scope.jwt !== null && linesOf(headers, 'authorization').length > 0)
        return refuse(
          trace,
          'caller_missing',
          'idempotency_caller_missing',
          'Authorization carries no bearer token, which is what tells callers apart here',
        )
      return callerOf(call, trace, reading, null)
    case 'claims':
      return callerOf(call, trace, reading, verified.claims)
  }
}

function callerOf(
  { route, headers }: Call,
  trace: Trace,
  reading: Introduced['reading'],
  claims: Readonly<Record<string, unknown>> | null,
): Introduced | Answer {
  const caller = readCaller(headers, route.scope, claims)
  if (caller.kind === 'caller') return { kind: 'introduced', caller: caller.parts, reading }
  const { detail, status } = caller
  return refuse(trace, 'caller_missing', 'idempotency_caller_missing', detail, { status })
}

/** The key may still come: from the body, or made of what the request carries. */
function mayFollow({ route }: Call): boolean {
  return keyNeedsBody(route.key) || route.key.derive !== null
}

/** `unnamed`: no key, and none is required. */
export async function name(
  ports: NamingPorts,
  call: Call,
  trace: Trace,
  { caller, reading: head }: Introduced,
  body: Buffer,
): Promise<Named | Answer | { readonly kind: 'unnamed' }> {
  const { route, method, path, headers } = call
  const { derive } = route.key
  const reading = keyNeedsBody(route.key) ? readKey(headers, route.key, body) : head
  if (reading.kind === 'invalid') return refuseKey(trace, reading.detail)
  const sent = readFirstSent(headers)
  const timed = sent.kind === 'sent' || (route.key.issuedOnly && reading.kind === 'key')
  const now = timed || (derive !== null && derive.bucket !== null) ? await storeTime(ports, call) : 0
  if (now === null)
    return storeUnavailable(
      ports,
      trace,
      null,
      'the store does not tell the time; nothing was executed for this request',
    )

  const derived =
    reading.kind === 'missing' && derive !== null ? deriveKey(headers, body, caller, derive, now) : null
  const found = reading.kind === 'key' ? reading : derived === null ? null : { key: derived, qualifier: [] }
  if (found === null)
    return route.key.presence === 'required' ? refuseMissing(call, trace) : { kind: 'unnamed' }
  const { key, qualifier } = found
  if (sent.kind === 'invalid') return refuseKey(trace, sent.detail)
  if (sent.kind === 'sent' && now - sent.at > route.ttl)
    return refuse(
      trace,
      'expired',
      'idempotency_key_expired',
      `the request was first sent at ${new Date(sent.at).toISOString()}, longer ago than answers are kept (${route.ttl} ms); whether it was executed then is not known here`,
      { status: 412 },
    )
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
  }
  const id = recordId(route, caller, method, path, key, ports.secret, qualifier)
  trace.id = id
  return {
    kind: 'named',
    id,
    key,
    derived: derived !== null,
    caller,
    operation,
    asked: { ...operation, rawDigestUnder: (other) => rawDigestOf(content, other) },
    mayClaim: issued === 'valid',
  }
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
