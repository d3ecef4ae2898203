import type { Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { type LinkOptions, PostgresLink, type SqlArg, type SqlRow } from '../../src/store/postgres/link.ts'
import { type FrozenClock, frozenClock } from './frozen-clock.ts'

export interface Sent {
  readonly text: string
  readonly args: readonly SqlArg[]
  /** With the number of the statement, as the functions of the schema do. */
  answer(...columns: readonly (string | null)[]): void
  rows(...rows: readonly SqlRow[]): void
  fail(code: string): void
}

/** A connection of {@link fakeLinks}. */
export interface FakeLink {
  readonly options: LinkOptions | undefined
  readonly isOver: boolean
  /** A statement waits for its answer. */
  readonly isBusy: boolean
  /** Statements, of which only the last one may be unanswered. */
  readonly sent: Sent[]
  ask(text: string): Promise<unknown>
  /** Something at the other end, or on the way. */
  cut(why?: string): void
}

/** Connections without a server, at a time that stands still but for {@link FakeLinks.pass}. */
export interface FakeLinks extends Pick<FrozenClock, 'pass' | 'settled' | 'timers'> {
  readonly links: readonly FakeLink[]
  /** Attempts to connect. The test decides on each, unless {@link accepts}. */
  readonly attempts: {
    readonly timeoutMs: Millis | undefined
    accept(): FakeLink
    refuse(why: string): void
  }[]
  accepts: boolean
  /** Called with each statement, as soon as nothing else is to be done. */
  onSent: (sent: Sent, link: FakeLink) => void
  /** Sends a notification on the connections that listen to the channel. */
  notify(channel: string, message: string): void
}

/** Until the end of the test, there are no others in this process. */
export function fakeLinks(t: Test): FakeLinks {
  const { open } = PostgresLink
  const { pass, settled, timers } = frozenClock(t)
  t.teardown(() => {
    PostgresLink.open = open
  })

  const links: ReturnType<typeof fakeLink>[] = []
  const self: FakeLinks = {
    links,
    attempts: [],
    accepts: true,
    onSent: () => {},
    notify(channel, message) {
      for (const { isOver, sent, heard } of links)
        if (!isOver && sent.some(({ text }) => text === `LISTEN ${channel}`)) heard(message)
    },
    pass,
    settled,
    timers,
  }
  PostgresLink.open = (_address, onEnd, options) =>
    new Promise((resolve, reject) => {
      const attempt = {
        timeoutMs: options?.timeoutMs,
        accept() {
          const link = fakeLink(onEnd, options, (sent) => self.onSent(sent, link))
          links.push(link)
          resolve(link as unknown as PostgresLink)
          return link
        },
        refuse: (why: string) => reject(new Error(why)),
      }
      self.attempts.push(attempt)
      if (self.accepts) attempt.accept()
    })
  return self
}

function fakeLink(
  onEnd: (why: string) => void,
  options: LinkOptions | undefined,
  onSent: (sent: Sent) => void,
) {
  let pending: ((error: Error | null, rows: readonly SqlRow[]) => void) | null = null
  const settle = (error: Error | null, rows: readonly SqlRow[]): void => {
    const done = pending
    pending = null
    done?.(error, rows)
  }
  const query = (text: string, args: readonly SqlArg[], done: NonNullable<typeof pending>): void => {
    if (pending !== null) throw new Error('two statements on one connection')
    pending = done
    const sent: Sent = {
      text,
      args,
      answer: (...columns) => sent.rows([String(args[0]), ...columns]),
      rows: (...rows) => settle(null, rows),
      fail: (code) => settle(Object.assign(new Error('because'), { code }), []),
    }
    link.sent.push(sent)
    queueMicrotask(() => onSent(sent))
    if (link.isOver) setImmediate(() => settle(new Error('the connection ended'), []))
  }
  const link = {
    options,
    isOver: false,
    get isBusy() {
      return pending !== null
    },
    sent: [] as Sent[],
    cut(why = 'cut') {
      if (link.isOver) return
      link.isOver = true
      settle(new Error(why), [])
      onEnd(why)
    },
    heard: (_message: string) => {},
    onNotification: (heard: (message: string) => void) => void (link.heard = heard),
    query,
    ask: (text: string, args: readonly SqlArg[] = []) =>
      new Promise<readonly SqlRow[]>((resolve, reject) =>
        query(text, args, (error, rows) => (error === null ? resolve(rows) : reject(error))),
      ),
    // Not at once, as with a real one.
    end: () => Promise.resolve().then(() => link.cut('ended')),
    destroy: () => queueMicrotask(() => link.cut('destroyed')),
  }
  return link
}
