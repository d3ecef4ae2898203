import t from 'tap'
import { PartlyUnavailable, StoreUnavailable } from '../../src/store/register.ts'
import {
  APPLIED,
  answerLooks,
  isBusy,
  looksOf,
  NOT_APPLIED,
  fakeLanes as open,
  openOf,
  sentOf,
  TIMEOUT,
  textsOf,
} from '../support/fake-lanes.ts'
import type { FakeLink } from '../support/fake-links.ts'
import { settling } from './fixtures.ts'

// When connections are made, dropped and used, and what replies, failures and other servers mean for them, at a time that the test passes.

void t.test('statements take idle connections; of eight, two are for outcomes and leases', async (t) => {
  const { links, attempts, run, fake, pass, begun, answered } = await open(t)
  await begun('a')
  t.same(attempts.length, 1)
  for (const name of ['b', 'c', 'd', 'e', 'f', 'g', 'h']) {
    void run(name, name < 'e' ? 'plain' : 'local')
    await pass(1)
  }
  await fake.settled()
  t.same(sentOf(links), ['a', 'b', 'c', 'd', 'e', 'f'])
  for (const name of ['u', 'v', 'w']) await begun(name, 'urgent')
  t.same(sentOf(links), ['a', 'b', 'c', 'd', 'e', 'f', 'u', 'v'])
  await answered(links[7]?.sent[0])
  t.same(textsOf(links[7]), ['v', 'w'])
  await answered(links[7]?.sent[1])
  t.same(links[7]?.sent.length, 2, 'it is kept for outcomes')
  await answered(links[0]?.sent[0])
  t.same(sentOf(links).filter((text) => text === 'g').length, 1)
  t.equal(attempts.length, 8)
})

void t.test('who has waited longest goes first, outcomes before all', async (t) => {
  const { links, run, fake, pass, answered } = await open(t)
  for (let n = 0; n < 6; n++) void run('first')
  for (const [name, kind] of [
    ['a', 'local'],
    ['b', 'plain'],
    ['c', 'local'],
    ['d', 'plain'],
    ['e', 'plain'],
    ['f', 'local'],
  ] as const) {
    await pass(1)
    void run(name, kind)
  }
  await fake.settled()
  const order: string[] = []
  for (let n = 0; n < 6; n++) {
    await answered(links[0]?.sent.at(-1))
    order.push(links[0]?.sent.at(-1)?.text ?? '')
  }
  t.same(order, ['a', 'b', 'c', 'd', 'e', 'f'])
})

void t.test('a connection may take two seconds, and ever longer where the server is silent', async (t) => {
  for (const { grace, expected } of [
    { grace: 0, expected: [2000, 4000, 8000, 16_000, 16_000] },
    { grace: 8000, expected: [2000, 4000, 4000] },
    { grace: 1000, expected: [500, 500] },
  ])
    await t.test(`grace ${grace}`, async (t) => {
      const { fake, attempts, lanes, pass } = await open(t, { grace, opens: false })
      fake.accepts = false
      const opening = lanes.open()
      const delays = [50, 100, 200, 400, 500, 500]
      const delay = () => pass(delays.shift() ?? 0)
      for (const time of expected) {
        const { length } = attempts
        t.equal(attempts.at(-1)?.timeoutMs, time)
        await pass(time)
        t.equal(attempts.length, length, 'one at a time')
        attempts.at(-1)?.refuse('silent')
        await delay()
        t.equal(attempts.length, length + 1)
      }
      await opening
      const first = expected[0] ?? 0
      await pass((attempts.at(-1)?.timeoutMs ?? 0) - 1)
      attempts.at(-1)?.refuse('refused')
      await delay()
      t.equal(attempts.at(-1)?.timeoutMs, first, 'an answer, whatever it is')
      const link = attempts.at(-1)?.accept()
      await pass(0)
      link?.cut()
      await pass(50)
      t.equal(attempts.at(-1)?.timeoutMs, first)
    })
})

