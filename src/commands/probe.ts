import { readFileSync } from 'node:fs'
import { formatConfigError } from '../config/errors.ts'
import { whyUnreadable } from '../config/files.ts'
import { parseDuration, quote } from '../config/units.ts'
import { isLoopback } from '../config/urls.ts'
import { isFieldName, isFieldValue } from '../core/headers.ts'
import { type ExampleRequest, exampleOf } from '../describe/openapi/example.ts'
import { type DescribedOperation, operationsOf } from '../describe/openapi/operations.ts'
import { readDescription } from '../describe/openapi/read.ts'
import { BASELINE_REQUESTS, CASES, type Case, PROFILES } from '../probe/cases.ts'
import { type Counter, type HeaderLine, Prober, Stopped, type Template } from '../probe/prober.ts'
import { junitOf, type Report, rowsOf, runCases, summaryOf } from '../probe/run.ts'
import { otherThan } from '../probe/variants.ts'
import { type Args, type Command, FINDING, FINE, finding, type Io, usage } from './command.ts'
import { json, plain, table } from './terminal.ts'

const FORMATS: Readonly<Record<string, (report: Report) => string>> = {
  text: (report) => `${table(rowsOf(report))}${plain(summaryOf(report))}\n`,
  json,
  junit: junitOf,
}

export const probe: Command = {
  name: 'probe',
  usage: [
    'probe URL [--body TEXT] [--profile P] [--count-url URL] [--count-json POINTER]',
    'probe URL --openapi FILE --operation ID [--profile P] [--count-url URL] [--count-json POINTER]',
  ],
  about: [
    'tests from outside whether an API, behind this proxy or not, is safe to retry (docs/guides/probe.md).',
    'It executes requests; on another machine only with --yes. exit 1 if a case failed',
  ],
  takes: 'one URL',
  options: {
    profile: { value: 'P', help: `what is expected: ${PROFILES.join(', ')} (default ietf)` },
    method: { value: 'M', help: 'default POST' },
    header: { value: 'LINE', help: '"Name: value", or @FILE with such lines', repeated: true },
    body: { value: 'TEXT', help: 'payload, or @FILE; {uuid} in it is replaced anew for each key' },
    openapi: { value: 'FILE', help: 'makes the request from examples of this description; URL: the origin' },
    operation: { value: 'ID', help: 'its operationId, or "POST /path"' },
    'key-header': { value: 'NAME', help: 'default Idempotency-Key' },
    'count-url': { value: 'URL', help: 'GET shows how often the work was done' },
    'count-json': {
      value: 'POINTER',
      help: 'to the number, or to an array whose items count; alone, in GET URL',
    },
    'other-body': { value: 'TEXT', help: 'another payload (default: --body with another number or text)' },
    'error-body': { value: 'TEXT', help: 'a payload that the API refuses' },
    'failure-body': { value: 'TEXT', help: 'a payload on which it answers 5xx' },
    'other-caller': { value: 'LINE', help: 'header line of another caller' },
    'other-path': { value: 'PATH', help: 'another path that takes the payload' },
    case: { value: 'ID', help: 'only this one', repeated: true },
    timeout: { value: 'DURATION', help: 'of each response (default 30s)' },
    format: { value: 'F', help: `${Object.keys(FORMATS).join(', ')} (default text)` },
    'dry-run': { value: null, help: 'shows what would be sent; sends nothing' },
    yes: { value: null, help: 'for another machine' },
  },
  run: runProbe,
}

async function runProbe(args: Args, io: Io): Promise<number> {
  const profile = oneOf(args, 'profile', PROFILES, 'ietf')
  const format = oneOf(args, 'format', Object.keys(FORMATS), 'text')
  const timeout = parseDuration(args.text('timeout') ?? '30s')
  if (!timeout.ok) throw usage(`--timeout: ${timeout.message}`)
  if (timeout.value === 0) throw usage('--timeout: found 0; allowed: more than 0')
  const cases = casesOf(args.all('case'))
  const template = templateOf(args)
  const counter = counterOf(args, template.url)
  if (args.has('dry-run')) {
    io.out(plan(template, counter, cases))
    return FINE
  }
  if (!isLoopback(template.url.hostname.replace(/^\[|\]$/g, '')) && !args.has('yes'))
    throw usage(
      `${template.url.host} is not on this machine, and requests are executed for real: add --yes if they may be; --dry-run shows them`,
    )
  await using prober = new Prober(template, counter, profile === 'ietf', timeout.value)
  const show = (text: string): void => {
    if (io.isTerminal) io.err(`\r${text}\x1b[K`)
  }
  try {
    const report = await runCases(prober, cases, profile, show).finally(() => show(''))
    io.out((FORMATS[format] as (report: Report) => string)(report))
    return report.cases.some(({ verdict }) => verdict === 'failed') ? FINDING : FINE
  } catch (error) {
    if (error instanceof Stopped) throw finding(plain(error.message))
    throw error
  }
}

