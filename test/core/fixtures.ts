import fc from 'fast-check'
import type { RequestContent } from '../../src/core/fingerprint.ts'
import { type KeyBody, readKeyBody } from '../../src/core/key.ts'
import type {
  FingerprintPolicy,
  KeyPolicy,
  RouteMatch,
  RoutePolicy,
  ScopePolicy,
} from '../../src/core/policy.ts'
import type {
  Completed,
  CompletedResponse,
  Expired,
  FailedRetryable,
  Fingerprint,
  InProgress,
  Unknown,
} from '../../src/core/record.ts'
import { atOnce } from '../../src/core/steps.ts'

/** The body, read for the keys of the policy. */
export function keyBody(headers: readonly string[], body: Buffer | string, policy: KeyPolicy): KeyBody {
  return atOnce(readKeyBody(headers, Buffer.from(body as string), policy, policy.derive !== null))
}

/** The defaults of contract §10. */
export const KEY: KeyPolicy = {
  presence: 'optional',
  from: [{ kind: 'header', name: 'idempotency-key' }],
  syntax: 'lenient',
  minLength: 1,
  maxLength: 255,
  pattern: null,
  forward: 'same',
  forwardFence: false,
  derive: null,
  issuedOnly: false,
}

export const SCOPE: ScopePolicy = {
  caller: [{ kind: 'header', name: 'authorization' }],
  callerIsDefault: true,
  path: 'exact',
  host: false,
  anonymous: 'share',
  jwt: null,
}

export const FINGERPRINT: FingerprintPolicy = {
  body: 'auto',
  ignore: [],
  only: [],
  headers: [],
  query: 'include',
}

const HOUR = 3_600_000

export function matching(methods: readonly string[], path: string, exact = false): RouteMatch {
  return { methods, path, exact, case: 'sensitive', parameters: 'keep' }
}

export const ROUTE: RoutePolicy = {
  name: 'create-payment',
  match: matching(['POST', 'PATCH'], '/v1/payments'),
  mode: 'enforce',
  profile: 'standard',
  key: KEY,
  scope: SCOPE,
  fingerprint: FINGERPRINT,
  inFlight: { mode: 'reject', wait: 10_000, status: 409 },
  misuseStatus: 422,
  lease: 30_000,
  ttl: 24 * HOUR,
  ttlFailed: 24 * HOUR,
  ttlBody: null,
  tombstone: 0,
  unresolvedTtl: 720 * HOUR,
  respondWithin: null,
  outcomes: [],
  onLeaseExpired: 'unknown',
  onResponseLost: 'unknown',
  onStoreUnavailable: 'reject',
  keep: 'response',
  stream: 'auto',
  excludeHeaders: new Set(),
  statusHeader: false,
  authorizeReplay: null,
  reconcile: null,
  limits: { request: 1_048_576, response: 5_242_880, newKeys: null },
  record: { label: null },
}

export function routeOf(path: string, more: Partial<RoutePolicy> & { exact?: boolean } = {}): RoutePolicy {
  const { exact = false, ...policy } = more
  return { ...ROUTE, name: path, match: matching(['POST', 'PATCH'], path, exact), ...policy }
}

/** A POST of JSON; `body` as text is UTF-8. */
export function request(
  body: string | Buffer,
  more: Partial<Omit<RequestContent, 'body'>> = {},
): RequestContent {
  return {
    method: 'POST',
    path: '/v1/payments',
    query: '',
    target: '/v1/payments',
    headers: ['Content-Type', 'application/json'],
    body: Buffer.from(body as string),
    ...more,
  }
}

export const bytes = (fill: number, length = 32): Buffer => Buffer.alloc(length, fill)
export const FIRST = bytes(1) as Fingerprint
export const OTHER = bytes(2) as Fingerprint

export const RESULT: CompletedResponse = {
  kept: true,
  response: {
    status: 201,
    reason: 'Created',
    headers: ['ETag', '"1"'],
    body: Buffer.from('ok'),
    trailers: [],
  },
}

/** A record of the route above: created at 1000, its lease, look or retention due at 5000, dropped at 9000. */
export const COMMON = {
  route: 'create-payment',
  method: 'POST',
  path: '/v1/payments',
  fingerprint: FIRST,
  rawDigest: bytes(3),
  recipe: 'recipe',
  key: null,
  fence: 7,
  token: bytes(4, 16),
  attempts: 1,
  version: 3,
  createdAt: 1000,
  updatedAt: 2000,
  dropAt: 9000,
  lastError: null,
}
export const DUE = 5000

export const inProgress = (more: Partial<InProgress> = {}): InProgress => ({
  ...COMMON,
  state: 'in_progress',
  leaseUntil: DUE,
  ...more,
})
export const completed = (more: Partial<Completed> = {}): Completed => ({
  ...COMMON,
  state: 'completed',
  expiresAt: DUE,
  result: RESULT,
  ...more,
})
export const failedRetryable = (more: Partial<FailedRetryable> = {}): FailedRetryable => ({
  ...COMMON,
  state: 'failed_retryable',
  ...more,
})
export const unknown = (more: Partial<Unknown> = {}): Unknown => ({
  ...COMMON,
  state: 'unknown',
  nextLookAt: DUE,
  leaseExpired: false,
  status: null,
  reconciliation: null,
  ...more,
})
export const expired = (more: Partial<Expired> = {}): Expired => ({ ...COMMON, state: 'expired', ...more })

/** Whether JSON.parse takes it. */
export function isJson(text: string): boolean {
  try {
    JSON.parse(text)
    return true
  } catch {
    return false
  }
}

/** The words of a text as written: `\n` in it is a backslash and an n. */
export function words({ raw }: TemplateStringsArray): string[] {
  return (raw[0] as string).split(/\s+/).filter((word) => word !== '')
}

/** Its lines, without the white space around each. */
export function lines({ raw }: TemplateStringsArray): string[] {
  return (raw[0] as string).trim().split(/\s*\n\s*/)
}

/** Any character. fast-check's own unit `binary` first takes a second to list them all. */
export const character = fc
  .oneof(
    fc.integer({ min: 0, max: 0x7f }),
    fc.integer({ min: 0, max: 0xd7ff }),
    fc.integer({ min: 0xe000, max: 0x10ffff }),
  )
  .map((code) => String.fromCodePoint(code))