void t.test('a server that examines for long is not a silent one', async (t) => {
  const opened = await open(t)
  const { links, attempts, pass } = opened
  opened.prepare = async (link) => void (await link.ask('prepare'))
  links[0]?.cut()
  await pass(50)
  await pass(4999)
  links[1]?.cut()
  await pass(500)
  t.same(
    attempts.map(({ timeoutMs }) => timeoutMs),
    [2000, 2000, 2000],
  )
})

void t.test('attempts become rarer until one succeeds', async (t) => {
  const { fake, links, attempts, pass, events, run, refused } = await open(t)
  fake.accepts = false
  for (let round = 0; round < 2; round++) {
    events.length = 0
    links.at(-1)?.cut('gone')
    t.match(await run('it', 'local'), { ...NOT_APPLIED, message: 'PostgreSQL is not connected: gone' })
    for (const delay of [50, 100, 200, 400, 500, 500]) {
      const { length } = attempts
      await pass(delay - 1)
      t.equal(attempts.length, length)
      await pass(1)
      t.equal(attempts.length, length + 1)
      await refused(attempts.at(-1), 'refused')
      t.match(await run('it'), { ...NOT_APPLIED, message: 'PostgreSQL is not connected: refused' })
    }
    t.same(events, ['disconnected: db:1', 'error: refused'], 'reported once')
    await pass(500)
    attempts.at(-1)?.accept()
    await fake.settled()
    t.equal(events.at(-1), 'connected: db:1')
  }
})

void t.test('an attempt that is under way, or has its time, is the only one', async (t) => {
  const { fake, links, attempts, pass, lanes, begun, refused } = await open(t)
  fake.accepts = false
  lanes.recheck()
  lanes.recheck()
  await fake.settled()
  t.equal(attempts.length, 2)
  // All connections are lost meanwhile.
  links[0]?.cut()
  await pass(200)
  t.equal(attempts.length, 2)
  attempts[1]?.accept()
  await fake.settled()
  lanes.recheck()
  await refused(attempts[2], 'refused')
  lanes.recheck()
  links[1]?.cut()
  await pass(49)
  t.equal(attempts.length, 3)
  await pass(1)
  t.equal(attempts.length, 4)
  attempts[3]?.refuse('refused')
  await pass(99)
  t.equal(attempts.length, 4)
  await pass(1)
  t.equal(attempts.length, 5)
  attempts[4]?.accept()
  await pass(500)
  t.equal(attempts.length, 5)
  await begun('it')
  t.same(sentOf(links), ['it'])
})

void t.test('while a connection is in use, a failed attempt is no reason for the next one', async (t) => {
  const { fake, links, attempts, pass, lanes, ends, begun, answered, refused } = await open(t)
  await begun('slow')
  fake.accepts = false
  await begun('waits')
  await refused(attempts[1], 'no room')
  await begun('more')
  t.equal(attempts.length, 2, 'not before its time')
  await answered(links[0]?.sent[0])
  await answered(links[0]?.sent[1])
  links[0]?.sent[2]?.answer()
  await pass(900)
  t.same(ends, ['slow: ', 'waits: ', 'more: '])
  t.equal(attempts.length, 2)
  lanes.recheck()
  t.equal(attempts.length, 3)
})

void t.test('a statement that waits for a connection gets one as soon as there may be one', async (t) => {
  const { fake, links, attempts, pass, run, begun } = await open(t)
  void run('slow')
  fake.accepts = false
  await begun('waits')
  attempts[1]?.refuse('no room')
  await pass(50)
  t.equal(attempts.length, 3)
  attempts[2]?.accept()
  await fake.settled()
  t.same(sentOf(links), ['slow', 'waits'])
})

