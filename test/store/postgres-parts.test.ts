import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { postgresEpochs } from '../../src/store/postgres/epochs.ts'
import { lockWait } from '../../src/store/postgres/lanes.ts'
import { prepare, REVISION } from '../../src/store/postgres/layout.ts'
import { type PostgresLink, postgresFailure, reasonOf, type SqlRow } from '../../src/store/postgres/link.ts'
import { postgresTraits } from '../../src/store/postgres/traits.ts'
import * as parsing from '../../src/store/postgres/url.ts'
import { type NewEpoch, StoreUnavailable } from '../../src/store/register.ts'
import { KEPT_FOR, Safety } from '../../src/store/safety.ts'
import { fakeLinks } from '../support/fake-links.ts'
import { tempDir } from './fixtures.ts'

const postgresAddress = (url: string) => parsing.postgresAddress(url, () => {})

void t.test('a PostgreSQL URL gives host, port, credentials, database and TLS', async (t) => {
  const plain = { host: 'db', port: 5432, user: 'u', password: '', database: 'd', tls: null }
  t.strictSame(postgresAddress('postgres://u@db/d'), plain)
  t.strictSame(postgresAddress('postgresql://u%40x:p%2F@[::1]:7000/d%C3%BC?sslmode=disable'), {
    host: '::1',
    port: 7000,
    user: 'u@x',
    password: 'p/',
    database: 'dü',
    tls: null,
  })
  t.strictSame(postgresAddress('postgres://u@db/d?sslmode=require').tls?.(), { rejectUnauthorized: false })
})

void t.test('sslmode says what is verified, and with which files', async (t) => {
  using dir = tempDir()
  const files = ['sslrootcert', 'sslcert', 'sslkey'].map((name) => {
    const path = join(dir.path, name)
    writeFileSync(path, name)
    return `${name}=${encodeURIComponent(path)}`
  })
  const tls = (mode: string) =>
    postgresAddress(`postgres://u@db/d?sslmode=${mode}&${files.join('&')}`).tls?.()
  const given = { ca: Buffer.from('sslrootcert'), cert: Buffer.from('sslcert'), key: Buffer.from('sslkey') }
  t.strictSame(tls('verify-full'), { rejectUnauthorized: true, ...given })
  const { checkServerIdentity, ...rest } = tls('verify-ca') ?? {}
  t.strictSame(rest, { rejectUnauthorized: true, ...given })
  t.type(checkServerIdentity, 'function')
  t.equal(checkServerIdentity?.('db', {} as never), undefined, 'the name in the certificate is not compared')
})

void t.test('a short store.timeout does not switch the lock timeout off', async (t) => {
  t.same([1, 3, 4, 7, 400].map(lockWait), [1, 1, 1, 1, 100])
})

function errorOf(code: string): Error {
  return Object.assign(new Error('because'), { code })
}

void t.test('only errors that prove a rollback mean that nothing was applied', async (t) => {
  for (const code of '23505 IP001 25P02 28P01 3D000 40001 40P01 42501 42883 53200 53300 57014 P0001 22P02 0A000'.split(
    ' ',
  ))
    t.match(postgresFailure(errorOf(code)), { name: 'StoreUnavailable', maybeApplied: false }, code)
  for (const code of '08006 08P01 40003 57P01 57P02 57P03 57P05 58030 XX000 IDP01 ECONNRESET EPIPE '.split(
    ' ',
  ))
    t.match(postgresFailure(errorOf(code)), { name: 'StoreUnavailable', maybeApplied: true }, code)
  t.match(postgresFailure(new Error('Connection terminated')), {
    maybeApplied: true,
    message: 'no answer from PostgreSQL: Connection terminated',
  })
  t.match(postgresFailure(errorOf('ECONNRESET')), { message: 'no answer from PostgreSQL: because' })
  t.equal(reasonOf(errorOf('28000')), 'because')
  t.equal(reasonOf(new Error('')), '')
  t.equal(reasonOf(Object.assign(new AggregateError([], ''), { code: 'ECONNREFUSED' })), 'ECONNREFUSED')
  for (const code of ['53100', '25006'])
    t.match(postgresFailure(errorOf(code)), { name: 'StoreFull', maybeApplied: false }, code)
  t.match(postgresFailure(errorOf('55P03')), { name: 'RecordLocked', maybeApplied: false })
})

