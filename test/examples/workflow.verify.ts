import { spawnSync } from 'node:child_process'
import { readFileSync } from 'node:fs'
import t from 'tap'
import { freePort } from '../../examples/parts.ts'
import { actionsOf, book, killEverywhere, plan, table, verdict } from '../../examples/workflow/kill.ts'
import { LANGUAGES, type Language, World } from '../../examples/workflow/world.ts'
import { newKey, send, tempDir } from '../support/e2e.ts'
import { proxyProcess } from '../support/proxy.ts'
import { upstreamStub, valueOf } from '../support/upstream.ts'

t.setTimeout(900_000)

const NO_PYTHON = spawnSync('python3', ['--version']).status !== 0 && 'python3 is not installed'
const INSTALLED = (Object.keys(LANGUAGES) as Language[]).filter((one) => one !== 'python' || !NO_PYTHON)

void t.test(
  'killed anywhere, a booking is booked or fully taken back, and each action done once',
  async (t) => {
    const killed = await killEverywhere(INSTALLED)
    t.equal(killed.length, [...plan(INSTALLED)].length)
    for (const { language, refuse, action, point, ended } of killed)
      t.equal(
        ended,
        refuse === 'none' ? 'booked' : 'cancelled',
        `${language}, ${refuse}: ${action}, ${point.join(' ')}`,
      )
    t.comment(table(killed))
    if (!NO_PYTHON)
      t.ok(
        readFileSync('docs/guides/workflows.md', 'utf8').includes(table(killed)),
        'the guide shows this table',
      )
  },
)

void t.test(
  'the plan kills every action in both languages, and every compensation',
  { skip: NO_PYTHON },
  async (t) => {
    t.same(actionsOf('notify'), [
      'reserve',
      'charge',
      'confirm',
      'notify',
      'undo-confirm',
      'undo-charge',
      'undo-reserve',
    ])
    t.same(actionsOf('reserve'), ['reserve'])
    const python = [...plan(['python'])].map(({ refuse, action }) => `${refuse} ${action}`)
    t.equal(new Set(python).size, 4 + 1 + 3 + 5 + 7)
  },
)

void t.test('the verdict sees what was done twice, not at all, or to another', async (t) => {
  const row = (action: string, id = 1, about = 'b') => ({ id, action, about, status: 201 })
  const all = ['reserve', 'charge', 'confirm', 'notify'].map((action) => row(action))
  const booked = { body: '{"state":"booked"}' }
  t.equal(verdict(all, 'b', 'none', booked), 'booked')
  t.equal(verdict([...all, row('charge', 2)], 'b', 'none', booked), 'charge 2×')
  t.equal(verdict(all.slice(1), 'b', 'none', booked), 'reserve 0×')
  const cancelled = { body: '{"state":"cancelled"}' }
  const undone = [row('reserve', 5), row('charge', 7), row('undo-reserve', 6, '5')]
  t.equal(verdict(undone, 'b', 'charge', cancelled), 'cancelled')
  t.equal(
    verdict([...undone.slice(0, 2), row('undo-reserve', 6, '4')], 'b', 'charge', cancelled),
    'undo-reserve of 4',
  )
})

for (const language of INSTALLED)
  void t.test(`${language}: ten orchestrators of one booking at once do each action once`, async (t) => {
    await using world = await World.start(language, await freePort())
    for (const refuse of ['none', 'confirm'] as const) {
      const booking = newKey()
      // Past the front proxy, which would let one through.
      const attempts = Array.from({ length: 10 }, () =>
        fetch(`${world.orchestrator}/bookings`, {
          method: 'POST',
          headers: { 'Content-Type': 'application/json', 'Idempotency-Record': booking },
          body: JSON.stringify({ booking, refuse }),
        }).then((response) => response.json()),
      )
      const states = new Set((await Promise.all(attempts)).map((one) => (one as { state: string }).state))
      t.same([...states], [refuse === 'none' ? 'booked' : 'cancelled'])
      const work = (await world.work()).filter((row) => row.about === booking)
      t.same(
        work.map(({ action }) => action).toSorted(),
        actionsOf(refuse)
          .filter((one) => !one.startsWith('undo'))
          .toSorted(),
      )
      t.equal(
        (await world.work()).filter(({ action }) => action.startsWith('undo')).length,
        refuse === 'none' ? 0 : 2,
      )
    }
  })

void t.test('while a step’s proxy is down nothing follows, and the booking says why', async (t) => {
  await using world = await World.start('typescript', await freePort())
  await world.part('proxy of charge').kill()
  const booking = newKey()
  const refused = await book(world, booking, 'none', '')
  t.match(refused, { status: 503, body: /^\{"error":"charge: .*ECONNREFUSED/, replayed: false })
  t.same(
    (await world.work()).map(({ action }) => action),
    ['reserve'],
  )
  await world.part('proxy of charge').start()
  t.match(await book(world, booking, 'none', ''), { status: 201, body: /booked/ })
  t.equal((await world.work()).length, 4)
})

void t.test(
  'the egress proxy gives a call its key: the same after any crash, another for another step or path',
  async (t) => {
    // An API that takes keys; it loses its first answer.
    const done = new Map<string, number>()
    await using api = await upstreamStub((seen, response) => {
      const key = valueOf(seen, 'idempotency-key')
      done.set(key, (done.get(key) ?? 0) + 1)
      if (api.seen.length === 1) response.destroy()
      else response.writeHead(201).end(key)
    })
    const folder = tempDir(t)
    const proxy = await proxyProcess('examples/workflow/egress.yaml', [], {
      PROXY_LISTEN: '127.0.0.1:0',
      PROXY_ADMIN_LISTEN: 'none',
      PROXY_UPSTREAM: api.url,
      PROXY_STORE: `sqlite:${folder}/egress.db`,
    })
    t.teardown(() => proxy[Symbol.asyncDispose]())
    const call = (path: string, record: string, step: string) =>
      send(proxy, null, { path, headers: { 'idempotency-record': record, 'idempotency-step': step } })
    t.match(await call('/v1/charges', 'r-1', 'charge'), { status: 502, code: 'upstream_failed' })
    const first = await call('/v1/charges', 'r-1', 'charge')
    t.match(first, { status: 201, replayed: false })
    t.same([...done], [[first.body, 2]], 'sent again under the same key')
    t.match(await call('/v1/charges', 'r-1', 'charge'), { status: 201, replayed: true, body: first.body })
    for (const [path, record, step] of [
      ['/v1/refunds', 'r-1', 'charge'],
      ['/v1/charges', 'r-2', 'charge'],
      ['/v1/charges', 'r-1', 'tip'],
    ] as const)
      t.match(await call(path, record, step), { status: 201, replayed: false })
    t.equal(done.size, 4)
    t.match(await send(proxy, null, { path: '/v1/charges' }), { code: 'idempotency_key_missing' })
  },
)