void t.test('every ten seconds an idle connection is made anew', async (t) => {
  const { fake, links, attempts, pass, grow, run, lanes, begun, refused } = await open(t)
  await grow(2)
  await pass(9999)
  t.equal(attempts.length, 2)
  await pass(1)
  t.same(openOf(links), [2, 3])
  await begun('slow')
  t.equal(isBusy(links[1] as FakeLink), true)
  await pass(900)
  links[1]?.sent.at(-1)?.answer()
  await pass(9000)
  void run('slow')
  await pass(100)
  t.same(openOf(links), [2, 3, 4], 'one that is in use stays')
  links[1]?.sent.at(-1)?.answer()

  fake.accepts = false
  await pass(9990)
  lanes.recheck()
  await pass(10)
  t.equal(attempts.length, 5, 'one attempt at a time')
  await refused(attempts[4], 'refused')
  t.same(openOf(links), [2, 3, 4])
  await pass(9970)
  lanes.recheck()
  attempts[5]?.refuse('refused')
  await pass(40)
  t.equal(attempts.length, 6, 'none before its time')
  await pass(9990)
  t.equal(attempts.length, 7)
  await refused(attempts[6], 'refused')
  t.same(openOf(links), [2, 3, 4], 'none goes where no other has come')
  await lanes.close()
  await pass(20_000)
  t.equal(attempts.length, 7)
})

void t.test('a connection that does not tell who the server is ends after five seconds', async (t) => {
  const opened = await open(t)
  const { links, attempts, pass, lanes, begun } = opened
  await pass(6000)
  t.same(openOf(links), [1], 'nothing ends one that has told')
  opened.prepare = async (link) => void (await link.ask('prepare'))
  lanes.recheck()
  await pass(4999)
  t.same(openOf(links).length, 2)
  await pass(1)
  t.same(openOf(links).length, 1)
  // What it was sent may still run, so the server is asked.
  await pass(1000)
  const looks = looksOf(links)
  t.equal(looks.length, 1)
  looks[0]?.answer('')
  await pass(3000)
  t.equal(looksOf(links).length, 1)
  opened.prepare = async () => {}
  await begun('it')
  t.ok(attempts.length >= 2)
  t.equal(sentOf(links).filter((text) => text === 'it').length, 1)
})

void t.test('a connection that ends while it is examined is not used', async (t) => {
  const opened = await open(t)
  const { links, pass, events, begun } = opened
  opened.prepare = async (link) => link.cut()
  links[0]?.cut()
  await pass(50)
  t.same(events.slice(1), ['disconnected: db:1', 'error: the connection ended'])
  opened.prepare = async () => {}
  await pass(100)
  t.equal(events.at(-1), 'connected: db:1')
  await begun('it')
  t.same(textsOf(links.at(-1)), ['it'])
})

void t.test('the server is asked every second which late statements still run', async (t) => {
  const { links, pass, grow, run, fake, attempts } = await open(t)
  await grow(3)
  const reply = run('slow')
  await pass(TIMEOUT)
  t.match(await reply, { ...APPLIED, message: 'no answer from PostgreSQL: timed out' })
  await pass(999)
  t.equal(looksOf(links).length, 0)
  await pass(1)
  const [look] = looksOf(links)
  t.same(look?.args.slice(1), [links[0]?.options?.comment.slice(0, -'1 */ '.length)])
  look?.answer('1 2')
  await pass(1000)
  t.same(openOf(links), [1, 2, 3])
  t.equal(looksOf(links).length, 2)
  // The server reports nothing at all.
  looksOf(links)[1]?.answer(null)
  await pass(1000)
  t.same(openOf(links), [1, 2, 3])
  looksOf(links)[2]?.rows([looksOf(links)[2]?.args[0] as string])
  await pass(1000)
  t.same(openOf(links), [1, 2, 3])
  looksOf(links)[3]?.fail('42501')
  await pass(1000)
  t.equal(looksOf(links).length, 5, 'a failure is no answer')
  looksOf(links)[4]?.answer('12 2')
  await fake.settled()
  t.same(openOf(links), [2, 3], 'its answer was lost')
  await pass(3000)
  t.equal(looksOf(links).length, 5)
  t.equal(attempts.length, 3)
})

