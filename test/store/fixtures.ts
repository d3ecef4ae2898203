import { randomBytes } from 'node:crypto'
import { mkdtempSync, rmSync } from 'node:fs'
import { syncBuiltinESMExports } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import timers from 'node:timers/promises'
import type { Test } from 'tap'
import type { Phase } from '../../src/core/copies.ts'
import type { CompletedResponse, Fingerprint, RecordDraft, RecordId, Spans } from '../../src/core/record.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { migrating } from '../../src/store/moving/migrating.ts'
import { encodeDraft } from '../../src/store/record/codec.ts'
import { type PutKind, type Store, StoreUnavailable } from '../../src/store/register.ts'
import type { Harness } from './contract.ts'

export const MINUTE = 60_000
export const HOUR = 60 * MINUTE
/** Far enough apart that a slow machine cannot blur them. */
export const SPANS: Spans = { dueIn: HOUR, dropIn: 24 * HOUR }

export function newId(): RecordId {
  return randomBytes(32).toString('base64url') as RecordId
}

export function newToken(): Buffer {
  return randomBytes(16)
}

export const ALL_BYTES = Buffer.from(Array.from({ length: 256 }, (_, n) => n))

export function response(body: Buffer = ALL_BYTES): CompletedResponse {
  return {
    kept: true,
    response: {
      status: 201,
      reason: 'Created',
      headers: ['Set-Cookie', 'a=1', 'set-cookie', 'b="\xe9\x80"'],
      body,
      trailers: ['X-Sum', '1'],
    },
  }
}

const OPERATION = {
  route: 'create-payment',
  method: 'POST',
  path: '/v1/payments/ü',
  fingerprint: Buffer.alloc(32, 0xab) as Fingerprint,
  rawDigest: Buffer.alloc(32, 0xcd),
  recipe: 'v1:json',
  key: null,
}

type State = RecordDraft extends infer D ? (D extends { state: infer S } ? S : never) : never

/** A draft of an attempt in `state`. */
export function draft(state: State, token: Buffer, over: Partial<RecordDraft> = {}): RecordDraft {
  const variant = {
    in_progress: {},
    completed: { result: response() },
    failed_retryable: {},
    unknown: { leaseExpired: false, status: null, reconciliation: null },
    expired: {},
  }[state]
  return {
    ...OPERATION,
    fence: 0,
    token,
    attempts: 1,
    lastError: null,
    createdAt: 0,
    ...variant,
    ...over,
    state,
  } as RecordDraft
}

export function bytesOf(state: State, token: Buffer, over: Partial<RecordDraft> = {}): Buffer {
  return encodeDraft(draft(state, token, over))
}

export async function claim(store: Store, id: RecordId = newId(), entry: PutKind = 'claim') {
  return store.put(id, bytesOf('in_progress', newToken()), SPANS, entry)
}

/** The configuration of a store, but for its URL: nothing but the store. */
export const PLAIN_STORE = {
  timeout: 5000,
  secret: null,
  encryption: { keys: [] },
  compression: 'off',
  wait: null,
  spool: null,
  acceptRisk: false,
  grace: 0,
} as const

/** A folder that is gone when the scope ends. */
export function tempDir(): { path: string } & Disposable {
  const path = mkdtempSync(join(tmpdir(), 'store-'))
  return { path, [Symbol.dispose]: () => rmSync(path, { recursive: true, force: true }) }
}

/** Resolves when `check` holds; polls on a short timer, for states that no event announces. */
export async function until(check: () => boolean | Promise<boolean>): Promise<void> {
  while (!(await check())) await new Promise((next) => setTimeout(next, 10))
}

/** The store, whose records can be neither read nor written while `why` gives an error for it. */
export function failing(store: Store, why: (entry?: PutKind) => unknown): Store {
  const or = <T>(reply: () => T | Promise<T>, entry?: PutKind): T | Promise<T> => {
    const error = why(entry)
    return error instanceof Error ? Promise.reject(error) : reply()
  }
  return {
    ...store,
    put: (...args) => or(() => store.put(...args), args[3]),
    swap: (...args) => or(() => store.swap(...args)),
    get: async (id) => or(() => store.get(id)),
  }
}

export const down = () => new StoreUnavailable('down', false)

/** Whether it has settled meanwhile. */
export function settling(promise: Promise<unknown>): () => boolean {
  let isSettled = false
  const settled = () => void (isSettled = true)
  promise.then(settled, settled)
  return () => isSettled
}

/** Pauses last a turn of the event loop. Returns how long they were to last, and whether they keep the process alive. */
export function hurried(t: Test) {
  const asked: { delay: number | undefined; ref: boolean | undefined }[] = []
  const { setTimeout: wait } = timers
  const set = (to: typeof wait): void => {
    timers.setTimeout = to
    syncBuiltinESMExports()
  }
  t.teardown(() => set(wait))
  set(async (delay, value, options) => {
    asked.push({ delay, ref: options?.ref })
    await new Promise((next) => setImmediate(next))
    return value as never
  })
  return asked
}

/** A memory store with a clock of its own. */
export function memoryHarness(): Harness {
  let now = 1_795_000_000_000
  const register = memoryStore({ clock: () => now, maxBytes: MEMORY_BYTES })
  return {
    register,
    peer: register,
    other: null,
    tellsPeers: true,
    advance: (ms) => void (now += ms),
    [Symbol.asyncDispose]: () => register.close(),
  }
}

/** A memory store that answers later, as a server does. */
export function answeringLater(clock: () => number): Store {
  const store = memoryStore({ clock, maxBytes: MEMORY_BYTES })
  return {
    ...store,
    put: async (...args) => store.put(...args),
    swap: async (...args) => store.swap(...args),
  }
}

/** Two memory stores as one. */
export function pairHarness(phase: Phase): Harness {
  let now = 1_795_000_000_000
  const [from, to] = [answeringLater(() => now), answeringLater(() => now)]
  return {
    register: migrating(from, to, phase),
    peer: migrating(from, to, phase),
    other: null,
    tellsPeers: true,
    advance: (ms) => void (now += ms),
    [Symbol.asyncDispose]: () => from.close(),
  }
}
