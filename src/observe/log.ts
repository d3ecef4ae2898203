import { constants, fstatSync, openSync, writeSync } from 'node:fs'
import { type Logger, pino } from 'pino'
import type { Config } from '../config/config.ts'
import type { Millis } from '../core/record.ts'
import type { AuditSink } from './audit.ts'
import { prettyLine } from './pretty.ts'

export type { Logger }

/** JSON lines, or readable ones if standard output is a terminal (contract §14). `worker`: its number, in every line. */
export function openLog(
  config: Config['log'],
  worker: number | null = null,
): { logger: Logger; output: LogOutput } {
  const isPretty = config.format === 'pretty' || (config.format === 'auto' && process.stdout.isTTY)
  const options = { level: config.level, base: worker === null ? null : { worker }, timestamp }
  const output = new LogOutput(1)
  const logger = pino(
    { ...options, formatters: { level: (level) => ({ level }) } },
    isPretty ? pretty(output) : output,
  )
  output.onResumed((dropped) =>
    logger.warn({ dropped }, 'log lines were dropped: standard output was full or not read'),
  )
  return { logger, output }
}

/**
 * Writes the line that `logger` would write for an object with these members, given as JSON that starts with a comma: pino's own way costs
 * twice as much, and every protected request has a line.
 */
export function writeLine(logger: Logger, level: 'info' | 'warn', members: string, message: string): void {
  if (!logger.isLevelEnabled(level)) return
  const { [pino.symbols.streamSym]: stream, [pino.symbols.chindingsSym]: bindings } =
    logger as unknown as Streaming
  stream.write(`{"level":"${level}"${timestamp()}${bindings}${members},"msg":"${message}"}\n`)
}

interface Streaming {
  /** Members of every line, as JSON that starts with a comma. */
  readonly [pino.symbols.chindingsSym]: string
  readonly [pino.symbols.streamSym]: { write(line: string): void }
}

/** The second of the last line, and its text up to the milliseconds: formatting a date costs a microsecond. */
let second = Number.NaN
let secondText = ''

/** Like `pino.stdTimeFunctions.isoTime`. */
function timestamp(): string {
  const now = Date.now()
  const past = now - second
  if (past >= 0 && past < 1000) return `${secondText}${PADDING[past < 10 ? 0 : past < 100 ? 1 : 2]}${past}Z"`
  second = now - (now % 1000)
  secondText = `,"time":"${new Date(second).toISOString().slice(0, -'000Z'.length)}`
  return timestamp()
}

const PADDING = ['00', '0', '']

/** Audit lines in the log, whatever its level. `output`: the log is their only place, so a line that cannot be written is refused. */
export function auditLog(logger: Logger, output: LogOutput | null): AuditSink {
  return (line) => {
    const write = (): void => logger.child({}, { level: 'info' }).info({ audit: line }, 'audit')
    if (output === null) write()
    else if (!output.writeNow(write))
      throw new Error('the log cannot be written: standard output is full or not read')
  }
}

function pretty(output: LogOutput): { write(line: string): void; flushSync(): boolean } {
  const colors = process.stdout.isTTY && !process.env['NO_COLOR']
  return { write: (line) => output.write(prettyLine(line, colors)), flushSync: () => output.flushSync() }
}

const { O_WRONLY, O_NONBLOCK, O_APPEND, O_NOCTTY } = constants

/** Bytes kept while nobody reads: a minute of a busy log, or a collector's restart. */
const MAX_KEPT = 1024 * 1024
/** PIPE_BUF of Linux: a write of up to this size is atomic, even beside other writers. */
const ONE_WRITE = 4096
/** Pause before a full or broken output is retried without a further line. */
const RETRY_AFTER: Millis = 100
/** How long the exit waits for a reader of the last lines. */
const LAST_LINES: Millis = 1000

/**
 * Writes log lines without ever blocking. Lines that cannot be written now (nobody reads the pipe, the disk is full) are kept up to a limit
 * and retried; beyond it, new lines are dropped and counted. The lines of one turn of the event loop are one write.
 */
export class LogOutput {
  readonly #fd: number
  #onResumed: (dropped: number) => void = () => {}
  /** Blocks of whole lines, oldest first. */
  #blocks: Buffer[] = []
  #kept = 0
  /** The first block is partly written. */
  #isTorn = false
  /** Lines of this turn, not yet in a block. */
  #turn = ''
  #flushing: NodeJS.Immediate | null = null
  #retry: NodeJS.Timeout | null = null
  #dropped = 0
  #unreported = 0

  constructor(fd: number) {
    this.#fd = nonBlocking(fd)
    // Also after an uncaught exception, which the last lines may explain.
    process.on('exit', () => this.#finish())
  }

  get dropped(): number {
    return this.#dropped
  }

  /** Called with the number of dropped lines once the output accepts lines again. */
  onResumed(report: (dropped: number) => void): void {
    this.#onResumed = report
  }

  write(line: string): void {
    if (this.#kept + this.#turn.length + line.length > MAX_KEPT) {
      this.#dropped++
      this.#unreported++
      return
    }
    if (this.#turn.length + line.length > ONE_WRITE) this.#seal()
    this.#turn += line
    this.#flushing ??= setImmediate(() => this.flushSync())
  }

  /** Whether everything is written. pino calls this after a fatal line. */
  flushSync(): boolean {
    if (this.#flushing !== null) clearImmediate(this.#flushing)
    this.#flushing = null
    this.#seal()
    if (!this.#writeBlocks()) {
      if (this.#retry !== null) return false
      this.#retry = setTimeout(() => {
        this.#retry = null
        this.flushSync()
      }, RETRY_AFTER).unref()
      return false
    }
    if (this.#unreported === 0) return true
    const dropped = this.#unreported
    this.#unreported = 0
    this.#onResumed(dropped)
    return this.flushSync()
  }

  /** Whether the one line that `log` writes was written immediately. If not, it never will be. */
  writeNow(log: () => void): boolean {
    if (!this.flushSync()) return false
    log()
    if (this.flushSync()) return true
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
        // Full (EAGAIN, ENOSPC), or nobody reads (EPIPE).
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
    while (!this.flushSync() && performance.now() < deadline) Atomics.wait(NEVER, 0, 0, 10)
  }
}

const NEVER = new Int32Array(new SharedArrayBuffer(4))

/**
 * O_NONBLOCK belongs to the open pipe, which other processes may share and change: Node itself clears it when it exits. So a pipe
 * or terminal is opened once more, for this process alone.
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
