import { parseArgs } from 'node:util'
import { didYouMean } from '../config/read.ts'
import { RECORD_ID } from '../core/record.ts'
import { plain } from './terminal.ts'

/** Exit codes (contract §11). A finding is also what could not be done. */
export const FINE = 0
export const FINDING = 1
export const USAGE = 2

/** A command's view of its process. */
export interface Io {
  readonly out: (text: string) => void
  readonly err: (text: string) => void
  readonly env: Readonly<Record<string, string | undefined>>
  /** Asks the person at the terminal; null: nobody can answer. */
  readonly ask: ((question: string) => Promise<string>) | null
}

export interface Option {
  /** Placeholder of its value in the help; null: it takes none. */
  readonly value: string | null
  readonly help: string
  readonly repeated?: true
  readonly short?: string
}
export type Options = Readonly<Record<string, Option>>

export interface Command {
  readonly name: string
  /** One line per way to call it, without the name of the program. */
  readonly usage: readonly string[]
  readonly about: readonly string[]
  readonly options: Options
  /** What its one argument is, such as `one file`; null: it checks its arguments itself. Without it: it takes none. */
  readonly takes?: string | null
  /** It takes abbreviated ids, which may begin with a dash as whole ones do. */
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

  /** Those of the options that were given, by name. */
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

const HELP: Options = { help: { value: null, help: 'prints this', short: 'h' } }

/** Ends a command early: thrown wherever something is found wrong, printed by `dispatch`. */
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

/** Runs a command: help, options and the number of arguments are handled alike for all. */
export async function run(command: Command, words: readonly string[], io: Io): Promise<number> {
  const ids = command.takesPrefixes === true ? PREFIX : RECORD_ID
  const parsed = parse({ ...command.options, ...HELP }, idsLast(words, ids))
  if (parsed.has('help')) {
    io.out(helpOf(command))
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

/** Of an id; two dashes begin an option unless the id is whole. */
const PREFIX = /^(?!--(?!.{41}$))[A-Za-z0-9_-]{8,43}$/

/** Ids go behind `--`: one in 64 begins with a dash, as an option does. */
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

function parse(options: Options, words: readonly string[]): Args {
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
  const near = didYouMean(written.replace(/^-+/, ''), known)
  return `unknown option ${written}${near === null ? '' : `; did you mean --${near}?`}`
}

export function helpOf({
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

const SERVE_FLAGS = ['config', 'upstream', 'listen', 'store', 'service']

/** What to write when npm kept a flag for itself: `npm start --upstream URL` hands on the value alone, or nothing. */
export function npmHint(env: Io['env']): string {
  if (env['npm_lifecycle_event'] === undefined) return ''
  const taken = SERVE_FLAGS.filter((name) => env[`npm_config_${name}`] !== undefined)
  if (taken.length === 0) return ''
  return `; npm took the flag: write npm start -- ${taken.map((name) => `--${name} …`).join(' ')}`
}
