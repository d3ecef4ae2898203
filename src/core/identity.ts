import { hash } from 'node:crypto'
import { filterLines, foldedName, linesOf, type RawHeaders } from './headers.ts'
import type { CallerSource, CertificateAttribute, RoutePolicy, ScopePolicy } from './policy.ts'
import type { RecordId } from './record.ts'

export type CallerReading =
  | { readonly kind: 'caller'; readonly parts: readonly (string | null)[] }
  | {
      readonly kind: 'missing'
      readonly status: 400 | 401
      /** For the client. */
      readonly detail: string
      /** For operators: which setting to change; null: none. */
      readonly cause: string | null
    }

/** Credentials that distinguish callers but that the default scope ignores (contract §5), and the setting that would use them. */
const OTHER_CREDENTIALS = [
  { name: 'cookie', source: 'cookie:<name>' },
  { name: 'x-api-key', source: 'header:x-api-key' },
  { name: 'api-key', source: 'header:api-key' },
]

/** RFC 9110 §11.4. Those of {@link SIGNED_ANEW} are short. */
const SCHEME = /^\s*([!-+.-~-]{1,64})(?:\s|$)/

/**
 * Schemes of `Authorization` whose value differs in each request, so that a retry would be another caller (contract §15): those with a hash
 * in their name, such as SigV4 and its imitations. The identity in such a line is not used: the proxy cannot verify it.
 */
const SIGNED_ANEW =
  /^(?:aws\d?(?:-.*)?|digest|goog1|hawk|hoba|mac|negotiate|ntlm|oss|privatetoken|qbox|qiniu|sharedkey(?:lite)?|signature|upyun)$|hmac|-sha-?\d/i

/** OAuth 1.0 has parameters; `OAuth` before a bare token is a bearer token by an older name. */
const OAUTH_1 = /^\s*oauth\s+[\w.~-]+\s*=\s*[^=\s]/i

/** The scheme that signs the caller's `Authorization` anew for each request; null: none does. */
function schemeSignedAnew(headers: RawHeaders, { caller }: ScopePolicy): string | null {
  if (!caller.some(({ kind, name }) => kind === 'header' && name === 'authorization')) return null
  for (const line of linesOf(headers, 'authorization')) {
    const scheme = SCHEME.exec(line)?.[1]
    if (scheme !== undefined && (SIGNED_ANEW.test(scheme) || OAUTH_1.test(line))) return scheme
  }
  return null
}

/** Claims of a verified token; null: the request carries no token. */
export type Claims = Readonly<Record<string, unknown>>

/** Attributes of a client's verified certificate; null: it has none of that kind. Several names are joined by commas. */
export type ClientCertificate = Readonly<Record<CertificateAttribute, string | null>>

/** `certificate`: null if the client has none. */
export interface FromCaller {
  readonly headers: RawHeaders
  readonly certificate: ClientCertificate | null
}

/** The caller, as the scope defines it. `null` parts are absent attributes. */
export function readCaller(from: FromCaller, scope: ScopePolicy, claims: Claims | null): CallerReading {
  const { headers } = from
  // A token that lacks the claim is not anonymous: its caller must not share keys with others.
  const unusable =
    claims && scope.caller.find(({ kind, name }) => kind === 'jwt' && claim(claims, name) === null)
  if (unusable) {
    const detail = `the claim ${unusable.name} of the token is absent, empty, or neither a string, a safe integer nor a boolean`
    return { kind: 'missing', status: 401, detail, cause: null }
  }
  const scheme = schemeSignedAnew(headers, scope)
  if (scheme !== null) {
    const detail = `Authorization of the scheme ${scheme} differs in each request, so a retry would be another caller; nothing was executed. The operator has to set scope.caller to what stays the same in a retry`
    const cause = `Authorization of the scheme ${scheme} differs in each request: set scope.caller to a header, cookie or claim that stays the same in a retry, or to none if all callers are one`
    return { kind: 'missing', status: 400, detail, cause }
  }
  const parts = scope.caller.map((source) => attribute(from, claims, source))
  if (!parts.includes(null)) return { kind: 'caller', parts }
  if (scope.callerIsDefault) {
    const other = otherCredential(headers)
    if (other !== undefined) {
      const detail = `the proxy does not identify clients by ${other.name}; nothing was executed`
      const cause = `no Authorization but ${other.name}, and scope.caller is not set: set it to what identifies callers, such as ${other.source}, or to none if all callers are one`
      return { kind: 'missing', status: 400, detail, cause }
    }
  }
  if (scope.anonymous === 'share') return { kind: 'caller', parts }
  const absent = scope.caller
    .filter((_, i) => parts[i] === null)
    .map((source) => `${source.kind} ${source.name}`)
  const detail = `the request does not identify its caller: ${absent.join(', ')} is missing`
  // Logged once per route: it may affect all its clients.
  return { kind: 'missing', status: 401, detail, cause: detail }
}