void t.test('a connection that has answered while the server is asked is kept', async (t) => {
  const { links, pass, grow, run, fake, begun } = await open(t)
  await grow(3)
  void run('slow')
  void run('slower')
  await pass(TIMEOUT)
  await pass(1000)
  const [look] = looksOf(links)
  links[0]?.sent[0]?.answer()
  links[1]?.sent[0]?.answer()
  await begun('next')
  t.same(textsOf(links[0]), ['slow', 'next'])
  look?.answer('')
  await fake.settled()
  t.same(openOf(links), [1, 2, 3])
  links[0]?.sent[1]?.answer()
  await pass(3000)
  t.equal(looksOf(links).length, 1)
})

void t.test('an answer that comes with the timeout counts', async (t) => {
  const { links, pass, attempts, ends, begun } = await open(t)
  await begun('it')
  setTimeout(() => links[0]?.sent[0]?.answer('x'), TIMEOUT)
  await pass(TIMEOUT)
  t.same(ends, ['it: x'])
  await begun('next')
  t.same(textsOf(links[0]), ['it', 'next'])
  links[0]?.sent[1]?.answer()
  await pass(5000)
  t.equal(attempts.length, 1)
})

void t.test('an answer that makes a statement late gives a connection back that was given up', async (t) => {
  const { links, pass, run, fake, attempts, events, lanes, begun, refused } = await open(t)
  void run('slow')
  await pass(TIMEOUT)
  fake.accepts = false
  lanes.recheck()
  await refused(attempts.at(-1), 'refused')
  t.match(await run('it'), { ...NOT_APPLIED, message: /not connected: refused/ })
  links[0]?.sent[0]?.answer()
  t.same(events.slice(-2), ['error: refused', 'connected: db:1'])
  await begun('again')
  t.equal(links[0]?.sent.at(-1)?.text, 'again')
})

void t.test('at most fourteen statements may hang; reads go on', async (t) => {
  const { links, pass, run, fake, events, attempts, begun, looked } = await open(t)
  const isHanging = () => events.some((event) => event.includes('does not finish'))
  let claims = 0
  while (claims < 14) {
    t.notOk(isHanging())
    const count = Math.min(6, 14 - claims)
    for (let n = 0; n < count; n++) await begun(`claim ${++claims}`)
    await looked()
    t.equal(sentOf(links).filter((text) => text.startsWith('claim')).length, claims)
    await pass(TIMEOUT)
    await looked()
  }
  t.match(events.at(-1), /^error: PostgreSQL does not finish/)
  t.match(await run('more'), { ...NOT_APPLIED, message: /does not finish/ })
  t.ok((await run('more', 'urgent')) instanceof PartlyUnavailable)
  await begun('read', 'local')
  await looked()
  t.equal(sentOf(links).filter((text) => text === 'read').length, 1)
  t.ok(attempts.length <= 16)
  const { length } = events
  links[0]?.sent.find(({ text }) => text.startsWith('claim'))?.answer()
  await fake.settled()
  await begun('claim 15', 'urgent')
  await pass(TIMEOUT)
  await looked()
  t.equal(events.length, length + 1, 'it is reported whenever it begins')
})

void t.test('reads do not count among the fourteen statements that may hang', async (t) => {
  const { links, pass, run, fake, looked, late } = await open(t)
  for (let round = 0; round < 2; round++) await late(6)
  void run('read', 'local')
  await looked()
  await pass(1)
  void run('a')
  await looked()
  void run('b')
  void run('u', 'urgent')
  void run('v', 'urgent')
  await looked()
  const sent = () => sentOf(links).filter((text) => /^(?:\w|read)$/.test(text))
  t.same(sent().sort(), ['a', 'read', 'u'], 'a was sent before the outcomes came')
  const [first, second] = links.flatMap(({ sent }) => sent.filter(({ text }) => text === 'late'))
  first?.answer()
  await looked()
  t.same(sent().sort(), ['a', 'read', 'u', 'v'])
  second?.answer()
  await looked()
  t.same(sent().sort(), ['a', 'b', 'read', 'u', 'v'])
  await fake.settled()
})