/** Answers questions in order; creating the schema fails, or changes nothing. */
function fake(answers: readonly (SqlRow[] | Error)[], making: Error | null = null): PostgresLink {
  const left = [...answers]
  const link: Pick<PostgresLink, 'ask' | 'execute'> = {
    async ask() {
      const next = left.shift() ?? []
      if (next instanceof Error) throw next
      return next
    },
    async execute() {
      if (making !== null) throw making
    },
  }
  return link as PostgresLink
}

void t.test('prepare returns the identity of the server, or null if it does not tell', async (t) => {
  const ready: SqlRow[][] = [[['f', '15', '4', '1']], [['1', String(REVISION)]], [[null, null]]]
  const wal = '1000001F0000000000000001'
  t.same(await prepare(fake([...ready, [['7153', wal]]], errorOf('XX000'))), {
    system: '7153',
    timeline: 0x1000001f,
  })
  for (const silent of [errorOf('0A000'), errorOf('42501'), [['7153', null]], [[null, wal]], []])
    t.equal(await prepare(fake([...ready, silent])), null)
})

void t.test('prepare refuses a server or a schema that it cannot use', async (t) => {
  const there: SqlRow[] = [['f', '15', '4', '1']]
  const none: SqlRow[] = [['f', '15', '0', '0']]
  const changed = /^the schema idempotency was being changed at the same time$/
  const cases: [answers: (SqlRow[] | Error)[], message: RegExp, making?: Error][] = [
    [[[['t', '15', '4', '1']]], /^the server is a standby/],
    [[[['f', '13', '0', '0']]], /PostgreSQL 13 is too old; allowed: 14 or later/],
    [[[['f', '15', '1', '0']]], /belongs to another program/],
    [[there, [['2', '7']]], /has version 2, of a later release; this one reads 1/],
    [[there, errorOf('42501')], /may not use the schema/],
    [[there, errorOf('57P01')], /^because$/],
    [[there, [['1', String(REVISION)]], [['SELECT on records', null]]], /: SELECT on records;/],
    [[there, [['1', String(REVISION)]], [[null, 'EXECUTE on 2 functions']]], /: EXECUTE on 2 functions;/],
    [[none, none], changed],
    [[], changed],
    [[none], /^because$/, errorOf('55006')],
  ]
  for (const [answers, message, making] of cases) {
    const error = await prepare(fake(answers, making)).catch((one: Error) => one)
    t.match(error, { message })
    const isForever = /PostgreSQL 13|another program|version 2/.test(String(message))
    t.equal(error instanceof StoreUnavailable, isForever, 'only a person can help')
  }
})

const STRICT = {
  commit: 'on',
  fsync: 'on',
  pages: 'on',
  isolation: 'read committed',
  standbys: '',
  activities: 'on',
  connected: '0',
  live: '5',
  dead: '3',
  size: '7',
  open: '1',
}
const traitsWith = (over: Partial<typeof STRICT>) => postgresTraits(Object.values({ ...STRICT, ...over }))

void t.test('a server as it comes is durable, forgets nothing, and there is nothing to report', async (t) => {
  t.strictSame(traitsWith({}), {
    durable: true,
    evicts: false,
    forgets: null,
    hasIdentity: true,
    findings: [],
    refusals: [],
    replication: 'commits wait for no standby; connected: 0',
    room: '7 MiB at the last VACUUM; 5 rows, and 3 dead ones',
  })
})

void t.test('each setting that can lose or damage records is reported', async (t) => {
  for (const [over, finding] of [
    [{ commit: 'off' }, /^synchronous_commit is off: a crash of PostgreSQL loses the latest records/],
    [{ fsync: 'off' }, /^fsync or full_page_writes is off/],
    [{ pages: 'off' }, /^fsync or full_page_writes is off/],
  ] as const)
    t.match(traitsWith(over), { durable: false, forgets: null, findings: [finding] })
  for (const [over, finding] of [
    [{ isolation: 'serializable' }, /^default_transaction_isolation is serializable: /],
    [{ activities: 'off' }, /^track_activities is off: /],
  ] as const)
    t.match(traitsWith(over), { durable: true, forgets: null, findings: [finding] })
})