/** Compared as an application behind CGI reads it: `api_key`, a name from older APIs, identifies callers like `Api-Key`. */
function otherCredential(headers: RawHeaders): (typeof OTHER_CREDENTIALS)[number] | undefined {
  return OTHER_CREDENTIALS.find(({ name }) => {
    const lines = filterLines(headers, (sent) => foldedName(sent) === name)
    return lines.some((value, i) => i % 2 === 1 && value.trim() !== '')
  })
}

function attribute(from: FromCaller, claims: Claims | null, { kind, name }: CallerSource): string | null {
  if (kind === 'jwt') return claims === null ? null : claim(claims, name)
  if (kind === 'tls') return from.certificate?.[name] ?? null
  const { headers } = from
  const values = kind === 'header' ? linesOf(headers, name) : cookies(headers, name)
  if (!values.some((value) => value.trim() !== '')) return null
  return values.join(kind === 'header' ? ', ' : '; ')
}

/** As JSON: "1" is not 1, and lone surrogates, which would hash alike, are escaped. Null: it identifies nobody. */
function claim(claims: Claims, name: string): string | null {
  const value = claims[name]
  const counts =
    typeof value === 'string'
      ? value.trim() !== ''
      : typeof value === 'boolean' || Number.isSafeInteger(value)
  return counts ? JSON.stringify(value) : null
}

/** All cookies with that name: which one an upstream uses is unknown. */
function cookies(headers: RawHeaders, name: string): string[] {
  return linesOf(headers, 'cookie')
    .flatMap((line) => line.split(';'))
    .map((pair) => pair.split('='))
    .filter(([own, ...value]) => own?.trim() === name && value.length > 0)
    .map(([, ...value]) => value.join('=').trim())
}

/** Whether an answer changes a cookie that identifies its caller, so that a retry would be another caller (contract §15). */
export function changesCaller({ caller }: ScopePolicy, sent: RawHeaders, answer: RawHeaders): boolean {
  return caller.some(
    ({ kind, name }) =>
      kind === 'cookie' &&
      linesOf(answer, 'set-cookie').some((line) => {
        const [pair = ''] = line.split(';', 1)
        const set = cookies(['cookie', pair], name)
        return set.length > 0 && !cookies(sent, name).includes(set[0] as string)
      }),
  )
}

/** Length-framed, so no two lists of parts have the same text. `null` and '' differ. */
export function frame(parts: readonly (string | null)[]): string {
  let framed = ''
  for (const one of parts) framed += part(one)
  return framed
}

/** The frame of one part. Consecutive frames are the frame of all their parts. */
export function part(value: string | null): string {
  return value === null ? '-' : `${value.length}:${value}`
}

/** Distinguishes equal keys: the source of a CloudEvent. Framed into the record id. */
export type KeyQualifier = readonly (string | null)[]

/** Separates the records of one service from all others. */
export interface Namespace {
  readonly service: string
  /** Keys every id, fingerprint and digest; null without `store.secretFile`. */
  readonly secret: Buffer | null
}

