import { constants, fstatSync, openSync, writeSync } from 'node:fs'
import { type Logger, pino } from 'pino'
import type { Config } from '../config/config.ts'
import type { Millis } from '../core/record.ts'
import type { AuditSink } from './audit.ts'
import { prettyLine } from './pretty.ts'

export type { Logger }

export interface Log {
  readonly logger: Logger
  readonly output: LogOutput
}

/** JSON lines; for people where standard output is a terminal (contract §14). */
export function openLog(config: Config['log']): Log {
  const forPeople = config.format === 'pretty' || (config.format === 'auto' && process.stdout.isTTY)
  const options = { level: config.level, base: null, timestamp: pino.stdTimeFunctions.isoTime }
  const output = new LogOutput(1)
  const logger = pino(
    { ...options, formatters: { level: (level) => ({ level }) } },
    forPeople ? prettied(output) : output,
  )
  output.onResumed((dropped) =>
    logger.warn({ dropped }, 'log lines were dropped: nobody read standard output, or it was full'),
  )
  return { logger, output }
}

/**
 * Audit lines in the log, whatever its level.
 * @param output where the log is the only place for them: a line that does not leave is refused, and so is its change.
 */
export function auditLog(logger: Logger, output: LogOutput | null): AuditSink {
  return (line) => {
    const write = (): void => logger.child({}, { level: 'info' }).info({ audit: line }, 'audit')
    if (output === null) write()
    else if (!output.writeNow(write)) throw new Error('nobody reads the log, which takes no lines')
  }
}

function prettied(output: LogOutput): { write(line: string): void; flushSync(): void } {
  const colors = process.stdout.isTTY && !process.env['NO_COLOR']
  return { write: (line) => output.write(prettyLine(line, colors)), flushSync: () => output.flushSync() }
}

const { O_WRONLY, O_NONBLOCK, O_APPEND, O_NOCTTY } = constants

/** Lines kept while nobody reads: a minute of a busy log, or a collector's restart. */
const MOST_KEPT = 1024 * 1024
/** A pipe takes a write of up to this size (Linux's PIPE_BUF) whole or not at all, even beside other writers. */
const ONE_WRITE = 4096
/** How soon a full or broken output is tried again while no further line comes. */
const TRY_AGAIN: Millis = 100
/** How long the process waits at its end for somebody to read the last lines. */
const LAST_LINES: Millis = 1000

/**
 * Where log lines leave the process. Never blocks: what cannot be written now (nobody reads the pipe, the disk is full) is
 * kept up to a bound and tried again; beyond the bound, new lines are dropped and counted. The lines of one turn of the event
 * loop leave together.
 */
export class LogOutput {
  readonly #fd: number
  /** Called with the number of dropped lines once the output takes lines again. */
  #onResumed: (dropped: number) => void = () => {}
  /** Blocks of whole lines, oldest first; the first may have been written in part. */
  #blocks: Buffer[] = []
  #kept = 0
  #isTorn = false
  /** Lines of this turn, not yet in a block. */
  #turn = ''
  #flushing: NodeJS.Immediate | null = null
  #tryingAgain: NodeJS.Timeout | null = null
  #dropped = 0
  #untold = 0

  constructor(fd: number) {
    this.#fd = nonBlocking(fd)
    // Also after an uncaught exception, which the last lines may explain.
    process.on('exit', () => this.#finish())
  }

  /** Lines dropped so far. */
  get dropped(): number {
    return this.#dropped
  }

  onResumed(tell: (dropped: number) => void): void {
    this.#onResumed = tell
  }

  /** One whole line, as pino writes it. */
  write(line: string): void {
    if (this.#kept + this.#turn.length + line.length > MOST_KEPT) {
      this.#dropped++
      this.#untold++
      return
    }
    if (this.#turn.length + line.length > ONE_WRITE) this.#seal()
    this.#turn += line
    this.#flushing ??= setImmediate(() => this.flush())
  }

  /** pino calls this after a fatal line. */
  flushSync(): void {
    this.flush()
  }

  /** Whether everything is out. */
  flush(): boolean {
    if (this.#flushing !== null) clearImmediate(this.#flushing)
    this.#flushing = null
    this.#seal()
    if (!this.#writeBlocks()) {
      if (this.#tryingAgain !== null) return false
      this.#tryingAgain = setTimeout(() => {
        this.#tryingAgain = null
        this.flush()
      }, TRY_AGAIN).unref()
      return false
    }
    if (this.#untold === 0) return true
    const dropped = this.#untold
    this.#untold = 0
    this.#onResumed(dropped)
    return this.flush()
  }

  /** Whether the one line that `log` writes is out now. Where nothing of it is, it never leaves. */
  writeNow(log: () => void): boolean {
    if (!this.flush()) return false
    log()
    if (this.flush()) return true
    if (!this.#isTorn) {
      this.#blocks = []
      this.#kept = 0
    }
    return false
  }

  #seal(): void {
    if (this.#turn === '') return
    const block = Buffer.from(this.#turn)
    this.#blocks.push(block)
    this.#kept += block.length
    this.#turn = ''
  }

  #writeBlocks(): boolean {
    for (let block = this.#blocks[0]; block !== undefined; block = this.#blocks[0]) {
      let written: number
      try {
        written = writeSync(this.#fd, block)
      } catch {
        // Full (EAGAIN, ENOSPC), or nobody is there to read (EPIPE): the same from here.
        return false
      }
      this.#kept -= written
      this.#isTorn = written < block.length
      if (this.#isTorn) this.#blocks[0] = block.subarray(written)
      else this.#blocks.shift()
    }
    return true
  }

  #finish(): void {
    const deadline = performance.now() + LAST_LINES
    while (!this.flush() && performance.now() < deadline) Atomics.wait(NEVER, 0, 0, 10)
  }
}

const NEVER = new Int32Array(new SharedArrayBuffer(4))

/**
 * Whether writes to a pipe block belongs to the pipe's end, which other processes may share and change: Node itself makes it
 * block again when it exits. So a pipe or terminal is opened once more, for this process alone.
 */
function nonBlocking(fd: number): number {
  try {
    const found = fstatSync(fd)
    if (!found.isFIFO() && !found.isCharacterDevice()) return fd
    return openSync(`/proc/self/fd/${fd}`, O_WRONLY | O_NONBLOCK | O_APPEND | O_NOCTTY)
  } catch {
    // Another user's pipe, or no /proc: Node has made the descriptor non-blocking for `process.stdout`.
    return fd
  }
}