function oneOf<Name extends string>(
  args: Args,
  name: string,
  allowed: readonly Name[],
  byDefault: Name,
): Name {
  const text = args.text(name) ?? byDefault
  const found = allowed.find((one) => one === text)
  if (found === undefined) throw usage(`--${name}: found ${quote(text)}; allowed: ${allowed.join(', ')}`)
  return found
}

function casesOf(ids: readonly string[]): readonly Case[] {
  const unknown = ids.find((id) => !CASES.some((one) => one.id === id))
  if (unknown !== undefined)
    throw usage(`--case: found ${quote(unknown)}; allowed: ${CASES.map(({ id }) => id).join(', ')}`)
  return ids.length === 0 ? CASES : CASES.filter(({ id }) => ids.includes(id))
}

/** What would be sent. Values of headers may be secrets. */
function plan(template: Template, counter: Counter | null, cases: readonly Case[]): string {
  const { url, method, headers, keyHeader, body } = template
  const rows = cases.map((one) => {
    const lack = one.lacks?.(template) ?? null
    return { id: one.id, requests: lack === null ? one.requests : 0, asks: lack ?? one.asks }
  })
  const most = rows.reduce((sum, { requests }) => sum + requests, BASELINE_REQUESTS)
  const lines = headers.map(([name, value]) => `${name}: ${/^content-type$/i.test(name) ? value : '***'}`)
  return [
    ...[`${method} ${url.href}`, ...lines, `${keyHeader}: …`].map((line) => `${plain(line)}\n`),
    body === null ? '' : `\n${plain(body)}\n`,
    '\n',
    table([
      ['CASE', 'REQUESTS', 'SENT'],
      ['baseline', String(BASELINE_REQUESTS), 'two requests with keys of their own'],
      ...rows.map(({ id, requests, asks }) => [id, requests === 0 ? '' : String(requests), asks]),
    ]),
    counter === null ? '' : `before and after each the counter: GET ${plain(counter.url.href)}\n`,
    `at most ${most} requests to the API; nothing was sent\n`,
  ].join('')
}

/* The request, from the options. */

/** @throws {Exit} */
function templateOf(args: Args): Template {
  const [written] = args.positionals
  if (written === undefined) throw usage('probe needs the URL of the operation')
  const origin = urlOf('URL', written)
  const described = exampleRequest(args, origin)
  const url = new URL(described?.path ?? origin.href, origin)
  const headers = args.all('header').flatMap((text) => linesIn('header', text))
  const typed = headers.find(([name]) => name.toLowerCase() === 'content-type')?.[1]
  const body = textIn(args, 'body') ?? described?.body ?? null
  if (body === null && described?.mediaType != null)
    throw usage(`--operation: no JSON example can be made of its ${plain(described.mediaType)}; give --body`)
  const type = typed ?? described?.mediaType ?? 'application/json'
  const isJson = /^application\/(?:.*\+)?json\b/i.test(type)
  const otherBody = textIn(args, 'other-body') ?? (isJson ? otherThan(body) : null)
  if (isJson)
    for (const [name, text] of [
      ['body', body],
      ['other-body', otherBody],
    ] as const)
      checkJson(name, text)
  const caller = args.text('other-caller')
  const path = args.text('other-path')
  const otherUrl = path === undefined ? null : URL.parse(path, url.href)
  if (path !== undefined && (!path.startsWith('/') || otherUrl?.origin !== url.origin))
    throw usage(`--other-path: found ${quote(path)}; allowed: a path that begins with one /`)
  const keyHeader = args.text('key-header') ?? described?.keys[0]?.name ?? 'Idempotency-Key'
  if (!isFieldName(keyHeader))
    throw usage(`--key-header: found ${quote(keyHeader)}; allowed: the name of a header`)
  return {
    url,
    method: methodOf(args.text('method') ?? described?.method ?? 'POST'),
    headers: typed === undefined && body !== null ? [['Content-Type', type], ...headers] : headers,
    body,
    keyHeader,
    otherBody,
    errorBody: textIn(args, 'error-body'),
    failureBody: textIn(args, 'failure-body'),
    otherCaller: caller === undefined ? null : (linesIn('other-caller', caller)[0] as HeaderLine),
    otherUrl,
  }
}