/**
 * The record's only name: SHA-256, or HMAC-SHA-256 under the secret, of the framed scope and key (contract §1).
 * `host` counts where `scope.host` is set; `path` is the path that the route compares: normalised, or as sent where `match.exact` is set.
 */
export function recordId(
  { service, secret }: Namespace,
  policy: RoutePolicy,
  caller: readonly (string | null)[],
  method: string,
  path: string,
  key: string,
  qualifier: KeyQualifier,
  host: string | null,
): RecordId {
  const { scope } = policy
  let framed = part('record/1') + part(service) + part(String(caller.length)) + frame(caller)
  // No method has this spelling.
  if (scope.host) framed += part('host') + part(host)
  framed += part(method) + part(scope.path)
  framed += part(scope.path === 'exact' ? path : scope.path === 'route' ? policy.name : null)
  framed += part(key) + frame(qualifier)
  return digest(framed, secret) as RecordId
}

/**
 * The host of a `Host` line as scopes compare it: lower case, without the default ports of http and https and without the dot of the root.
 * Null: there is none.
 */
export function normaliseHost(line: string | null): string | null {
  const host = (line ?? '')
    .trim()
    .toLowerCase()
    .replace(/:(?:80|443)?$/, '')
    .replace(/\.(?=:\d+$|$)/, '')
  return host === '' ? null : host
}

/** Names a caller's budget on a route (`limits.newKeys`), in the form of a record id. */
export function newKeysBucket(
  { service, secret }: Namespace,
  policy: Pick<RoutePolicy, 'name'>,
  caller: readonly (string | null)[],
): string {
  return digest(frame(['new-keys/1', service, policy.name, ...caller]), secret)
}

/** SHA-256, or HMAC-SHA-256 under `secret`, in base64url: 43 characters. */
export function digest(framed: string, secret: Buffer | null): string {
  return secret === null
    ? hash('sha256', framed, 'base64url')
    : hmacOf(secret).of(Buffer.from(framed)).toString('base64url')
}

/** The result of verifying the request's bearer token (contract §5). Details never quote the token. */
export type VerifiedToken =
  | { readonly kind: 'claims'; readonly claims: Readonly<Record<string, unknown>> }
  /** No `Authorization`, or one of another scheme. */
  | { readonly kind: 'absent' }
  /** Forged, expired, or for another audience. */
  | { readonly kind: 'refused'; readonly detail: string }
  /** The keys are unavailable for now. */
  | { readonly kind: 'unavailable'; readonly detail: string }

const BLOCK_BYTES = 64
const DIGEST_BYTES = 32

/** HMAC-SHA-256 (RFC 2104) under one key, built from two one-shot hashes: for short messages this takes a tenth of Node's `createHmac`. */
export class Hmac {
  readonly #inner = Buffer.alloc(BLOCK_BYTES, 0x36)
  readonly #outer = Buffer.alloc(BLOCK_BYTES + DIGEST_BYTES, 0x5c)

  constructor(secret: Buffer) {
    const key = secret.length > BLOCK_BYTES ? hash('sha256', secret, 'buffer') : secret
    for (const [at, byte] of key.entries()) {
      this.#inner[at] = byte ^ 0x36
      this.#outer[at] = byte ^ 0x5c
    }
  }

  of(message: Buffer): Buffer {
    const inner = hash('sha256', Buffer.concat([this.#inner, message]), 'binary')
    this.#outer.write(inner, BLOCK_BYTES, 'latin1')
    return Buffer.from(hash('sha256', this.#outer, 'binary'), 'latin1')
  }
}

/** The HMAC of a secret, created once. */
export function hmacOf(secret: Buffer): Hmac {
  let made = hmacs.get(secret)
  if (made === undefined) {
    made = new Hmac(secret)
    hmacs.set(secret, made)
  }
  return made
}

const hmacs = new WeakMap<Buffer, Hmac>()

/** The part of an id that logs show (contract §14). */
export function shortId(id: RecordId): string {
  return id.slice(0, 12)
}
