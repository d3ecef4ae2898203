import { existsSync } from 'node:fs'
import { resolve } from 'node:path'
import type { Config } from '../config/config.ts'
import { Findings, formatConfigError } from '../config/errors.ts'
import { readTokens } from '../config/files.ts'
import { quote } from '../config/units.ts'
import { isSharedStore } from '../config/urls.ts'
import { UPSTREAM_MARK } from '../store/marks.ts'
import { servicesIn } from '../store/sqlite/file.ts'
import { type Args, type CommandOptions, Exit, finding, type Io, usage } from './command.ts'
import { validConfig } from './configuration.ts'
import { openDirect, openRemote, type RecordSource } from './record-source.ts'
import { plain } from './terminal.ts'

export const ADMIN_OPTIONS: CommandOptions = {
  admin: { value: 'URL', help: 'admin listener of a running proxy, such as http://127.0.0.1:9464' },
  'token-file': { value: 'FILE', help: 'bearer token of --admin (its admin.tokenFile)' },
}

export const SOURCE_OPTIONS: CommandOptions = {
  ...ADMIN_OPTIONS,
  config: { value: 'FILE', help: 'configuration of the proxy: reads its store directly' },
  store: {
    value: 'URL',
    help: 'store to read directly: sqlite:<path>, redis://, redis+sentinel://, redis+cluster://, postgres:// or dynamodb://',
  },
  service: {
    value: 'NAME',
    help: 'service whose records to read, such as payments; required with Redis, PostgreSQL and DynamoDB',
  },
}

/**
 * The source that the flags name. `changes`: the record will be written, which takes a configuration: what is kept and for how long,
 * and where the audit log is.
 * @throws {Exit}
 */
export async function openSource(args: Args, io: Io, changes = false): Promise<RecordSource> {
  const own = ['config', 'store', 'service'].filter((name) => args.has(name))
  if (args.has('admin')) {
    if (own.length > 0)
      throw usage(`found --admin and --${own[0]}; allowed: --admin, or --config, --store and --service`)
    return adminSource(args)
  }
  if (args.has('token-file')) throw usage('found --token-file without --admin URL')
  if (!args.has('config') && !args.has('store'))
    throw usage('no source given: use --admin URL --token-file FILE, --config FILE, or --store URL')
  if (changes && !args.has('config'))
    throw usage(
      'found --store alone; allowed: with --config FILE, or --admin URL, since the routes say what is kept and for how long',
    )
  try {
    return await openDirect(storeConfig(args, io), args.has('config'), changes, io)
  } catch (error) {
    throw error instanceof Exit ? error : finding((error as Error).message)
  }
}

export function adminSource(args: Args): RecordSource {
  const found = args.text('admin') ?? ''
  const url = /^https?:\/\/[^/]/i.test(found) ? URL.parse(found) : null
  if (
    url === null ||
    url.pathname !== '/' ||
    url.username !== '' ||
    url.password !== '' ||
    /[?#]/.test(found)
  )
    throw usage(`--admin: found ${quote(found)}; allowed: http://host:port or https://host:port, no path`)
  const file = args.text('token-file')
  if (file === undefined) throw usage('--admin needs --token-file FILE: the admin token of that proxy')
  const findings = new Findings('--token-file')
  // Any token that the proxy accepts is enough.
  const [token] = readTokens(findings, '', file) ?? []
  if (token === undefined) throw usage(findings.sorted().map(formatConfigError).join('; '))
  return openRemote(url.origin, token, file)
}

/** The configuration of a store that is read directly; defaults if there is no file. */
export function storeConfig(args: Args, io: Io): Config {
  const config = givenConfig(args, io)
  const { url } = config.store
  if (url === 'memory:') throw usage(`the store is ${UNSEEN}; allowed: --admin URL --token-file FILE`)
  mustExist(url)
  sayWhoseItIs(url, config.service, args, io)
  return config
}

const UNSEEN = 'memory:, which only its own process can see'

/** Like {@link storeConfig}, whether or not there is a store to read. */
export function givenConfig(args: Args, io: Io): Config {
  const file = args.text('config') ?? null
  if (file === null && !args.has('service') && isSharedStore(args.text('store') ?? ''))
    throw usage('--service NAME is required: several services may share this store')
  // Nothing is sent upstream.
  const upstream = file === null ? 'http://127.0.0.1' : undefined
  const flags = { upstream, store: args.text('store'), service: args.text('service') }
  return validConfig(file, flags, io.env)
}

/** Why there is nothing to read, as before the first start; null: there is a store. */
export function unseenStore(storeUrl: string): string | null {
  if (storeUrl === 'memory:') return UNSEEN
  const path = missingFile(storeUrl)
  return path === null ? null : notYet(path)
}

function notYet(path: string): string {
  return `there is no file at ${path}; a proxy creates it at startup`
}

/** @throws {Exit} if no service was named, and a file holds only records of others. */
function sayWhoseItIs(storeUrl: string, service: string, args: Args, io: Io): void {
  if (!storeUrl.startsWith('sqlite:')) return
  const held = servicesIn(fileOf(storeUrl), UPSTREAM_MARK)
  if (held.length === 0 || held.includes(service)) return
  const found = `the store ${quote(storeUrl)} holds records of ${held.map(quote).join(', ')}, and none of ${quote(service)}`
  if (!args.has('service') && !args.has('config')) throw usage(`--service NAME is required: ${found}`)
  io.err(`${plain(found)}\n`)
}

/** @throws {Exit} if it is a missing file: opening it would create an empty one. */
export function mustExist(storeUrl: string): void {
  const path = missingFile(storeUrl)
  if (path !== null) throw finding(`the store ${quote(storeUrl)}: ${notYet(path)}`)
}

/** Path of the store's missing file; null: it exists, or the store has none. */
export function missingFile(storeUrl: string): string | null {
  if (!storeUrl.startsWith('sqlite:')) return null
  const path = fileOf(storeUrl)
  return existsSync(path) ? null : path
}

function fileOf(sqliteUrl: string): string {
  return resolve(sqliteUrl.slice('sqlite:'.length))
}
