import { parseArgs } from 'node:util'
import { didYouMean } from '../config/read.ts'
import { RECORD_ID } from '../core/record.ts'
import { plain } from './terminal.ts'

/** Exit codes (contract §11). A failure is a finding, too. */
export const FINE = 0
export const FINDING = 1
export const USAGE = 2

/** A command's view of its process. */
export interface Io {
  readonly out: (text: string) => void
  readonly err: (text: string) => void
  readonly env: Readonly<Record<string, string | undefined>>
  /** Asks the user at the terminal; null: no terminal. */
  readonly ask: ((prompt: string) => Promise<string>) | null
  /** Standard error is a terminal. */
  readonly isTerminal: boolean
}

export interface Option {
  /** Placeholder of its value in the help; null: a switch. */
  readonly value: string | null
  readonly help: string
  readonly repeated?: true
  readonly short?: string
}
export type CommandOptions = Readonly<Record<string, Option>>

/** The flags of `serve`; `check` and `policy` read a file as if it were served with them. */
export const SERVE_OPTIONS = {
  config: { value: 'FILE', help: 'YAML configuration' },
  upstream: { value: 'URL', help: 'the API behind it: http://, https:// or unix:/path' },
  listen: {
    value: 'ADDR',
    help: 'host:port for traffic; port 0 takes any free one (default 127.0.0.1:8080)',
  },
  store: {
    value: 'URL',
    help: 'memory:, sqlite:<path>, redis://, redis+sentinel://, redis+cluster://, postgres:// or dynamodb:// (default sqlite:./idempotency.db)',
  },
  service: {
    value: 'NAME',
    help: 'name of the protected service, such as payments; services that share a store share no records',
  },
} satisfies CommandOptions
export const SERVE_USAGE = Object.entries(SERVE_OPTIONS)
  .map(([name, { value }]) => `[--${name} ${value}]`)
  .join(' ')

export interface Command {
  readonly name: string
  /** One line per form of the command, without the name of the program. */
  readonly usage: readonly string[]
  readonly about: readonly string[]
  readonly options: CommandOptions
  /** Its one argument, such as `one file`; null: it checks its arguments itself; absent: it takes none. */
  readonly takes?: string | null
  /** It takes abbreviated ids, which may begin with a dash like whole ones. */
  readonly takesPrefixes?: true
  readonly run: (args: Args, io: Io) => Promise<number> | number
}

export class Args {
  readonly positionals: readonly string[]
  readonly #values: Readonly<Record<string, unknown>>

  constructor(positionals: readonly string[], values: Readonly<Record<string, unknown>>) {
    this.positionals = positionals
    this.#values = values
  }

  text(name: string): string | undefined {
    const value = this.#values[name]
    return typeof value === 'string' ? value : undefined
  }

  given<Name extends string>(names: readonly Name[]): Partial<Record<Name, string>> {
    const entries = names.map((name) => [name, this.text(name)] as const)
    return Object.fromEntries(entries.filter(([, value]) => value !== undefined)) as Partial<
      Record<Name, string>
    >
  }

  all(name: string): readonly string[] {
    return (this.#values[name] as string[] | undefined) ?? []
  }

  has(name: string): boolean {
    return this.#values[name] !== undefined
  }
}

const HELP: CommandOptions = { help: { value: null, help: 'prints this', short: 'h' } }

/** Ends a command; `dispatch` prints its message. */
export class Exit extends Error {
  readonly code: number