void t.test('what conflicts is sent again, four times at most, unless it is late', async (t) => {
  const { links, pass, run, lanes, fake } = await open(t)
  const reply = run('it')
  for (let n = 0; n < 4; n++) {
    await fake.settled()
    t.equal(links[0]?.sent.length, n + 1)
    links[0]?.sent[n]?.fail('40001')
  }
  t.match(await reply, { ...NOT_APPLIED, message: /40001/ })
  t.equal(links[0]?.sent.length, 4)
  t.equal(new Set(links[0]?.sent.map(({ args }) => args[0])).size, 1, 'under its number')
  const again = lanes.run('again', [])
  await fake.settled()
  links[0]?.sent[4]?.fail('40P01')
  links[0]?.sent[5]?.answer('x')
  t.same(await again, ['x'])
  const late = run('late')
  await pass(TIMEOUT)
  t.match(await late, APPLIED)
  links[0]?.sent[6]?.fail('40001')
  t.equal(links[0]?.sent.length, 7)
})

void t.test('before the first connection there is none', async (t) => {
  const { fake, lanes, attempts, run } = await open(t, { opens: false })
  fake.accepts = false
  const opening = lanes.open()
  t.match(await run('it'), { ...NOT_APPLIED, message: 'PostgreSQL is not connected: connecting' })
  attempts[0]?.accept()
  await opening
  void run('it')
})

void t.test('an error that only a person can fix ends everything, and is what opening reports', async (t) => {
  const opened = await open(t, { opens: false })
  const { fake, lanes, links, run, pass, attempts } = opened
  opened.failure = new StoreUnavailable('of a later release', false)
  await t.rejects(lanes.open(), opened.failure)
  t.equal(fake.timers(), 0)
  await fake.settled()
  t.same(openOf(links), [])
  t.match(await run('it'), { message: 'PostgreSQL is not connected: closed' })
  await pass(20_000)
  t.equal(attempts.length, 1)
})

void t.test('closing refuses what waits, and leaves neither connections nor timers', async (t) => {
  const { fake, lanes, links, run, pass, attempts, events, refused, looked } = await open(t)
  const slow = run('slow')
  await pass(TIMEOUT)
  t.match(await slow, APPLIED)
  for (let n = 0; n < 3; n++) void run('sent')
  await looked()
  fake.accepts = false
  const waiting = [run('waits'), run('waits', 'local'), run('waits', 'urgent')]
  for (let n = 0; n < 3; n++) waiting.push(run('waits', 'local'))
  await fake.settled()
  await refused(attempts.at(-1), 'no room')
  const { length } = events
  const ending = lanes.close()
  const isEnded = settling(ending)
  for (const error of await Promise.all(waiting.slice(0, 3)))
    t.match(error, { ...NOT_APPLIED, message: 'PostgreSQL is not connected: closed' })
  t.notOk(isEnded(), 'not before its connections')
  await ending
  t.same(openOf(links), [])
  t.equal(fake.timers(), 0)
  lanes.recheck()
  t.match(await run('it', 'local'), { ...NOT_APPLIED, message: 'PostgreSQL is not connected: closed' })
  const { length: before } = attempts
  await pass(30_000)
  t.same([attempts.length, events.length], [before, length])
})

void t.test('a connection that is made at the end is closed', async (t) => {
  const { fake, lanes, links, pass, attempts, events } = await open(t)
  fake.accepts = false
  lanes.recheck()
  await fake.settled()
  await lanes.close()
  attempts[1]?.accept()
  await fake.settled()
  t.equal(fake.timers(), 0)
  await pass(1000)
  t.same(openOf(links), [])
  lanes.recheck()
  t.equal(attempts.length, 2)
  t.equal(events.length, 1)
})

