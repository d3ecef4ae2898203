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
} from '../support/fake-lanes.ts'
import type { FakeLink } from '../support/fake-links.ts'

// When connections are made, dropped and asked for, at a time that the test passes.

void t.test('each connection has its number in what it sends, and says who it is', async (t) => {
  const { links, attempts, grow, events, ups } = await open(t)
  await grow(2)
  const [first, second] = links.map(({ options }) => options?.comment ?? '')
  t.match(first, /^\/\* idempotency-proxy [0-9a-f]{12} 1 \*\/ $/)
  t.equal(second, first?.replace(' 1 ', ' 2 '))
  t.equal(attempts.length, 2)
  t.same([events, ups], [['connected: db:1'], 1])
})

void t.test(
  'statements take idle connections; more are made up to eight, of which two are for outcomes',
  async (t) => {
    const { links, attempts, run, fake, pass } = await open(t)
    void run('a')
    await fake.settled()
    t.same(attempts.length, 1)
    for (const name of ['b', 'c', 'd', 'e', 'f', 'g', 'h']) {
      void run(name, name < 'e' ? 'plain' : 'local')
      await pass(1)
    }
    await fake.settled()
    t.same(sentOf(links), ['a', 'b', 'c', 'd', 'e', 'f'])
    for (const name of ['u', 'v', 'w']) void run(name, 'urgent')
    await fake.settled()
    t.same(sentOf(links), ['a', 'b', 'c', 'd', 'e', 'f', 'u', 'v'])
    links[7]?.sent[0]?.answer()
    await fake.settled()
    t.same(
      links[7]?.sent.map(({ text }) => text),
      ['v', 'w'],
    )
    links[7]?.sent[1]?.answer()
    await fake.settled()
    t.same(links[7]?.sent.length, 2, 'it is kept for outcomes')
    links[0]?.sent[0]?.answer()
    await fake.settled()
    t.same(sentOf(links).filter((text) => text === 'g').length, 1)
    t.equal(attempts.length, 8)
  },
)

void t.test('who has waited longest goes first, outcomes before all', async (t) => {
  const { links, run, fake, pass } = await open(t)
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
    links[0]?.sent.at(-1)?.answer()
    await fake.settled()
    order.push(links[0]?.sent.at(-1)?.text ?? '')
  }
  t.same(order, ['a', 'b', 'c', 'd', 'e', 'f'])
})

void t.test(
  'a connection may take two seconds, and longer and longer where the server is silent',
  async (t) => {
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
  },
)

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
  const { fake, links, attempts, pass, events, run } = await open(t)
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
      attempts.at(-1)?.refuse('refused')
      await fake.settled()
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
  const { fake, links, attempts, pass, lanes, run } = await open(t)
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
  attempts[2]?.refuse('refused')
  await fake.settled()
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
  void run('it')
  await fake.settled()
  t.same(sentOf(links), ['it'])
})

void t.test('while a connection is in use, a failed attempt is no reason for the next one', async (t) => {
  const { fake, links, attempts, pass, lanes, run, ends } = await open(t)
  void run('slow')
  await fake.settled()
  fake.accepts = false
  void run('waits')
  await fake.settled()
  attempts[1]?.refuse('no room')
  await fake.settled()
  void run('more')
  await fake.settled()
  t.equal(attempts.length, 2, 'not before its time')
  links[0]?.sent[0]?.answer()
  await fake.settled()
  links[0]?.sent[1]?.answer()
  await fake.settled()
  links[0]?.sent[2]?.answer()
  await pass(900)
  t.same(ends, ['slow: ', 'waits: ', 'more: '])
  t.equal(attempts.length, 2)
  lanes.recheck()
  t.equal(attempts.length, 3)
})

void t.test('a statement that waits for a connection gets one as soon as there may be one', async (t) => {
  const { fake, links, attempts, pass, run } = await open(t)
  void run('slow')
  fake.accepts = false
  void run('waits')
  await fake.settled()
  attempts[1]?.refuse('no room')
  await pass(50)
  t.equal(attempts.length, 3)
  attempts[2]?.accept()
  await fake.settled()
  t.same(sentOf(links), ['slow', 'waits'])
})

void t.test('every ten seconds an idle connection is made anew', async (t) => {
  const { fake, links, attempts, pass, grow, run, lanes } = await open(t)
  await grow(2)
  await pass(9999)
  t.equal(attempts.length, 2)
  await pass(1)
  t.same(openOf(links), [2, 3])
  void run('slow')
  await fake.settled()
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
  attempts[4]?.refuse('refused')
  await fake.settled()
  t.same(openOf(links), [2, 3, 4])
  await pass(9970)
  lanes.recheck()
  attempts[5]?.refuse('refused')
  await pass(40)
  t.equal(attempts.length, 6, 'none before its time')
  await pass(9990)
  t.equal(attempts.length, 7)
  attempts[6]?.refuse('refused')
  await fake.settled()
  t.same(openOf(links), [2, 3, 4], 'none goes where no other has come')
  await lanes.close()
  await pass(20_000)
  t.equal(attempts.length, 7)
})

