import t from 'tap'
import { lockWait } from '../../src/store/postgres-lanes.ts'
import { prepare } from '../../src/store/postgres-layout.ts'
import { type Link, type Row, reasonOf, refusal } from '../../src/store/postgres-link.ts'
import { postgresAddress } from '../../src/store/postgres-url.ts'

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
  t.match(postgresAddress('postgres://u@db/d?sslmode=require').tls, { rejectUnauthorized: false })
})

void t.test('a short store.timeout does not switch the lock timeout off', async (t) => {
  t.same([1, 3, 4, 400].map(lockWait), [1, 1, 1, 100])
})

function errorOf(code: string): Error {
  return Object.assign(new Error('because'), { code })
}

void t.test('only errors that prove a rollback mean that nothing was applied', async (t) => {
  for (const code of [
    '23505',
    'IP001',
    '25P02',
    '28P01',
    '3D000',
    '40001',
    '40P01',
    '42501',
    '42883',
    '53200',
    '53300',
    '57014',
    'P0001',
    '22P02',
    '0A000',
  ])
    t.match(refusal(errorOf(code)), { name: 'StoreUnavailable', maybeApplied: false }, code)
  for (const code of [
    '08006',
    '08P01',
    '40003',
    '57P01',
    '57P02',
    '57P03',
    '57P05',
    '58030',
    'XX000',
    'IDP01',
    'ECONNRESET',
    'EPIPE',
    '',
  ])
    t.match(refusal(errorOf(code)), { name: 'StoreUnavailable', maybeApplied: true }, code)
  t.match(refusal(new Error('Connection terminated')), { maybeApplied: true })
  t.equal(reasonOf(Object.assign(new AggregateError([], ''), { code: 'ECONNREFUSED' })), 'ECONNREFUSED')
  for (const code of ['53100', '25006'])
    t.match(refusal(errorOf(code)), { name: 'StoreFull', maybeApplied: false }, code)
  t.match(refusal(errorOf('55P03')), { name: 'RecordLocked', maybeApplied: false })
})

void t.test('prepare returns the identity of the server, or null if it does not tell', async (t) => {
  const ready: Row[][] = [[['f', '15', '4', '1']], [['1', '6']], [[null, null]]]
  const wal = '0000000A0000000000000001'
  t.same(await prepare(fake([...ready, [['7153', wal]]])), { system: '7153', timeline: 10 })
  for (const silent of [errorOf('0A000'), errorOf('42501'), [['7153', null]], []])
    t.equal(await prepare(fake([...ready, silent])), null)
})

/** Answers questions in order; creating the schema fails, or changes nothing. */
function fake(answers: readonly (Row[] | Error)[], making: Error | null = null): Link {
  const left = [...answers]
  const link: Pick<Link, 'ask' | 'execute'> = {
    async ask() {
      const next = left.shift() ?? []
      if (next instanceof Error) throw next
      return next
    },
    async execute() {
      if (making !== null) throw making
    },
  }
  return link as Link
}

void t.test('prepare fails if the server is too old or the schema cannot be created', async (t) => {
  const none: Row[] = [['f', '15', '0', '0']]
  await t.rejects(prepare(fake([[['f', '13', '0', '0']]])), {
    message: /PostgreSQL 13 is too old; allowed: 14 or later/,
  })
  await t.rejects(prepare(fake([none, none])), {
    message: 'the schema idempotency was being changed at the same time',
  })
  await t.rejects(prepare(fake([none], errorOf('55006'))), { message: 'because' })
  await t.rejects(prepare(fake([[['f', '15', '3', '1']], errorOf('57P01')])), { message: 'because' })
  await t.rejects(prepare(fake([])), { message: /changed at the same time/ })
})