void t.test('there are sixteen connections at most, lost ones that still work among them', async (t) => {
  const { links, pass, attempts, events, looked, late } = await open(t)
  for (const count of [6, 6, 2]) await late(count)
  const isLate = () => links.filter((link) => !link.isOver && isBusy(link)).length
  while (isLate() < 16) await late(1, 'local')
  t.equal(openOf(links).length, 16)
  for (const rest of [16, 15]) {
    const { length } = attempts
    await pass(1000)
    await looked()
    t.ok(attempts.length > length, 'one more is tried, which may find out that the others never will answer')
    t.equal(openOf(links).length, rest)
    links.find((link) => isBusy(link) && !link.isOver)?.cut()
    await looked()
  }
  t.match(events.at(-1), /^error: PostgreSQL does not finish .* is missing$/)
})

void t.test('where there are sixteen, a statement waits for one of those that answer', async (t) => {
  const { links, run, attempts, looked, late } = await open(t)
  for (const count of [6, 6, 2]) await late(count)
  await late(1, 'local')
  const busy = () => links.filter((link) => !link.isOver && isBusy(link))
  t.equal(busy().length, 15)
  busy()[0]?.cut()
  void run('first', 'local')
  await looked()
  t.equal(openOf(links).length, 15)
  const { length } = attempts
  void run('second', 'local')
  await looked()
  t.equal(attempts.length, length)
  const [answering] = links.filter(({ sent }) => sent.at(-1)?.text === 'first')
  answering?.sent.at(-1)?.answer()
  t.equal(answering?.sent.at(-1)?.text, 'second')
})

void t.test('a reply to another statement is not believed, and ends the connection', async (t) => {
  const { links, run, fake, pass } = await open(t)
  for (const [n, row] of [['0', 'x'], [null], undefined].entries()) {
    const reply = run('it')
    await fake.settled()
    if (row === undefined) links[n]?.sent[0]?.rows()
    else links[n]?.sent[0]?.rows(row)
    t.match(await reply, { ...APPLIED, message: /replies do not match their statements/ })
    await fake.settled()
    t.same(openOf(links), [])
    await pass(50)
    t.same(openOf(links), [n + 2])
  }
})

void t.test('a refusal keeps the connection; an uncertain outcome does not, and is kept', async (t) => {
  const { links, run, fake, pass, grow, events } = await open(t)
  await grow(2)
  const refused = run('refused')
  await fake.settled()
  links[0]?.sent[0]?.fail('22012')
  t.match(await refused, NOT_APPLIED)
  t.same(openOf(links), [1, 2])
  const uncertain = run('uncertain')
  await fake.settled()
  links[0]?.sent[1]?.fail('57P01')
  t.match(await uncertain, APPLIED)
  await fake.settled()
  t.same(openOf(links), [2])
  await pass(999)
  t.equal(looksOf(links).length, 0)
  await pass(1)
  looksOf(links)[0]?.answer('1')
  await pass(1000)
  t.equal(looksOf(links).length, 2, 'it still runs')
  looksOf(links)[1]?.answer('2')
  await pass(3000)
  t.equal(looksOf(links).length, 2)
  t.same(events, ['connected: db:1'])
})

void t.test('what a lost connection was sent is not forgotten', async (t) => {
  const { links, run, fake, pass, grow } = await open(t)
  await grow(2)
  const lost = run('lost')
  await fake.settled()
  links[0]?.cut()
  t.match(await lost, APPLIED)
  // Nothing was sent on this one.
  await pass(1000)
  t.equal(looksOf(links).length, 1)
  // Even this is not reported: it must not count forever.
  looksOf(links)[0]?.answer(null)
  await pass(3000)
  t.equal(looksOf(links).length, 1)
})

