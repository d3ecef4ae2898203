import type { Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { type LinkOptions, PostgresLink, type SqlArg, type SqlRow } from '../../src/store/postgres-link.ts'

interface Sent {
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

interface Timer {
  readonly act: () => void
  readonly every: Millis | null
  at: Millis
}

/** Connections without a server, at a time that stands still but for {@link FakeLinks.pass}. */
export interface FakeLinks {
  readonly links: readonly FakeLink[]
  /** Attempts to connect. The test decides on each, unless {@link accepts}. */
  readonly attempts: {
    readonly timeoutMs: Millis | undefined
    accept(): FakeLink
    refuse(why: string): void
  }[]
  accepts: boolean
  pass(time: Millis): Promise<void>
  /** Whatever can happen without time. */
  settled(): Promise<void>
  /** That have not fired. */
  timers(): number
}

/** Until the end of the test, there are no others in this process. */
export function fakeLinks(t: Test): FakeLinks {
  const real = {
    setTimeout,
    setInterval,
    clearTimeout,
    clearInterval,
    now: performance.now,
    open: PostgresLink.open,
  }
  const immediately = setImmediate
  const timers = new Set<Timer>()
  let now = 1_000_000
  const plan = (every: boolean) => (act: () => void, delay: Millis) => {
    const timer = { act, at: now + delay, every: every ? delay : null, unref: () => timer, ref: () => timer }
    timers.add(timer)
    return timer
  }
  const forget = (otherwise: (timer: never) => void) => (timer: unknown) =>
    timers.has(timer as Timer) ? void timers.delete(timer as Timer) : otherwise(timer as never)
  Object.assign(globalThis, {
    setTimeout: plan(false),
    setInterval: plan(true),
    clearTimeout: forget(real.clearTimeout),
    clearInterval: forget(real.clearInterval),
  })
  performance.now = () => now
  t.teardown(() => {
    const { now, open, ...rest } = real
    Object.assign(globalThis, rest)
    performance.now = now
    PostgresLink.open = open
  })

  const links: FakeLink[] = []
  const self: FakeLinks = {
    links,
    attempts: [],
    accepts: true,
    async pass(time) {
      await self.settled()
      const end = now + time
      for (;;) {
        const next = Math.min(...[...timers].map(({ at }) => at))
        if (next > end) break
        now = next
        // As in a real loop, before whatever is for immediately after.
        for (const timer of [...timers].filter(({ at }) => at === next)) {
          if (!timers.has(timer)) continue
          if (timer.every === null) timers.delete(timer)
          else timer.at += timer.every
          timer.act()
        }
        await self.settled()
      }
      now = end
    },
    async settled() {
      for (let n = 0; n < 3; n++) await new Promise((next) => immediately(next))
    },
    timers: () => timers.size,
  }
  PostgresLink.open = (_address, onEnd, options) =>
    new Promise((resolve, reject) => {
      const attempt = {
        timeoutMs: options?.timeoutMs,
        accept() {
          const link = fakeLink(onEnd, options)
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

function fakeLink(onEnd: (why: string) => void, options: LinkOptions | undefined): FakeLink {
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
