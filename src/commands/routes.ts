import { type ConfigError, Findings, formatConfigError } from '../config/errors.ts'
import { readDescriptorSet } from '../config/files.ts'
import { upstreamUrl } from '../config/urls.ts'
import { draftOfCalls } from '../describe/grpc.ts'
import { draftOf, draftText } from '../describe/openapi/draft.ts'
import { operationsOf, type Remark } from '../describe/openapi/operations.ts'
import { overlayOf } from '../describe/openapi/overlay.ts'
import { type Description, readDescription } from '../describe/openapi/read.ts'
import { type Args, type Command, Exit, FINDING, FINE, finding, type Io, usage } from './command.ts'
import { servingFlags, validConfig } from './configuration.ts'
import { plain } from './terminal.ts'

export const routes: Command = {
  name: 'routes',
  usage: [
    'routes from OPENAPI|DESCRIPTORS [--upstream URL]',
    'routes overlay OPENAPI --config FILE [--upstream URL]',
  ],
  about: [
    'from: drafts a configuration from an OpenAPI 3 description, YAML or JSON: a route for each operation that changes something,',
    'with the reasons as comments; DECIDE marks what you must decide; or from a gRPC descriptor set (.binpb, .pb, .desc,',
    '.protoset), for each method that neither streams nor says that it is idempotent. overlay: prints an OpenAPI Overlay 1.0.0 that documents',
    'the key, the replay headers and the responses of the proxy on each operation that the configuration protects.',
    'Omissions go to standard error. References to other files are not followed; nothing is fetched.',
    'exit 1 if the file cannot be read or has no such operation',
  ],
  takes: null,
  options: {
    upstream: {
      value: 'URL',
      help: 'where the service listens; from: written into the draft (default http://127.0.0.1:3000, to be edited)',
    },
    config: { value: 'FILE', help: 'overlay: the YAML configuration of the proxy' },
  },
  run: (args, io) => {
    const [way, file, ...more] = args.positionals
    if (way !== 'from' && way !== 'overlay')
      throw usage(
        `routes: found ${way === undefined ? 'nothing' : `"${plain(way)}"`}; allowed: from, overlay`,
      )
    if (file === undefined || more.length > 0)
      throw usage(`\`routes ${way}\` takes one file, found ${args.positionals.length - 1}`)
    if (way === 'overlay') return overlay(file, args, io)
    return DESCRIPTORS.test(file) ? draftCalls(file, args, io) : draft(file, args, io)
  },
}

/** How the files are named. */
const DESCRIPTORS = /\.(?:binpb|pb|desc|protoset)$/i

/** The URL of the service, for `from`. */
function upstreamOf(args: Args): string {
  if (args.has('config')) throw usage('`routes from` takes no --config')
  const upstream = upstreamUrl.parse(args.text('upstream') ?? 'http://127.0.0.1:3000')
  if (!upstream.ok) throw usage(`--upstream: ${upstream.message}`)
  return upstream.value
}

function draftCalls(file: string, args: Args, io: Io): number {
  const upstream = upstreamOf(args)
  const findings = new Findings(file)
  const descriptors = readDescriptorSet(findings, '', file)
  if (descriptors === null) throw new Exit(FINDING, errorText(findings.sorted()))
  const lines = draftOfCalls(descriptors, file, upstream)
  if (lines === null)
    throw finding(`${plain(file)}: found no method that changes anything (of ${descriptors.methods.size})`)
  io.out(lines.map((line) => `${plain(line)}\n`).join(''))
  return FINE
}

function draft(file: string, args: Args, io: Io): number {
  const upstream = upstreamOf(args)
  const description = read(file)
  const operations = operationsOf(description)
  printRemarks(io, file, operations.remarks)
  if (operations.found.length === 0)
    throw finding(`${plain(file)}: found no operation that changes anything (of ${operations.all})`)
  const lines = draftText(draftOf(description, operations), nameOf(file), upstream, operations.all)
  io.out(lines.map((line) => `${plain(line)}\n`).join(''))
  return FINE
}

function overlay(file: string, args: Args, io: Io): number {
  const config = args.text('config')
  if (config === undefined) throw usage('`routes overlay` needs --config FILE')
  const valid = validConfig(config, servingFlags(args), io.env)
  const description = read(file)
  const made = overlayOf(description, operationsOf(description), valid)
  printRemarks(io, file, made.remarks)
  if (made.document === null)
    throw finding(`${plain(file)}: found no operation that ${plain(config)} protects`)
  io.out(made.document)
  return FINE
}

function read(file: string): Description {
  const found = readDescription(file)
  if (found.ok) return found.description
  throw new Exit(FINDING, errorText(found.errors))
}

function errorText(errors: readonly ConfigError[]): string {
  return errors.map((error) => `${plain(formatConfigError(error))}\n`).join('')
}

/** Prints each remark once: several operations may refer to the same part. */
function printRemarks(io: Io, file: string, remarks: readonly Remark[]): void {
  const lines = remarks.map(({ line, message }) => `${file}${line > 0 ? `:${line}` : ''}: ${message}`)
  for (const line of new Set(lines)) io.err(`${plain(line)}\n`)
}

/** The file's name without its folders: drafts are committed. */
function nameOf(file: string): string {
  return file.slice(file.lastIndexOf('/') + 1)
}
