import type { Report } from '../admin/report-schema.ts'
import { quote } from '../config/units.ts'
import { tellRefusal } from './asking.ts'
import { type Args, type Command, FINE, type Io, usage } from './command.ts'
import { json } from './plain.ts'
import { asCsv, asMarkdown, asText } from './report-text.ts'
import { openSource, WHERE } from './where.ts'

const FORMATS: Readonly<Record<string, (report: Report) => string>> = {
  text: asText,
  json,
  csv: asCsv,
  markdown: asMarkdown,
}

export const report: Command = {
  name: 'report',
  usage: ['report [--since 24h] [--format F] (--admin URL --token-file FILE | --config FILE | --store URL)'],
  about: [
    'tells, for each route, what was executed, replayed and prevented, and what is unknown.',
    'Of a period: by the records that were created in it and their histories, as far as they are still kept.',
    'A running proxy also tells what it alone has counted since it started.',
  ],
  options: {
    since: { value: 'DURATION', help: 'how long ago the period begins, such as 90m, 24h, 7d (default 24h)' },
    format: { value: 'F', help: `${Object.keys(FORMATS).join(', ')} (default text)` },
    json: { value: null, help: 'the same as --format json' },
    ...WHERE,
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
  const opened = await openSource(args, io)
  if (!opened.ok) return opened.code
  await using source = opened.value
  const since = args.text('since')
  const query = since === undefined ? {} : { since }
  const reply = await source.ask({ method: 'GET', path: '/v1/report', query })
  if (!reply.ok) return tellRefusal(io, source, reply)
  io.out(format(reply.body as Report))
  return FINE
}
