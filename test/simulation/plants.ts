/** A mistake in the code of the product, planted as it is loaded: the simulation has to catch each of them. */
export interface Plant {
  readonly name: string
  readonly file: string
  /** Must be there exactly once, or the plant fails. */
  readonly from: string
  readonly to: string
  /** The mistake in the model that it is (test/model). */
  readonly model?: string
  /** Another way that catches it, too: a test file that fails, or a target of the fuzzer. */
  readonly also?: string
}

// biome-ignore format: a table
export const PLANTS: readonly Plant[] = [
  { name: 'an outcome is written whoever owns the record', file: 'src/store/codec.ts',
    model: 'outcomes are not checked',
    from: 'bytes.compare(condition.token, 0, 16, PREFIX.token, PREFIX.createdAt) === 0',
    to: 'true' },
  { name: 'the lease is the expiry', file: 'src/core/record.ts',
    model: 'the lease is the expiry',
    from: `if (now >= record.dropAt) return null
  if (`,
    to: `if (now >= record.dropAt || (record.state === 'in_progress' && now >= record.leaseUntil)) return null
  if (` },
  { name: 'the claim expires with its lease', file: 'src/core/settle.ts',
    model: 'the lease is the expiry',
    from: 'return { dueIn: retention.lease, dropIn: retention.unresolvedTtl }',
    to: 'return { dueIn: retention.lease, dropIn: retention.lease }' },
  { name: 'a takeover ignores the state', file: 'src/core/decide.ts',
    model: 'a takeover ignores the state',
    from: "read.leaseExpired && policy.onLeaseExpired === 'retry'",
    to: 'read.leaseExpired' },
  { name: 'a takeover does not compare the version', file: 'src/store/records.ts',
    model: 'a takeover ignores the state',
    from: 'this.#register.swap(id, { version }, encodeDraft(draft), stored, true)',
    to: "this.#register.get(id).then(({ bytes }) => this.#register.swap(id, { version: bytes?.readUIntBE(4, 6) ?? version }, encodeDraft(draft), stored, true))" },
  { name: 'a takeover keeps the fence', file: 'src/store/codec.ts',
    from: 'Math.max(fence, old.fence + (nextFence ? 1 : 0))',
    to: 'old.fence' },
  { name: 'a broken exchange frees the key', file: 'src/protect/execute.ts',
    model: 'an error frees the key',
    also: 'test/protect/interleavings.test.ts',
    from: 'const ended = unknownBecause(result.reason, result.status)',
    to: "const ended = { kind: 'not_executed', reason: result.reason } as const" },
  { name: 'a completed record takes another outcome', file: 'src/core/settle.ts',
    model: 'outcomes are not checked',
    from: "ACCEPTING: readonly State[] = ['in_progress', 'unknown', 'failed_retryable']",
    to: "ACCEPTING: readonly State[] = ['in_progress', 'unknown', 'failed_retryable', 'completed']" },
  { name: 'the payload is not compared', file: 'src/core/decide.ts',
    also: 'test/protect/interleavings.test.ts',
    from: 'if (!sameOperation(record, asked)) return',
    to: "if (!sameOperation(record, asked) && record.state !== 'completed') return" },
  { name: 'a waiter takes what the last one was told', file: 'src/protect/waiting-room.ts',
    from: `if (record === null) room?.look()
    else room?.tell(`,
    to: `if (record === null) room?.look()
    else for (const any of this.#rooms.values()) any.tell(` },
  { name: 'a sweep does not compare the version', file: 'src/reconcile/ask.ts',
    from: 'const reply = orThrow(await ports.records.replace(id, record.version, draft, spans))',
    to: 'const fresh = orThrow(await ports.records.get(id)).record\n  const reply = orThrow(await ports.records.replace(id, fresh?.version ?? record.version, draft, spans))' },
  { name: 'a sweep frees what fell silent', file: 'src/reconcile/ask.ts',
    model: 'a sweep frees what fell silent',
    from: 'const draft = { ...record, reconciliation: next }',
    to: "const draft = { ...record, reconciliation: next, ...(record.leaseExpired ? { state: 'failed_retryable' as const } : {}) } as typeof record & { reconciliation: Reconciliation }" },
  { name: 'a lost reply to a claim means that it was not applied', file: 'src/protect/claim.ts',
    from: 'result.lost ? ports.settler.withdraw(unclaimed(), result) : undefined',
    to: 'undefined as Promise<unknown> | undefined' },
  { name: 'a claim whose reply was lost is sent all the same', file: 'src/protect/claim.ts',
    model: 'a lost claim is sent all the same',
    from: 'const bypass =\n        route.onStoreUnavailable',
    to: "const bypass = result.lost ||\n        route.onStoreUnavailable" },
  { name: 'an outcome that the store did not take is dropped', file: 'src/protect/settler.ts',
    model: 'a lapsed owner gives up its outcome',
    from: 'if (result.kind !== \'settled\') return this.#hold(pending, result.error, release)',
    to: "if (result.kind !== 'settled') { release(); return { kind: 'settled', state: pending.draft.state, expiresAt: null, left: null, recorded: null } }" },
  { name: 'an outcome is answered before it is on disk', file: 'src/protect/settler.ts',
    from: "const end = keeping === null ? 'kept' : await keeping",
    to: "const end = 'kept' as 'kept' | null" },
  { name: 'not found is believed at once', file: 'src/core/reconcile/schedule.ts',
    model: 'not found is believed at once',
    from: 'if (waits.first > 0)',
    to: 'if (waits.first > Number.POSITIVE_INFINITY)' },
  { name: 'the answer leaves before its outcome is written', file: 'src/protect/execute.ts',
    from: 'const settling = finish(ports, progress, execution, ended, held)\n',
    to: "const settling = { kind: 'settled', state: 'completed', expiresAt: null, left: null, recorded: null } as Settled\n      void Promise.resolve(finish(ports, progress, execution, ended, held))\n" },
  { name: 'the caller is not part of the record', file: 'src/core/identity.ts',
    from: 'part(String(caller.length)) + frame(caller)',
    to: "part('0')" },
  { name: 'claims are not written again after a failover', file: 'src/protect/reclaimer.ts',
    model: 'claims are not written again',
    from: '...claims.filter(isHeld).map((execution) => () => this.#claim(execution)),',
    to: '' },
  { name: 'outcomes are not written again after a failover', file: 'src/store/records.ts',
    model: 'outcomes are not written again',
    from: 'this.#recent?.all() ?? []',
    to: '[] as ReturnType<RecentWrites["all"]>' },
  { name: 'an outcome that was refused is not remembered', file: 'src/store/records.ts',
    model: 'an outcome that was refused is not remembered',
    from: 'return isRecorded(record, draft) || (record.fence <= draft.fence && record.createdAt === draft.createdAt)',
    to: 'return false' },
  { name: 'a claim that no replica has is not withdrawn', file: 'src/protect/claim.ts',
    from: `      // It is there for sure.
      this.any = true`,
    to: '' },
  { name: 'a claim that no replica has is sent all the same', file: 'src/protect/claim.ts',
    from: 'const bypass =\n        route.onStoreUnavailable',
    to: 'const bypass = result.error instanceof Unreplicated ||\n        route.onStoreUnavailable' },
  { name: 'a drain does not wait for what runs', file: 'src/drain.ts',
    from: 'while (busy() && left() > 0) {',
    to: 'while (Number.isNaN(left())) {' },
]

/** Mistakes in what strangers can reach: one target of the fuzzer has to find each of them, and a test. */
// biome-ignore format: a table
export const FUZZED: readonly (Plant & { readonly target: string })[] = [
  { name: 'a record is read in whatever state it is', file: 'src/store/codec.ts', target: 'record',
    also: 'test/store/codec.test.ts',
    from: 'if (state === undefined) throw new CorruptRecord(`the stored record has state ${bytes[PREFIX.state]}`)',
    to: '' },
]