void t.test('a connection that does not tell who the server is ends after five seconds', async (t) => {
  const opened = await open(t)
  const { fake, links, attempts, pass, run, lanes } = opened
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
  void run('it')
  await fake.settled()
  t.ok(attempts.length >= 2)
  t.equal(sentOf(links).filter((text) => text === 'it').length, 1)
})

void t.test('a connection that ends while it is examined is not used', async (t) => {
  const opened = await open(t)
  const { links, pass, events, run, fake } = opened
  opened.prepare = async (link) => link.cut()
  links[0]?.cut()
  await pass(50)
  t.same(events.slice(1), ['disconnected: db:1', 'error: the connection ended'])
  opened.prepare = async () => {}
  await pass(100)
  t.equal(events.at(-1), 'connected: db:1')
  void run('it')
  await fake.settled()
  t.same(
    links.at(-1)?.sent.map(({ text }) => text),
    ['it'],
  )
})

void t.test(
  'the server is asked which late statements run, every second, as long as there are any',
  async (t) => {
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
  },
)

void t.test('a connection that has answered while the server is asked is kept', async (t) => {
  const { links, pass, grow, run, fake } = await open(t)
  await grow(3)
  void run('slow')
  void run('slower')
  await pass(TIMEOUT)
  await pass(1000)
  const [look] = looksOf(links)
  links[0]?.sent[0]?.answer()
  links[1]?.sent[0]?.answer()
  void run('next')
  await fake.settled()
  t.same(
    links[0]?.sent.map(({ text }) => text),
    ['slow', 'next'],
  )
  look?.answer('')
  await fake.settled()
  t.same(openOf(links), [1, 2, 3])
  links[0]?.sent[1]?.answer()
  await pass(3000)
  t.equal(looksOf(links).length, 1)
})

void t.test('late answers give their connections back, but for those that are not needed', async (t) => {
  const { pass, run, fake, attempts } = await open(t)
  for (let n = 0; n < 6; n++) void run('early')
  await pass(TIMEOUT - 100)
  void run('later')
  await fake.settled()
  t.equal(attempts.length, 6)
  await pass(100)
  t.equal(attempts.length, 7, 'what waits goes on at once')
})

void t.test('an answer that comes with the timeout counts', async (t) => {
  const { links, pass, run, fake, attempts, ends } = await open(t)
  void run('it')
  await fake.settled()
  setTimeout(() => links[0]?.sent[0]?.answer('x'), TIMEOUT)
  await pass(TIMEOUT)
  t.same(ends, ['it: x'])
  void run('next')
  await fake.settled()
  t.same(
    links[0]?.sent.map(({ text }) => text),
    ['it', 'next'],
  )
  links[0]?.sent[1]?.answer()
  await pass(5000)
  t.equal(attempts.length, 1)
})

void t.test('an answer that makes a statement late gives a connection back that was given up', async (t) => {
  const { links, pass, run, fake, attempts, events, lanes } = await open(t)
  void run('slow')
  await pass(TIMEOUT)
  fake.accepts = false
  lanes.recheck()
  attempts.at(-1)?.refuse('refused')
  await fake.settled()
  t.match(await run('it'), { ...NOT_APPLIED, message: /not connected: refused/ })
  links[0]?.sent[0]?.answer()
  t.same(events.slice(-2), ['error: refused', 'connected: db:1'])
  void run('again')
  await fake.settled()
  t.equal(links[0]?.sent.at(-1)?.text, 'again')
})

void t.test('at most fourteen statements may hang; reads go on', async (t) => {
  const { links, pass, run, fake, events, attempts } = await open(t)
  const isHanging = () => events.some((event) => event.includes('does not finish'))
  let claims = 0
  while (claims < 14) {
    t.notOk(isHanging())
    const count = Math.min(6, 14 - claims)
    for (let n = 0; n < count; n++) void run(`claim ${++claims}`)
    await fake.settled()
    await answerLooks(links)
    t.equal(sentOf(links).filter((text) => text.startsWith('claim')).length, claims)
    await pass(TIMEOUT)
    await answerLooks(links)
  }
  t.match(events.at(-1), /^error: PostgreSQL does not finish/)
  t.match(await run('more'), { ...NOT_APPLIED, message: /does not finish/ })
  t.ok((await run('more', 'urgent')) instanceof PartlyUnavailable)
  void run('read', 'local')
  await fake.settled()
  await answerLooks(links)
  t.equal(sentOf(links).filter((text) => text === 'read').length, 1)
  t.ok(attempts.length <= 16)
  const { length } = events
  links[0]?.sent.find(({ text }) => text.startsWith('claim'))?.answer()
  await fake.settled()
  void run('claim 15', 'urgent')
  await fake.settled()
  await pass(TIMEOUT)
  await answerLooks(links)
  t.equal(events.length, length + 1, 'it is reported whenever it begins')
})

