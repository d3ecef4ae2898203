import type { Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { Lanes } from '../../src/store/postgres/lanes.ts'
import type { Identity } from '../../src/store/postgres/layout.ts'
import { type FakeLink, type FakeLinks, fakeLinks, type Sent } from './fake-links.ts'

export const TIMEOUT: Millis = 1000
export const APPLIED = { name: 'StoreUnavailable', maybeApplied: true }
export const NOT_APPLIED = { name: 'StoreUnavailable', maybeApplied: false }
type Kind = 'urgent' | 'plain' | 'local'

/** The connections for statements, on fakes that the test moves. */
export async function fakeLanes(t: Test, { grace = 0, timeoutMs = TIMEOUT, opens = true } = {}) {
  const fake = fakeLinks(t)
  const events: string[] = []
  const address = { host: 'db', port: 1, user: 'u', password: 'p', database: 'd', tls: null }
  const onEvent = (kind: string, detail: string) => void events.push(`${kind}: ${detail}`)
  const self = {
    fake,
    links: fake.links,
    attempts: fake.attempts,
    pass: fake.pass,
    events,
    ups: 0,
    identity: { system: '1', timeline: 1 } as Identity | null,
    /** Called with each new connection. */
    prepare: async (_link: FakeLink): Promise<void> => {},
    /** Instead of an identity. */
    failure: null as Error | null,
    ends: [] as string[],
  }
  const lanes = new Lanes(
    { address, timeoutMs, grace, onEvent },
    async (link) => {
      if (self.failure !== null) throw self.failure
      await self.prepare(link as unknown as FakeLink)
      return self.identity
    },
    () => void self.ups++,
  )
  t.teardown(() => lanes.close())
  /** How the statement ends goes to `ends`. */
  const run = (text: string, kind: Kind = 'plain'): Promise<unknown> =>
    lanes.run(text, ['a'], kind).then(
      (row) => self.ends.push(`${text}: ${row.join()}`),
      (error: Error) => {
        self.ends.push(`${text} failed`)
        return error
      },
    )
  const begun = (...args: Parameters<typeof run>): Promise<void> => {
    void run(...args)
    return fake.settled()
  }
  const answered = (sent: Sent | undefined): Promise<void> => {
    sent?.answer()
    return fake.settled()
  }
  const refused = (attempt: FakeLinks['attempts'][number] | undefined, why: string): Promise<void> => {
    attempt?.refuse(why)
    return fake.settled()
  }
  const looked = (): Promise<void> => answerLooks(fake.links)
  /** As many statements whose answers are late. */
  const late = async (count: number, kind: Kind = 'plain'): Promise<void> => {
    for (let n = 0; n < count; n++) void run('late', kind)
    await looked()
    await fake.pass(TIMEOUT)
    await looked()
  }
  /** As many connections, all idle. */
  const grow = async (count: number): Promise<void> => {
    const replies = Array.from({ length: count }, (_, n) => run('grow', n < 6 ? 'plain' : 'urgent'))
    await fake.settled()
    for (const link of fake.links) if (isBusy(link)) link.sent.at(-1)?.answer()
    await Promise.all(replies)
    self.ends.length = 0
    for (const link of fake.links) link.sent.length = 0
  }
  if (opens) await lanes.open()
  return Object.assign(self, { lanes, run, begun, answered, refused, looked, late, grow })
}

export const isBusy = (link: FakeLink): boolean => link.isBusy
export const isLook = ({ text }: { text: string }): boolean => text.includes('pg_stat_activity')
export const openOf = (links: readonly FakeLink[]): number[] =>
  links.flatMap(({ isOver }, n) => (isOver ? [] : [n + 1]))
export const sentOf = (links: readonly FakeLink[]): string[] =>
  links.flatMap(({ sent }) => sent.map(({ text }) => text))
export const textsOf = (link: FakeLink | undefined) => link?.sent.map(({ text }) => text)
export const looksOf = (links: readonly FakeLink[]) => links.flatMap(({ sent }) => sent.filter(isLook))

/** Answers whoever asks which statements run: those of the first connections. */
export async function answerLooks(links: readonly FakeLink[], running = 40): Promise<void> {
  for (let round = 0; round < 20; round++) {
    for (const link of links) {
      const last = link.sent.at(-1)
      if (isBusy(link) && last !== undefined && isLook(last))
        last.answer(Array.from({ length: running }, (_, n) => n + 1).join(' '))
    }
    await new Promise((next) => setImmediate(next))
  }
}
