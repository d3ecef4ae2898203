import { readFileSync } from 'node:fs'
import { checkKeyText } from '../credentials/key-text.ts'
import type { ConfigError, Findings } from './errors.ts'
import { quote } from './units.ts'

export type FileText =
  | { readonly ok: true; readonly text: string }
  | { readonly ok: false; readonly error: ConfigError }

/** The text of a configuration file, or what is wrong with the file. */
export function readConfigFile(file: string): FileText {
  try {
    return { ok: true, text: new TextDecoder('utf-8', { fatal: true }).decode(readFileSync(file)) }
  } catch (error) {
    const message = `found ${whyUnreadable(error)}; allowed: a readable file of YAML in UTF-8`
    return { ok: false, error: { file, line: 0, column: 0, path: '', message } }
  }
}

/** What is wrong with a file that could not be opened or read. */
export function whyUnreadable(error: unknown): string {
  const code = error instanceof Error && 'code' in error ? String(error.code) : ''
  const reasons: Readonly<Record<string, string>> = {
    ENOENT: 'no such file',
    ENOTDIR: 'no such file',
    EISDIR: 'a directory',
    EACCES: 'a file that this process may not read',
    ERR_ENCODING_INVALID_ENCODED_DATA: 'bytes that are not UTF-8',
  }
  return reasons[code] ?? `a file that cannot be read (${code})`
}

/** Its bytes; `null`: that failed, or there are none, which is then among the findings. */
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

/** Editors and `echo` end a file with a newline that nobody means. */
function withoutNewline(bytes: Buffer): Buffer {
  return bytes.subarray(0, /\r?\n$/.exec(bytes.toString('latin1'))?.index ?? bytes.length)
}

/** `min`: in bytes. */
export function readSecret(findings: Findings, path: string, file: string, min: number): Buffer | null {
  const bytes = readNamed(findings, path, file)
  if (bytes === null) return null
  const secret = withoutNewline(bytes)
  if (secret.length >= min) return secret
  findings.add(path, `found ${secret.length} bytes in ${quote(file)}; allowed: at least ${min}`)
  return null
}

/** A bearer token: what a header line can carry. */
export function readToken(findings: Findings, path: string, file: string): string | null {
  const bytes = readNamed(findings, path, file)
  if (bytes === null) return null
  const token = withoutNewline(bytes).toString('latin1')
  if (/^[!-~]+$/.test(token)) return token
  findings.add(path, `found no token in ${quote(file)}; allowed: one line of printable ASCII without blanks`)
  return null
}

export function checkPem(findings: Findings, path: string, file: string): void {
  const bytes = readNamed(findings, path, file)
  if (bytes !== null && !bytes.includes('-----BEGIN '))
    findings.add(path, `found no PEM in ${quote(file)}; allowed: a PEM file`)
}

/** The text of a file of keys that verify tokens. */
export function readKeyText(findings: Findings, path: string, file: string): string | null {
  const text = readNamed(findings, path, file)?.toString('utf8') ?? null
  const message = text === null ? null : checkKeyText(text)
  if (message === null) return text
  findings.add(path, message.replace('; allowed: ', ` in ${quote(file)}; allowed: `))
  return null
}
