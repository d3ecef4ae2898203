import { createRequire } from 'node:module'
import { type Logger, pino } from 'pino'
import type pretty from 'pino-pretty'
import type { Config } from '../config/config.ts'

export type { Logger }

/** JSON lines; for people where standard output is a terminal (contract §14). */
export function openLog(config: Config['log']): Logger {
  const forPeople = config.format === 'pretty' || (config.format === 'auto' && process.stdout.isTTY)
  const options = { level: config.level, base: null, timestamp: pino.stdTimeFunctions.isoTime }
  // Synchronous: a line must be out before a crash that it explains. Standard output may be full or gone: lines are then
  // lost, requests are not.
  const lines = pino.destination({ fd: 1, sync: true })
  lines.on('error', () => {})
  return forPeople
    ? pino(
        options,
        forPeopleToRead()({
          destination: lines,
          sync: true,
          colorize: process.stdout.isTTY,
          singleLine: true,
        }),
      )
    : pino({ ...options, formatters: { level: (level) => ({ level }) } }, lines)
}

/** Loaded where it is used: not in production. */
function forPeopleToRead(): typeof pretty {
  return createRequire(import.meta.url)('pino-pretty') as typeof pretty
}
