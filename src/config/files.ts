import { type BigIntStats, readFileSync, statSync } from 'node:fs'
import { stat } from 'node:fs/promises'
import { createRequire } from 'node:module'
import { resolve } from 'node:path'
import type { Millis } from '../core/record.ts'
import type { Descriptors } from '../core/rpc/descriptors.ts'
import { checkKeyText } from '../credentials/key-text.ts'
import { type KeyPair, type ListenerTls, pairProblem, type TlsMaterial, tlsProblem } from '../runtime/pem.ts'
import type { Config, UpstreamConfig } from './config.ts'
import type { ConfigError, Findings } from './errors.ts'
import { quote } from './units.ts'

export type FileText =
  | { readonly ok: true; readonly text: string }
  | { readonly ok: false; readonly error: ConfigError }

/** The text of a configuration file, or an error. */
export function readConfigFile(file: string): FileText {
  try {
    return { ok: true, text: new TextDecoder('utf-8', { fatal: true }).decode(readFileSync(file)) }
  } catch (error) {
    const message = `found ${whyUnreadable(error)}; allowed: a readable file of YAML or JSON in UTF-8`
    return { ok: false, error: { file, line: 0, column: 0, path: '', message } }
  }
}

const REASONS: Readonly<Record<string, string>> = {
  ENOENT: 'no such file',
  ENOTDIR: 'no such file',
  EISDIR: 'a directory',
  EACCES: 'a file that this process may not read',
  ERR_ENCODING_INVALID_ENCODED_DATA: 'bytes that are not UTF-8',
}

/** What is wrong with a file that could not be opened or read. */
export function whyUnreadable(error: unknown): string {
  const code = error instanceof Error && 'code' in error ? String(error.code) : ''
  return REASONS[code] ?? `a file that cannot be read (${code})`
}

/** Its bytes; `null`: unreadable or empty, as the findings say. */
function readNamed(findings: Findings, path: string, file: string): Buffer | null {
  try {
    const bytes = readFileSync(file)
    if (bytes.length > 0) return bytes
    findings.add(path, `found an empty file ${quote(file)}; allowed: one that is not empty`)
  } catch (error) {
    findings.add(path, `found ${whyUnreadable(error)} at ${quote(file)}; allowed: a readable file`)
  }
  return null
}

/** Without the final newline that editors and `echo` add. */
function readLine(findings: Findings, path: string, file: string): Buffer | null {
  const bytes = readNamed(findings, path, file)
  return bytes?.subarray(0, /\r?\n$/.exec(bytes.toString('latin1'))?.index) ?? null
}

/** `min`: in bytes. */
export function readSecret(findings: Findings, path: string, file: string, min: number): Buffer | null {
  const secret = readLine(findings, path, file)
  if (secret === null || secret.length >= min) return secret
  findings.add(path, `found ${secret.length} bytes in ${quote(file)}; allowed: at least ${min}`)
  return null
}

const require = createRequire(import.meta.url)

/** A `FileDescriptorSet`; `null`: the file has none, as the findings say. */
export function readDescriptorSet(findings: Findings, path: string, file: string): Descriptors | null {
  const bytes = readNamed(findings, path, file)
  if (bytes === null) return null
  // protobufjs is loaded with the first set.
  const { readDescriptors } = require(
    `../core/rpc/descriptors.${import.meta.url.endsWith('.ts') ? 'ts' : 'js'}`,
  ) as typeof import('../core/rpc/descriptors.ts')
  const reading = readDescriptors(bytes)
  if (reading.kind === 'descriptors') return reading.descriptors
  findings.add(
    path,
    `found no descriptor set in ${quote(file)} (${reading.why}); allowed: what \`protoc --include_imports --descriptor_set_out\` writes`,
  )
  return null
}

const SEALING_KEY_BYTES = 32
const KEY_TEXTS = [
  { form: /^[0-9a-f]{64}$/i, encoding: 'hex' },
  { form: /^[\w+/-]{43}=?$/, encoding: 'base64' },
] as const

/** A key of 32 bytes; `null`: the file has none, as the findings say. */
export function readSealingKey(findings: Findings, path: string, file: string): Buffer | null {
  const bytes = readNamed(findings, path, file)
  if (bytes === null) return null
  const text = bytes.toString('latin1')
  // Of 32 random bytes some are not printable: these are a password, or a shorter key as text.
  const isText = /^[\n\r -~]*$/.test(text)
  if (bytes.length === SEALING_KEY_BYTES && !isText) return bytes
  const line = text.replace(/\r?\n$/, '')
  for (const { form, encoding } of KEY_TEXTS) if (form.test(line)) return Buffer.from(line, encoding)
  const found = isText ? `${line.length} characters of text` : `${bytes.length} bytes`
  findings.add(
    path,
    `found ${found} in ${quote(file)}; allowed: ${SEALING_KEY_BYTES} random bytes, raw, in hex (64 characters) or in base64 (44 characters)`,
  )
  return null
}

/** Bearer tokens, limited to characters of header lines; `null`: the file has none, as the findings say. */
export function readTokens(findings: Findings, path: string, file: string): readonly string[] | null {
  const text = readNamed(findings, path, file)?.toString('latin1')
  if (text === undefined) return null
  const lines = text.split('\n').map((line) => line.replaceAll(/^[ \t\r]+|[ \t\r]+$/g, ''))
  const tokens = lines.filter((line) => line !== '')
  const unfit = lines.findIndex((line) => !/^[!-~]*$/.test(line))
  if (tokens.length > 0 && unfit < 0) return tokens
  const what = unfit < 0 ? 'no token' : `something else on line ${unfit + 1}`
  const allowed = 'one token per line, in printable ASCII without spaces'
  findings.add(path, `found ${what} in ${quote(file)}; allowed: ${allowed}`)
  return null
}