void t.test('reads do not count among the fourteen statements that may hang', async (t) => {
  const { links, pass, run, fake } = await open(t)
  const answered = () => answerLooks(links)
  for (let round = 0; round < 2; round++) {
    for (let n = 0; n < 6; n++) void run('claim')
    await answered()
    await pass(TIMEOUT)
    await answered()
  }
  void run('read', 'local')
  await answered()
  await pass(1)
  void run('a')
  await answered()
  void run('b')
  void run('u', 'urgent')
  void run('v', 'urgent')
  await answered()
  const sent = () => sentOf(links).filter((text) => /^(?:\w|read)$/.test(text))
  t.same(sent().sort(), ['a', 'read', 'u'], 'a was sent before the outcomes came')
  const late = links.find(({ sent }) => sent.some(({ text }) => text === 'claim'))
  late?.sent.find(({ text }) => text === 'claim')?.answer()
  await answered()
  t.same(sent().sort(), ['a', 'read', 'u', 'v'])
  const other = links.filter(({ sent }) => sent.some(({ text }) => text === 'claim'))[1]
  other?.sent.find(({ text }) => text === 'claim')?.answer()
  await answered()
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
  const { fake, lanes, links, run, pass, attempts, events } = await open(t)
  const slow = run('slow')
  await pass(TIMEOUT)
  t.match(await slow, APPLIED)
  for (let n = 0; n < 3; n++) void run('sent')
  await answerLooks(links)
  fake.accepts = false
  const waiting = [run('waits'), run('waits', 'local'), run('waits', 'urgent')]
  for (let n = 0; n < 3; n++) waiting.push(run('waits', 'local'))
  await fake.settled()
  attempts.at(-1)?.refuse('no room')
  await fake.settled()
  const { length } = events
  let isEnded = false
  const ending = lanes.close().then(() => {
    isEnded = true
  })
  for (const error of await Promise.all(waiting.slice(0, 3)))
    t.match(error, { ...NOT_APPLIED, message: 'PostgreSQL is not connected: closed' })
  t.notOk(isEnded, 'not before its connections')
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
  const { links, pass, run, attempts, events } = await open(t)
  const answered = () => answerLooks(links, 40)
  for (const count of [6, 6, 2]) {
    for (let n = 0; n < count; n++) void run('claim')
    await answered()
    await pass(TIMEOUT)
    await answered()
  }
  const isLate = () => links.filter((link) => !link.isOver && isBusy(link)).length
  while (isLate() < 16) {
    void run('read', 'local')
    await answered()
    await pass(TIMEOUT)
    await answered()
  }
  t.equal(openOf(links).length, 16)
  for (const rest of [16, 15]) {
    const { length } = attempts
    await pass(1000)
    await answered()
    t.ok(attempts.length > length, 'one more is tried, which may find out that the others never will answer')
    t.equal(openOf(links).length, rest)
    links.find((link) => isBusy(link) && !link.isOver)?.cut()
    await answered()
  }
  t.match(events.at(-1), /^error: PostgreSQL does not finish .* is missing$/)
})

void t.test('where there are sixteen, a statement waits for one of those that answer', async (t) => {
  const { links, pass, run, attempts } = await open(t)
  const answered = () => answerLooks(links, 40)
  for (const count of [6, 6, 2, 1]) {
    for (let n = 0; n < count; n++) void run('late', n + count > 1 ? 'plain' : 'local')
    await answered()
    await pass(TIMEOUT)
    await answered()
  }
  const busy = () => links.filter((link) => !link.isOver && isBusy(link))
  t.equal(busy().length, 15)
  busy()[0]?.cut()
  void run('first', 'local')
  await answered()
  t.equal(openOf(links).length, 15)
  const { length } = attempts
  void run('second', 'local')
  await answered()
  t.equal(attempts.length, length)
  const [answering] = links.filter(({ sent }) => sent.at(-1)?.text === 'first')
  answering?.sent.at(-1)?.answer()
  t.equal(answering?.sent.at(-1)?.text, 'second')
})
