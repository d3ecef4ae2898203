import type { RawHeaders } from './headers.ts'
import type { KeyPattern } from './key-pattern.ts'
import type { Millis } from './record.ts'
import type { RpcCode } from './rpc/codes.ts'

export type Action = 'store' | 'release' | 'unknown'
export type Profile = 'standard' | 'strict' | 'lenient' | 'stripe'

/** One attribute that identifies the caller (contract §5). */
export type CallerSource =
  | { readonly kind: 'header'; readonly name: string }
  | { readonly kind: 'cookie'; readonly name: string }
  /** A claim of the verified bearer token. */
  | { readonly kind: 'jwt'; readonly name: string }
  /** An attribute of the client's certificate. */
  | { readonly kind: 'tls'; readonly name: CertificateAttribute }

/** URIs and names of a certificate, its subject (RFC 4514), or its SHA-256. */
export type CertificateAttribute = 'san-uri' | 'san-dns' | 'subject' | 'fingerprint'

/** Where a key may come from: a header (lower case), a query parameter, a form field, or a JSON pointer (RFC 6901). */
export type KeySource =
  | { readonly kind: 'header'; readonly name: string }
  | { readonly kind: 'query'; readonly name: string }
  | { readonly kind: 'form'; readonly name: string }
  | { readonly kind: 'json'; readonly pointer: string }

/**
 * The human-readable label of a request: the value at a JSON pointer (RFC 6901) into its body, a header (lower case), or a `:name` of its
 * path.
 */
export type LabelSource =
  | { readonly kind: 'json'; readonly pointer: string }
  | { readonly kind: 'header'; readonly name: string }
  | { readonly kind: 'path'; readonly name: string }

/** Derives a key if the client sent none (contract §4). At least one list is not empty; `json` and `form` exclude each other. */
export interface DerivePolicy {
  /** JSON pointers. */
  readonly json: readonly string[]
  /** Names of form fields. */
  readonly form: readonly string[]
  /** Lower-case header names. */
  readonly headers: readonly string[]
  /** Whether method and path are part of it. */
  readonly path: boolean
  /** The store's time divided by this, rounded down, is part of the key; null: time is not. */
  readonly bucket: Millis | null
}

/** How bearer tokens are verified (contract §5). Exactly one of `jwks` and `keyFile` is set. */
export interface JwtPolicy {
  /** URL of a JWK Set. */
  readonly jwks: string | null
  /** Text of the key file: PEM, a JWK or a JWK Set. */
  readonly keyFile: string | null
  readonly issuer: string | null
  /** One of these must be among the token's. Empty: not checked. */
  readonly audience: readonly string[]
}

/** A rate, such as `100/m`. */
export interface Rate {
  readonly count: number
  readonly per: Millis
}

export interface KeyPolicy {
  readonly presence: 'required' | 'optional' | 'ignored'
  /** Each may carry the key. */
  readonly from: readonly KeySource[]
  readonly syntax: 'lenient' | 'strict'
  readonly minLength: number
  readonly maxLength: number
  readonly pattern: KeyPattern | null
  /** The header line sent upstream: as received, none, or under another name. */
  readonly forward: 'same' | 'none' | { readonly header: string }
  readonly forwardFence: boolean
  readonly derive: DerivePolicy | null
  /** Only keys of this proxy's `issuer`. */
  readonly issuedOnly: boolean
}

export interface ScopePolicy {
  /** Empty: `none`. */
  readonly caller: readonly CallerSource[]
  /** True where the configuration did not set `scope.caller`. */
  readonly callerIsDefault: boolean
  readonly path: 'exact' | 'route' | 'none'
  /** Whether the requested host is part of the scope. */
  readonly host: boolean
  readonly anonymous: 'share' | 'reject'
  /** Set where `caller` has a `jwt` source. */
  readonly jwt: JwtPolicy | null
}

export interface FingerprintPolicy {
  readonly body: 'auto' | 'json' | 'form' | 'multipart' | 'raw' | 'none'
  /** JSON pointers (RFC 6901). At most one of `ignore` and `only` is not empty. */
  readonly ignore: readonly string[]
  readonly only: readonly string[]
  /** Lower-case header names that count in addition to {@link SELECTING}; null: neither counts. */
  readonly headers: readonly string[] | null
  readonly query: 'include' | 'ignore' | 'sorted'
}

/** The answer to a duplicate while the first request is in flight (contract §6). */
export interface InFlightPolicy {
  readonly mode: 'reject' | 'wait'
  /** How long `wait` holds a duplicate. */
  readonly wait: Millis
  readonly status: 409 | 423 | 425 | 429 | 202 | 503
}

