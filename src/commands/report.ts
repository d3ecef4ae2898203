import type { Report } from '../admin/report-schema.ts'
import { parseDuration, quote } from '../config/units.ts'
import { type Args, type Command, FINDING, FINE, finding, type Io, usage } from './command.ts'
import { printRefusal } from './record-source.ts'
import { asCsv, asMarkdown, asText, type Told, toldOf } from './report-text.ts'
import { readLogs, type ShadowReport, toldOfShadow } from './shadow-log.ts'
import { openSource, SOURCE_OPTIONS } from './target-options.ts'
import { json, plain } from './terminal.ts'

/** `value`: what programs get; `told`: the same for people. */
const FORMATS: Readonly<Record<string, (value: unknown, told: Told) => string>> = {
  text: (_, told) => asText(told),
  json,
  csv: (_, told) => asCsv(told),
  markdown: (_, told) => asMarkdown(told),
}

export const report: Command = {
  name: 'report',
  usage: [
    'report [--since 24h] [--format F] (--admin URL --token-file FILE [--sample N] | --config FILE | --store URL)',
    'report --log FILE [--since 24h] [--format F]',
  ],
  about: [
    'tells, for each route, what was executed, replayed and prevented, and what is unknown.',
    'Of a period: by the records that were created in it and their histories, as far as they are still kept.',
    'A running proxy also tells what it alone has counted since it started, and what shadow mode has seen.',
    'With --sample it asks the upstream anew; exit 1 where that disagrees.',
    'With --log: what enforce would have done in the period, by the lines that shadow mode has logged (docs/shadow.md);',
    'exit 1 where there is none.',
  ],
  options: {
    since: { value: 'DURATION', help: 'how long ago the period begins, such as 90m, 24h, 7d (default 24h)' },
    sample: {
      value: 'N',
      help: 'ask the upstream anew about N completed records, 1 to 1000, where `reconcile` says how',
    },
    log: {
      value: 'FILE',
      help: 'log of a proxy as JSON lines, - for standard input; of all replicas, each once',
      repeated: true,
    },
    format: { value: 'F', help: `${Object.keys(FORMATS).join(', ')} (default text)` },
    json: { value: null, help: 'the same as --format json' },
    ...SOURCE_OPTIONS,
  },
  run: runReport,
}

async function runReport(args: Args, io: Io): Promise<number> {
  if (args.positionals.length > 0)
    return usage(io, `report takes no argument, found ${args.positionals.length}`)
  if (args.has('json') && args.has('format'))
    return usage(io, 'found --json and --format; allowed: one of them')
  const name = args.has('json') ? 'json' : (args.text('format') ?? 'text')
  const format = Object.hasOwn(FORMATS, name) ? FORMATS[name] : undefined
  if (format === undefined)
    return usage(io, `--format: found ${quote(name)}; allowed: ${Object.keys(FORMATS).join(', ')}`)
  const files = args.all('log')
  const sample = args.text('sample')
  if (sample !== undefined && !args.has('admin'))
    return usage(io, 'found --sample without --admin URL: only a running proxy asks the upstream')
  if (files.length > 0) return reportOfLogs(files, args, io, format)
  const opened = await openSource(args, io)
  if (!opened.ok) return opened.code
  await using source = opened.value
  const since = args.text('since')
  const query = { ...(since === undefined ? {} : { since }), ...(sample === undefined ? {} : { sample }) }
  const reply = await source.ask({ method: 'GET', path: '/v1/report', query })
  if (!reply.ok) return printRefusal(io, source, reply)
  const told = reply.body as Report
  io.out(format(told, toldOf(told)))
  return told.asked?.routes.some(({ disagreed }) => disagreed > 0) === true ? FINDING : FINE
}

/** What shadow mode has logged in the period: `--log`. */
async function reportOfLogs(
  files: readonly string[],
  args: Args,
  io: Io,
  format: (value: unknown, told: Told) => string,
): Promise<number> {
  const other = Object.keys(SOURCE_OPTIONS).find((name) => args.has(name))
  if (other !== undefined) return usage(io, `found --log and --${other}; allowed: one of them`)
  const text = args.text('since') ?? '24h'
  const since = parseDuration(text)
  if (!since.ok || since.value === 0)
    return usage(io, `--since: found ${quote(text)}; allowed: more than 0, such as 90m, 24h or 7d`)
  let report: ShadowReport
  try {
    report = await readLogs(files, since.value, Date.now())
  } catch (error) {
    return finding(io, plain((error as Error).message))
  }
  io.out(format(report, toldOfShadow(report)))
  return report.lines > 0
    ? FINE
    : finding(
        io,
        'found no line of shadow mode in that time: is it the log of a proxy with routes in mode shadow, as JSON lines, at log.level info?',
      )
}
