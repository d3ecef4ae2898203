import { type Logger, pino } from 'pino'
import type { Config } from '../config/config.ts'
import type { AuditSink } from './audit.ts'
import { LogOutput } from './log-output.ts'
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
