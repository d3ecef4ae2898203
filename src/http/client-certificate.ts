import type { TLSSocket } from 'node:tls'
import { linesOf, type RawHeaders } from '../core/headers.ts'
import type { ClientCertificate } from '../core/identity.ts'

/** The certificate that a client of a TLS listener has presented; null: none was requested. */
export function shownCertificate(connection: TLSSocket): ClientCertificate | null {
  const certificate = connection.getPeerX509Certificate()
  if (certificate === undefined) return null
  const names = [
    ...(certificate.subjectAltName ?? '').matchAll(/(\w+(?: \w+)?):("(?:[^"\\]|\\.)*"|[^,]*)(?:, |$)/g),
  ]
  const named = (kind: string): string | null =>
    joined(names.filter(([, own]) => own === kind).map(([, , value = '']) => unquoted(value)))
  return {
    'san-uri': named('URI'),
    'san-dns': named('DNS'),
    // As RFC 4514 writes it: the last part first.
    subject: joined([certificate.subject.split('\n').toReversed().join(',')]),
    fingerprint: certificate.fingerprint256.replaceAll(':', '').toLowerCase(),
  }
}

/** A pair of `X-Forwarded-Client-Cert`, and what follows: another pair, another element, or nothing. */
const PAIR = /\s*([a-z]+)=("(?:[^"\\]|\\.)*"|[^",;]*)([;,]|$)/iy

/**
 * The certificate that a trusted proxy has verified: the last element of `X-Forwarded-Client-Cert`, which the nearest one wrote, in Envoy's
 * form (`Hash=…;Subject="…";URI=…`). Null: there is none, or a client has prefixed something that cannot be distinguished from it.
 */
export function forwardedCertificate(headers: RawHeaders): ClientCertificate | null {
  const text = linesOf(headers, 'x-forwarded-client-cert').join(',')
  let element: [name: string, value: string][] = []
  PAIR.lastIndex = 0
  for (let end = ','; end !== ''; ) {
    if (end === ',') element = []
    const [, name, value, next] = PAIR.exec(text) ?? []
    if (name === undefined || value === undefined || next === undefined) return null
    element.push([name.toLowerCase(), unquoted(value)])
    end = next
  }
  const named = (kind: string): string | null =>
    joined(element.filter(([own]) => own === kind).map(([, value]) => value))
  return {
    'san-uri': named('uri'),
    'san-dns': named('dns'),
    subject: named('subject'),
    fingerprint: named('hash')?.toLowerCase() ?? null,
  }
}

function unquoted(text: string): string {
  return text.startsWith('"') ? text.slice(1, -1).replace(/\\(.)/g, '$1') : text
}

function joined(values: readonly string[]): string | null {
  const text = values.join(', ')
  return text === '' ? null : text
}