  constructor(code: number, text: string) {
    super(text)
    this.code = code
  }
}

export function usage(message: string): Exit {
  return new Exit(USAGE, `idempotency-proxy: ${message}\nTry --help.\n`)
}

export function finding(message: string): Exit {
  return new Exit(FINDING, `idempotency-proxy: ${message}\n`)
}

/** Runs a command after handling what all have in common: help, options, number of arguments. */
export async function run(command: Command, words: readonly string[], io: Io): Promise<number> {
  const ids = command.takesPrefixes === true ? PREFIX : RECORD_ID
  const parsed = parse({ ...command.options, ...HELP }, idsLast(words, ids))
  if (parsed.has('help')) {
    io.out(commandHelp(command))
    return FINE
  }
  const { name, takes } = command
  const [first] = parsed.positionals
  const found = parsed.positionals.length
  if (takes === undefined && first !== undefined)
    throw usage(`${name} takes no argument, found ${found}: ${plain(first)}`)
  if (typeof takes === 'string' && found > 1) throw usage(`${name} takes ${takes}, found ${found} arguments`)
  return command.run(parsed, io)
}

/** The beginning of an id. Two dashes begin an option unless they begin a whole id. */
const PREFIX = /^(?!--(?!.{41}$))[A-Za-z0-9_-]{8,43}$/

/** Moves ids after `--`: one in 64 begins with a dash, like an option. */
function idsLast(words: readonly string[], ids: RegExp): string[] {
  const end = words.indexOf('--')
  const before = end < 0 ? words : words.slice(0, end)
  const isId = (word: string): boolean => word.startsWith('-') && ids.test(word)
  return [
    ...before.filter((word) => !isId(word)),
    '--',
    ...before.filter(isId),
    ...(end < 0 ? [] : words.slice(end + 1)),
  ]
}

function parse(options: CommandOptions, words: readonly string[]): Args {
  try {
    const { positionals, values, tokens } = parseArgs({
      args: [...words],
      allowPositionals: true,
      tokens: true,
      options: Object.fromEntries(
        Object.entries(options).map(([name, { value, repeated, short }]) => [
          name,
          {
            type: value === null ? 'boolean' : 'string',
            multiple: repeated === true,
            ...(short === undefined ? {} : { short }),
          },
        ]),
      ),
    })
    const seen = tokens.flatMap((token) => (token.kind === 'option' ? [token.name] : []))
    const twice = seen.find((name, n) => options[name]?.repeated !== true && seen.indexOf(name) < n)
    if (twice !== undefined) throw usage(`--${twice} is given more than once; allowed: once`)
    return new Args(positionals, values)
  } catch (error) {
    if (error instanceof Exit) throw error
    const { code, message } = error as NodeJS.ErrnoException
    // Node's own text explains positional arguments.
    const [, unknown] =
      (code === 'ERR_PARSE_ARGS_UNKNOWN_OPTION' && /^Unknown option '(--?[^']*)'/.exec(message)) || []
    throw usage(unknown === undefined ? message : unknownOption(unknown, Object.keys(options)))
  }
}

function unknownOption(written: string, known: readonly string[]): string {
  const name = written.replace(/^-+/, '')
  const near = didYouMean(name === 'port' || name === 'host' ? 'listen' : name, known)
  return near === null
    ? `unknown option ${written}; allowed: ${known.map((name) => `--${name}`).join(', ')}`
    : `unknown option ${written}; did you mean --${near}?`
}

export function commandHelp({
  usage: ways,
  about,
  options,
}: Pick<Command, 'usage' | 'about' | 'options'>): string {
  const rows = Object.entries({ ...options, ...HELP }).map(([name, { value, help, repeated, short }]) => [
    `--${name}${value === null ? '' : ` ${value}`}${short === undefined ? '' : `, -${short}`}`,
    repeated === true ? `${help}; may be repeated` : help,
  ])
  const width = Math.max(...rows.map(([flag = '']) => flag.length))
  return [
    ...ways.map((way) => `idempotency-proxy ${way}`),
    '',
    ...about.map((line) => `  ${line}`),
    '',
    ...rows.map(([flag = '', help]) => `  ${flag.padEnd(width)}  ${help}`),
    '',
  ].join('\n')
}

/** The correct call if npm swallowed a flag: `npm start --upstream URL` passes on only the value, or nothing. */
export function npmHint(env: Io['env']): string {
  if (env['npm_lifecycle_event'] === undefined) return ''
  const taken = Object.keys(SERVE_OPTIONS).filter((name) => env[`npm_config_${name}`] !== undefined)
  if (taken.length === 0) return ''
  return `; npm took the flag: write npm start -- ${taken.map((name) => `--${name} …`).join(' ')}`
}