void t.test('a new connection is told first which statements are lost', async (t) => {
  const opened = await open(t)
  const { links, run, fake, pass, begun } = opened
  const lost = run('lost')
  await fake.settled()
  links[0]?.cut()
  t.match(await lost, APPLIED)
  t.same(opened.events, ['connected: db:1', 'disconnected: db:1'])
  await pass(50)
  const [look] = looksOf(links)
  t.same(look?.args, ['0', links[0]?.options?.comment.slice(0, -'1 */ '.length)])
  look?.rows(['0', '2'])
  await fake.settled()
  t.equal(opened.ups, 2)
  await begun('next')
  t.equal(links[1]?.sent[1]?.text, 'next')
  links[1]?.sent[1]?.answer()
  // The look that was planned before.
  await pass(1000)
  looksOf(links)[1]?.answer('')
  await pass(3000)
  t.equal(looksOf(links).length, 2)
})

void t.test('a server that has become a standby is left, but for what waits for an answer', async (t) => {
  const { links, run, fake, pass, grow, begun } = await open(t)
  await grow(3)
  const refused = run('refused')
  await begun('slow')
  links[0]?.sent[0]?.fail('IP001')
  t.match(await refused, NOT_APPLIED)
  await fake.settled()
  t.same(openOf(links), [2])
  links[1]?.sent[0]?.fail('22012')
  await fake.settled()
  t.same(openOf(links), [2], 'another failure is no such sign')
  await begun('again')
  links[1]?.sent[1]?.fail('IP001')
  await fake.settled()
  t.same(openOf(links), [])
  await pass(50)
  t.same(openOf(links), [4])
})

void t.test('of more than eight idle connections some are closed', async (t) => {
  const { links, looked, late } = await open(t)
  for (let round = 0; round < 2; round++) await late(5)
  const sent = links.flatMap(({ sent }) => sent.filter(({ text }) => text === 'late'))
  t.equal(sent.length, 10)
  for (const one of sent) one.answer()
  await looked()
  t.equal(openOf(links).length, 8)
})

void t.test('an answer does not bring an abandoned connection back', async (t) => {
  const opened = await open(t)
  const { links, run, fake, lanes, events } = opened
  const left = run('left')
  await fake.settled()
  opened.identity = { system: '1', timeline: 2 }
  fake.accepts = false
  lanes.recheck()
  const [first] = links
  opened.attempts[1]?.accept()
  await fake.settled()
  t.same(openOf(links), [2])
  t.match(await left, APPLIED)
  t.same(events.slice(1), [
    'error: PostgreSQL has failed over (timeline 2): connections to the old primary are closed',
  ])
  t.equal(opened.ups, 2)
  t.equal(first?.isOver, true)
  await opened.pass(3000)
  t.equal(looksOf(links).length, 0, 'what ran on it is nothing to the new one')
})

void t.test('the same server, or one that does not tell, changes nothing', async (t) => {
  const opened = await open(t)
  const { links, fake, lanes, events } = opened
  for (const identity of [{ system: '1', timeline: 1 }, null, { system: '1', timeline: 1 }]) {
    opened.identity = identity
    lanes.recheck()
    await fake.settled()
  }
  t.same(openOf(links), [1, 2, 3, 4])
  t.same([events.length, opened.ups], [1, 1])
})

void t.test('an old primary and a stranger are refused, and the reason is said once', async (t) => {
  const opened = await open(t)
  const { links, fake, lanes, events, pass } = opened
  opened.identity = { system: '1', timeline: 3 }
  lanes.recheck()
  await fake.settled()
  t.same(openOf(links), [2])
  for (const [identity, event] of [
    [
      { system: '1', timeline: 2 },
      'error: the server is an old primary: its timeline is 2, that of its successor 3',
    ],
    [
      { system: '2', timeline: 4 },
      'error: the name points to a different server while the one in use still answers: with two, each key could be claimed twice',
    ],
  ] as const) {
    opened.identity = identity
    for (let n = 0; n < 2; n++) {
      lanes.recheck()
      await fake.settled()
      t.same(openOf(links), [2])
      await pass(1000)
    }
    t.equal(events.at(-1), event)
  }
  t.equal(events.length, 4)
  t.equal(opened.ups, 2)
})

