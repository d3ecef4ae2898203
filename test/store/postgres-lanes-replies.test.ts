import t from 'tap'
import {
  APPLIED,
  answerLooks,
  looksOf,
  NOT_APPLIED,
  fakeLanes as open,
  openOf,
  sentOf,
  TIMEOUT,
} from '../support/fake-lanes.ts'

// What a reply, a failure or another server does to the connections, at a time that the test passes.

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

void t.test(
  'a refusal keeps the connection, an uncertain outcome does not, nor is it forgotten',
  async (t) => {
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
  },
)

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
  const { links, run, fake, pass } = opened
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
  void run('next')
  await fake.settled()
  t.equal(links[1]?.sent[1]?.text, 'next')
  links[1]?.sent[1]?.answer()
  // The look that was planned before.
  await pass(1000)
  looksOf(links)[1]?.answer('')
  await pass(3000)
  t.equal(looksOf(links).length, 2)
})

void t.test('a server that has become a standby is left, but for what waits for an answer', async (t) => {
  const { links, run, fake, pass, grow } = await open(t)
  await grow(3)
  const refused = run('refused')
  void run('slow')
  await fake.settled()
  links[0]?.sent[0]?.fail('IP001')
  t.match(await refused, NOT_APPLIED)
  await fake.settled()
  t.same(openOf(links), [2])
  links[1]?.sent[0]?.fail('22012')
  await fake.settled()
  t.same(openOf(links), [2], 'another failure is no such sign')
  void run('again')
  await fake.settled()
  links[1]?.sent[1]?.fail('IP001')
  await fake.settled()
  t.same(openOf(links), [])
  await pass(50)
  t.same(openOf(links), [4])
})

void t.test('of more than eight idle connections some are closed', async (t) => {
  const { links, run, pass } = await open(t)
  const answered = () => answerLooks(links)
  for (let round = 0; round < 2; round++) {
    for (let n = 0; n < 5; n++) void run('late')
    await answered()
    await pass(TIMEOUT)
    await answered()
  }
  const late = links.filter(({ sent }) => sent.some(({ text }) => text === 'late'))
  t.equal(late.length, 10)
  for (const link of late) link.sent.find(({ text }) => text === 'late')?.answer()
  await answered()
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
      'error: the name leads to a different server while the one in use still answers: with two, each key could be claimed twice',
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
  const { links, pass, events, run } = opened
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
  await answerLooks(links)
  t.equal(sentOf(links).filter((text) => text === 'next').length, 1)
})

void t.test('what was lost on one server is nothing to the next', async (t) => {
  const opened = await open(t)
  const { links, fake, pass, run } = opened
  void run('lost')
  await fake.settled()
  links[0]?.cut()
  opened.identity = { system: '1', timeline: 2 }
  await pass(50)
  t.equal(opened.ups, 2)
  t.equal(looksOf(links).length, 0)
})

void t.test('what waits for a connection in vain was not applied, and is not sent later', async (t) => {
  const { links, attempts, fake, pass, run } = await open(t)
  const sent = run('sent')
  fake.accepts = false
  const waiting = (['plain', 'local', 'urgent'] as const).map((kind) => run(`waits, ${kind}`, kind))
  await pass(TIMEOUT)
  t.match(await sent, { ...APPLIED, message: 'no answer from PostgreSQL: timed out' })
  for (const one of waiting)
    t.match(await one, { ...NOT_APPLIED, message: 'PostgreSQL has no connection free: timed out' })
  void run('next')
  attempts[1]?.accept()
  await answerLooks(links)
  t.same(
    sentOf(links).filter((text) => !text.startsWith('SELECT')),
    ['sent', 'next'],
  )
})

void t.test('an answer that comes after the end does not undo it', async (t) => {
  const { links, lanes, fake, run, events, ends } = await open(t)
  void run('it')
  void run('other')
  await fake.settled()
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

void t.test('a connection that is lost during an attempt adds no attempt', async (t) => {
  const { links, attempts, fake, pass, lanes } = await open(t)
  fake.accepts = false
  lanes.recheck()
  await fake.settled()
  links[0]?.cut()
  attempts[1]?.refuse('refused')
  await pass(50)
  t.equal(attempts.length, 3)
  attempts[2]?.refuse('refused')
  await pass(99)
  t.equal(attempts.length, 3)
  await pass(1)
  t.equal(attempts.length, 4)
})

void t.test('a server that does not report what it runs is used all the same', async (t) => {
  const { links, fake, pass, run } = await open(t)
  void run('slow')
  await pass(TIMEOUT)
  void run('next')
  await fake.settled()
  const [look] = looksOf(links)
  look?.rows(['0', null])
  await fake.settled()
  t.same(openOf(links), [1, 2])
  t.equal(links[1]?.sent.at(-1)?.text, 'next')
})

void t.test('as soon as lost statements have ended, others may hang in their place', async (t) => {
  for (const count of [13, 14])
    await t.test(`${count} lost`, async (t) => {
      const { links, fake, pass, run, events } = await open(t)
      for (let n = 0; n < count; n++) {
        void run('lost')
        await answerLooks(links)
        links.at(-1)?.cut()
        await pass(50)
        await answerLooks(links)
      }
      void run('read', 'local')
      if (count === 13) void run('a')
      else t.match(await run('a'), { ...NOT_APPLIED, message: /does not finish/ })
      await answerLooks(links)
      // One is idle.
      links
        .flatMap(({ sent }) => sent)
        .find(({ text }) => text === 'read')
        ?.answer()
      void run('b')
      await fake.settled()
      t.same(
        sentOf(links).filter((text) => /^[ab]$/.test(text)),
        count === 13 ? ['a'] : [],
      )
      t.equal(
        events.some((event) => event.includes('does not finish')),
        count === 14,
      )
      // A second after the first of them.
      await pass(400)
      await answerLooks(links, 0)
      if (count === 14) void run('b')
      await fake.settled()
      t.equal(sentOf(links).filter((text) => text === 'b').length, 1)
    })
})