/** Asks the upstream before a replay whether the caller may still see it (contract §6). */
export interface AuthorizeReplayPolicy {
  readonly path: string
  /** How long a 2xx is remembered per caller; 0: not at all. */
  readonly cache: Millis
}

/** The value at a JSON pointer (RFC 6901): the value of a string, the text of anything else. */
export interface Expected {
  readonly pointer: string
  readonly value: string
}

/** Answers with one meaning: of that status, and matching all of `when`. */
export interface AnswerPattern {
  readonly status: number
  readonly when: readonly Expected[]
}

export interface CompletedPattern extends AnswerPattern {
  /** JSON pointer to the part of the answer that is kept; empty: all of it. */
  readonly json: string
  readonly response: {
    /** null: that of the answer. */
    readonly status: number | null
    /** Flat name–value list. */
    readonly headers: RawHeaders
  }
}

/** The status query about an unknown record, and the meaning of its answers (contract §10). */
export interface ReconcilePolicy {
  /** `{key}` and `{record}` may be in the path (percent-encoded) and in header values, `{:name}` in the path. */
  readonly request: { readonly method: string; readonly path: string; readonly headers: RawHeaders }
  /** Shows that the answer is about this record; values may have `{key}`, `{record}` and `{:name}`. Empty: `none`. */
  readonly identity: readonly Expected[]
  /** The first that matches applies. */
  readonly completed: readonly CompletedPattern[]
  readonly notFound: AnswerPattern | null
  /** Checked before all others. */
  readonly pending: AnswerPattern | null
  /** Milliseconds from the claim; until then "not found" is pending. */
  readonly after: number
  /** Milliseconds until the first status query; the pauses double. */
  readonly every: number
  /** Status queries before the record is dead-lettered. */
  readonly attempts: number
}

/** The meaning of answers with that status, or of those that match all of `when`. */
export interface OutcomeRule {
  /** A status, the first digit of a class, or the code of a call. */
  readonly status: number | RpcCode
  readonly when: readonly Expected[]
  readonly outcome: Action
}

export interface RouteMatch {
  readonly methods: readonly string[]
  readonly path: string
  /** `package.Service/Method`, or `package.Service/*`: the path as a gRPC route names it. Absent or null: not a gRPC route. */
  readonly grpc?: string | null
  readonly exact: boolean
  /** Whether letter case counts. */
  readonly case: 'sensitive' | 'insensitive'
  /** Whether `;v=1` after a segment counts. */
  readonly parameters: 'keep' | 'strip'
}

export interface RouteLimits {
  /** Bytes. */
  readonly request: number
  /** Bytes. */
  readonly response: number
  /** New keys per caller. */
  readonly newKeys: Rate | null
}

/** The retention settings of a route (contract §10). */
export interface Retention {
  readonly lease: Millis
  readonly ttl: Millis
  readonly ttlFailed: Millis
  /** How long the response is kept; null: as long as the record answers. */
  readonly ttlBody: Millis | null
  readonly tombstone: Millis
  readonly unresolvedTtl: Millis
  /** When the first status query is sent, if the route has any. */
  readonly reconcile: { readonly every: Millis } | null
}

/** A route's settings, with profile and defaults applied. */
export interface RoutePolicy extends Retention {
  /** Metric label; `default` for requests that match no route. */
  readonly name: string
  readonly match: RouteMatch
  readonly mode: 'enforce' | 'shadow' | 'off'
  readonly profile: Profile
  readonly key: KeyPolicy
  readonly scope: ScopePolicy
  readonly fingerprint: FingerprintPolicy
  readonly inFlight: InFlightPolicy
  readonly misuseStatus: 400 | 409 | 422
  readonly respondWithin: Millis | null
  /** The first match applies, before the profile's. None is hidden by an earlier one. */
  readonly outcomes: readonly OutcomeRule[]
  readonly onLeaseExpired: 'unknown' | 'retry'
  readonly onResponseLost: 'unknown' | 'retry'
  readonly onStoreUnavailable: 'reject' | 'bypass'
  /** `stream`: also complete streams. */
  readonly keep: 'response' | 'outcome' | 'stream'
  /** Whether answers are passed on while they are made. */
  readonly stream: 'auto' | 'always' | 'never'
  /** Lower-case header names left out of a replay. */
  readonly excludeHeaders: ReadonlySet<string>
  readonly statusHeader: boolean
  readonly authorizeReplay: AuthorizeReplayPolicy | null
  /** How unknown records are resolved; null: by a person. */
  readonly reconcile: ReconcilePolicy | null
  readonly limits: RouteLimits
  /** What records hold for operators. */
  readonly record: { readonly label: LabelSource | null }
}