void t.test('a stranger is accepted once nobody is in use', async (t) => {
  const opened = await open(t)
  const { links, pass, events, run, looked } = opened
  opened.identity = { system: '1', timeline: 3 }
  opened.lanes.recheck()
  await pass(0)
  t.same(openOf(links), [2])
  // None is there.
  links[1]?.cut()
  opened.identity = { system: '2', timeline: 1 }
  await pass(50)
  t.same(openOf(links), [3])
  t.same(events.slice(2), ['disconnected: db:1', 'connected: db:1'])
  t.equal(opened.ups, 3)

  // One is silent.
  void run('silent')
  await pass(TIMEOUT)
  opened.identity = { system: '3', timeline: 1 }
  await pass(9 * TIMEOUT)
  t.ok(openOf(links).includes(3))
  for (let n = 0; n < 4; n++) {
    opened.lanes.recheck()
    await pass(TIMEOUT)
  }
  t.notOk(openOf(links).includes(3))
  t.equal(events.filter((event) => event.startsWith('error: PostgreSQL is a different server now')).length, 1)
  void run('next')
  await looked()
  t.equal(sentOf(links).filter((text) => text === 'next').length, 1)
})

void t.test('what waits for a connection in vain was not applied, and is not sent later', async (t) => {
  const { links, attempts, fake, pass, run, looked } = await open(t)
  const sent = run('sent')
  fake.accepts = false
  const waiting = (['plain', 'local', 'urgent'] as const).map((kind) => run(`waits, ${kind}`, kind))
  await pass(TIMEOUT)
  t.match(await sent, { ...APPLIED, message: 'no answer from PostgreSQL: timed out' })
  for (const one of waiting)
    t.match(await one, { ...NOT_APPLIED, message: 'PostgreSQL has no connection free: timed out' })
  void run('next')
  attempts[1]?.accept()
  await looked()
  t.same(
    sentOf(links).filter((text) => !text.startsWith('SELECT')),
    ['sent', 'next'],
  )
})

void t.test('an answer that comes after the end does not undo it', async (t) => {
  const { links, lanes, fake, run, events, ends, begun } = await open(t)
  void run('it')
  await begun('other')
  const ending = lanes.close()
  links[0]?.sent[0]?.answer('x')
  await ending
  t.same(ends, ['it: x', 'other failed'])
  t.equal(fake.timers(), 0)
  t.same(events, ['connected: db:1'])
  t.match(await run('next'), { ...NOT_APPLIED, message: 'PostgreSQL is not connected: closed' })
})

void t.test('what waits is refused as soon as there is no connection that could serve it', async (t) => {
  const { links, attempts, fake, pass, run, events } = await open(t)
  void run('slow')
  fake.accepts = false
  const first = run('waits')
  await fake.settled()
  links[0]?.cut('gone')
  t.match(await first, { ...NOT_APPLIED, message: 'PostgreSQL is not connected: gone' })
  t.same(events, ['connected: db:1', 'disconnected: db:1'])
  attempts[1]?.accept()
  await answerLooks(links, 0)

  void run('slow')
  await pass(TIMEOUT)
  const second = run('waits')
  await fake.settled()
  attempts.at(-1)?.refuse('refused')
  t.match(await second, { ...NOT_APPLIED, message: 'PostgreSQL is not connected: refused' })
  links[1]?.cut('gone, too')
  await fake.settled()
  t.same(events.slice(2), ['connected: db:1', 'error: refused'])
})

void t.test('a server that does not report what it runs is used all the same', async (t) => {
  const { links, fake, pass, run, begun } = await open(t)
  void run('slow')
  await pass(TIMEOUT)
  await begun('next')
  const [look] = looksOf(links)
  look?.rows(['0', null])
  await fake.settled()
  t.same(openOf(links), [1, 2])
  t.equal(links[1]?.sent.at(-1)?.text, 'next')
})