void t.test('a promotion loses claims unless commits wait for a standby', async (t) => {
  const forgets = (standbys: string, connected: string, commit: string) =>
    traitsWith({ standbys, connected, commit }).forgets
  for (const commit of ['on', 'remote_apply', 'local']) {
    t.match(forgets('', '1', commit), /^The standby is asynchronous .* loses the latest claims/, commit)
    t.equal(forgets('', '0', commit), null, 'there is none')
  }
  for (const connected of ['0', '1']) {
    for (const commit of ['on', 'remote_apply']) t.equal(forgets('a', connected, commit), null)
    for (const commit of ['local', 'remote_write', 'off'])
      t.match(forgets('a', connected, commit), new RegExp(`^synchronous_commit is ${commit}: a promotion`))
  }
  t.equal(
    traitsWith({ standbys: 'a', connected: '2' }).replication,
    'commits wait for a (synchronous_commit on); connected: 2',
  )
})

void t.test('VACUUM that cannot keep up, and what keeps it from that, is reported', async (t) => {
  const findings = (over: Partial<typeof STRICT>) => traitsWith(over).findings
  t.match(findings({ dead: '100001' }), [/^100001 dead rows and 5 live ones/])
  t.same(findings({ dead: '100000' }), [])
  t.match(findings({ dead: '200001', live: '200000' }), [/^200001 dead rows/])
  t.same(findings({ dead: '200000', live: '200000' }), [])
  t.match(findings({ open: '3601' }), [/^A transaction has been open for 3601 s/])
  t.same(findings({ open: '3600' }), [])
})

const LONG: Millis = 3_600_000

/** An epoch whose looks the test answers, by default that nothing is held since 7. */
function observed(t: Test, grace = LONG) {
  const fake = fakeLinks(t)
  const self = {
    answer: async (_seen: Millis): Promise<SqlRow> => ['0', '7'],
    looks: [] as Millis[],
    epochs: [] as NewEpoch[],
    held: [] as Millis[],
    silences: 0,
    safe: [] as Millis[],
  }
  const epoch = postgresEpochs({
    grace,
    look: (seen) => {
      self.looks.push(seen)
      return self.answer(seen)
    },
    onSilence: () => void self.silences++,
    onNewEpoch: (one) => void self.epochs.push(one),
    safety: new Safety(1, (before) => void self.safe.push(before)),
    onHeld: (left) => void self.held.push(left),
  })
  t.teardown(() => epoch.close())
  return { ...self, self, epoch, fake }
}

void t.test('a look that fails holds nothing; silence is reported, a refusal is not', async (t) => {
  const { self, epoch, epochs, held, looks } = observed(t)
  for (const maybeApplied of [false, true]) {
    self.answer = async () => {
      throw new StoreUnavailable('down', maybeApplied)
    }
    await epoch.look()
    t.equal(self.silences, maybeApplied ? 1 : 0)
  }
  for (const row of [['-1', '7'], ['0', 'x'], []]) {
    self.answer = async () => row
    await epoch.look()
  }
  t.same(epochs, [])
  t.same(held, [0, 0, 0, 0, 0])
  t.same(looks, [0, 0, 0, 0, 0])
})

void t.test('writes are safe once the server has been the same for long', async (t) => {
  const { self, epoch, fake, safe } = observed(t)
  const look = async (): Promise<Millis | undefined> => {
    await epoch.look()
    return safe.at(-1)
  }
  t.equal(await look(), Number.NEGATIVE_INFINITY)
  await fake.pass(KEPT_FOR)
  // What was known before the first look may be of another server.
  self.answer = async () => ['0', '9']
  t.equal(await look(), Number.NEGATIVE_INFINITY)
  await fake.pass(KEPT_FOR)
  t.equal(await look(), performance.now() - KEPT_FOR)
})