/** @throws {Exit} */
function counterOf(args: Args, url: URL): Counter | null {
  const [at, pointer] = [args.text('count-url'), args.text('count-json') ?? null]
  if (pointer !== null && !/^(?:\/|$)/.test(pointer))
    throw usage(`--count-json: found ${quote(pointer)}; allowed: a JSON pointer, such as /total`)
  if (at === undefined && pointer === null) return null
  return { url: at === undefined ? url : urlOf('--count-url', at), pointer }
}

function urlOf(name: string, text: string): URL {
  const url = /^https?:\/\/[^/]/i.test(text) ? URL.parse(text) : null
  if (url === null || url.username !== '' || url.password !== '' || url.hash !== '')
    throw usage(
      `${name}: found ${quote(text)}; allowed: http://host:port/path or https://…, without credentials`,
    )
  return url
}

function methodOf(text: string): string {
  if (/^[A-Z]{3,20}$/.test(text)) return text
  throw usage(`--method: found ${quote(text)}; allowed: a method such as POST`)
}

/** The value of an option, or the content of the file that it names with `@`. */
function textOf(name: string, text: string): string {
  if (!text.startsWith('@')) return text
  try {
    return readFileSync(text.slice(1), 'utf8')
  } catch (error) {
    throw usage(
      `--${name}: found ${whyUnreadable(error)} at ${quote(text.slice(1))}; allowed: a readable file`,
    )
  }
}

function textIn(args: Args, name: string): string | null {
  const text = args.text(name)
  return text === undefined ? null : textOf(name, text)
}

/** The header lines in an option; at least one. */
function linesIn(option: string, text: string): HeaderLine[] {
  return textOf(option, text)
    .trim()
    .split(/\r?\n/)
    .map((line) => {
      const [, name = '', value = ''] = /^([^:]*):\s*(.*?)\s*$/.exec(line) ?? []
      // It may be a secret.
      if (!isFieldName(name) || !isFieldValue(value))
        throw usage(`--${option}: found no header line; allowed: "Name: value"`)
      return [name, value]
    })
}

function checkJson(name: string, text: string | null): void {
  if (text === null) return
  try {
    JSON.parse(text)
  } catch {
    throw usage(
      `--${name}: found no JSON in ${quote(text)}; allowed: JSON, or any text with --header "Content-Type: …"`,
    )
  }
}

/** @throws {Exit} */
function exampleRequest(
  args: Args,
  origin: URL,
): (ExampleRequest & Pick<DescribedOperation, 'method' | 'keys'>) | null {
  const file = args.text('openapi')
  const wanted = args.text('operation')
  if (file === undefined && wanted === undefined) return null
  if (file === undefined || wanted === undefined)
    throw usage('found --openapi or --operation alone; allowed: both or none')
  if (origin.pathname !== '/' || origin.search !== '')
    throw usage(`URL: found ${quote(origin.href)} with --openapi; allowed: an origin, http://host:port`)
  const read = readDescription(file)
  if (!read.ok) throw finding(plain(read.errors.map(formatConfigError).join('; ')))
  const { found } = operationsOf(read.description)
  const names = ({ id, method, template }: DescribedOperation): string[] => [
    id ?? '',
    `${method} ${template}`,
  ]
  const operation = found.find((one) => names(one).includes(wanted))
  if (operation === undefined)
    throw usage(
      `--operation: found ${quote(wanted)}; allowed: ${plain(
        found
          .map((one) => names(one).find(Boolean))
          .slice(0, 20)
          .join(', '),
      )}`,
    )
  const made = exampleOf(read.description, operation)
  if (typeof made === 'string')
    throw usage(`--operation ${plain(wanted)}: ${plain(made)}; give the whole URL and --body`)
  return { ...made, method: operation.method, keys: operation.keys }
}