/** A PEM file's bytes; `null`: it is not one, as the findings say. */
export function readPem(findings: Findings, path: string, file: string): Buffer | null {
  const pem = readNamed(findings, path, file)
  if (pem === null || pem.includes('-----BEGIN ')) return pem
  findings.add(path, `found no PEM in ${quote(file)}; allowed: a PEM file`)
  return null
}

/** The files of `upstream.tls`; `null`: they cannot be used, as the findings say. */
export function readUpstreamTls(findings: Findings, files: UpstreamConfig['tls']): TlsMaterial | null {
  const material: Partial<Record<keyof TlsMaterial, Buffer>> = {}
  for (const name of ['ca', 'cert', 'key'] as const) {
    const file = files[name]
    if (file === null) continue
    const pem = readPem(findings, `upstream.tls.${name}`, file)
    if (pem === null) return null
    material[name] = pem
  }
  const problem = tlsProblem(material)
  if (problem !== null) findings.add('upstream.tls', `found files that cannot be used: ${problem}`)
  return problem === null ? material : null
}

/** The files of a listener's `tls` at `path`; `null`: they cannot be used, as the findings say. */
export function readListenerTls(
  findings: Findings,
  path: string,
  { cert, key, others, clientCa }: NonNullable<Config['ops']['listen']['tls']>,
): ListenerTls | null {
  const pairs: KeyPair[] = []
  const named = [
    { at: path, cert, key },
    ...others.map((pair, n) => ({ at: `${path}.others[${n}]`, ...pair })),
  ]
  for (const { at, ...files } of named) {
    // The reader has reported that one is missing.
    if (files.cert == null || files.key == null) return null
    const pair = {
      cert: readPem(findings, `${at}.cert`, files.cert),
      key: readPem(findings, `${at}.key`, files.key),
    }
    if (pair.cert === null || pair.key === null) continue
    const problem = pairProblem(pair as KeyPair)
    if (problem === null) pairs.push(pair as KeyPair)
    else
      findings.add(
        `${at}.cert`,
        `found files that cannot be used (${quote(files.cert)}, ${quote(files.key)}): ${problem}; allowed: a valid certificate and its key`,
      )
  }
  const ca = clientCa === null ? null : readPem(findings, `${path}.clientCa`, clientCa)
  const problem = ca === null ? null : tlsProblem({ ca })
  if (problem !== null)
    findings.add(
      `${path}.clientCa`,
      `found a file that cannot be used: ${problem}; allowed: certificates as PEM`,
    )
  const isWhole = pairs.length === named.length && problem === null && (ca !== null || clientCa === null)
  return isWhole ? { pairs, clientCa: ca } : null
}

/** All files that {@link readListenerTls} reads. */
export function listenerFiles({
  cert,
  key,
  others,
  clientCa,
}: NonNullable<Config['ops']['listen']['tls']>): string[] {
  const pairs = [{ cert, key }, ...others].flatMap((pair) => [pair.cert ?? '', pair.key ?? ''])
  return clientCa === null ? pairs : [...pairs, clientCa]
}

/** The text of a file of keys that verify tokens. */
export function readKeyFile(findings: Findings, path: string, file: string): string | null {
  const text = readNamed(findings, path, file)?.toString('utf8') ?? null
  const message = text === null ? null : checkKeyText(text)
  if (message === null) return text
  findings.add(path, message.replace('; allowed: ', ` in ${quote(file)}; allowed: `))
  return null
}

/** How often a file is checked. After a change it is read once it has been stable that long: half a file may be valid, too. */
const POLL: Millis = 500

/**
 * Calls `changed` after a file was replaced or written, once it is stable. It polls, since events are missing for network file systems,
 * links to other folders, and when watches run out. Does not keep the process alive.
 */
export class FileWatch implements Disposable {
  readonly #file: string
  readonly #changed: () => void
  readonly #timer: NodeJS.Timeout
  /** State of the file when `changed` was last called, and at the last check. */
  #known: string | null
  #seen: string | null
  #isLooking = false
  #isClosed = false

  constructor(file: string, changed: () => void, poll: Millis = POLL) {
    this.#file = resolve(file)
    this.#changed = changed
    // Synchronous, so that no change after a later read is missed.
    this.#known = stateNow(this.#file)
    this.#seen = this.#known
    this.#timer = setInterval(this.#look as () => void, poll).unref()
  }

  [Symbol.dispose](): void {
    this.#isClosed = true
    clearInterval(this.#timer)
  }

  /** Resolves once it has checked. */
  readonly #look = async (): Promise<void> => {
    if (this.#isLooking) return
    this.#isLooking = true
    const found = stateOf(await stat(this.#file, { bigint: true }).catch(() => undefined))
    this.#isLooking = false
    const isStable = found === this.#seen
    this.#seen = found
    if (this.#isClosed || !isStable || found === this.#known) return
    this.#known = found
    this.#changed()
  }
}

function stateNow(path: string): string | null {
  try {
    return stateOf(statSync(path, { bigint: true }))
  } catch {
    return null
  }
}

/** Identifies a state of the file behind all links; null: there is no file. */
function stateOf(found: BigIntStats | undefined): string | null {
  return found ? [found.dev, found.ino, found.size, found.mtimeNs, found.ctimeNs].join() : null
}
