import { readFileSync } from 'node:fs'
import { formatConfigError } from '../config/errors.ts'
import { whyUnreadable } from '../config/files.ts'
import { quote } from '../config/units.ts'
import { isFieldName, isFieldValue } from '../core/headers.ts'
import { type ExampleRequest, exampleOf } from '../describe/openapi/example.ts'
import { type DescribedOperation, operationsOf } from '../describe/openapi/operations.ts'
import { readDescription } from '../describe/openapi/read.ts'
import type { Counter, HeaderLine, Template } from '../probe/prober.ts'
import { otherThan } from '../probe/variants.ts'
import { type Args, finding, usage } from './command.ts'
import { plain } from './terminal.ts'

/** @throws {Exit} */
export function templateOf(args: Args): Template {
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
export function counterOf(args: Args, url: URL): Counter | null {
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
