import { hash } from 'node:crypto'
import { linesOf, type RawHeaders } from '../headers.ts'
import { spells } from '../key.ts'
import type { KeyPolicy } from '../policy.ts'
import { IDENTIFIERS, type Identifier, type Operation, type RecordId } from '../record.ts'

type KeptIdentifiers = Pick<Operation, 'key' | 'keySent' | 'received' | 'receivedBy'>

/** Names an upstream inside records: another one must not be asked about a request it never received. */
export function upstreamTag(url: string): string {
  return hash('sha256', url, 'base64url').slice(0, 8)
}

/**
 * The identifiers that the upstream receives with one attempt, as the record keeps them. Read from the `lines` sent, not from the
 * configuration: a client, or a proxy in front, may have removed a line. `inBody`: the key is in body or query. `keepsKey`: status queries
 * are asked by the key. `upstream`: its tag.
 */
export function identifiersSent(
  lines: RawHeaders,
  policy: KeyPolicy,
  id: RecordId,
  key: string,
  inBody: boolean,
  keepsKey: boolean,
  upstream: string,
): KeptIdentifiers {
  const spelt = spellings(lines, policy, key)
  const others = [...new Set(spelt.filter((value) => value !== key))]
  const hasKey = others.length < 2 && (inBody || spelt.length > 0)
  const hasRecord = linesOf(lines, 'idempotency-record').includes(id)
  const keySent = keepsKey && others.length === 1 ? others[0] : undefined
  const received = [
    ...(keepsKey && hasKey ? (['key'] as const) : []),
    ...(hasRecord ? (['record'] as const) : []),
  ]
  return identifiersOf(keepsKey ? key : null, keySent, received, upstream)
}

/**
 * The facts that hold for both attempts if either may have executed: one that fell silent, and the one that takes over. Three spellings of
 * one key cannot all be queried; the longer lease decides when both are silent.
 */
export function identifiersSentByBoth(
  earlier: KeptIdentifiers & Pick<Operation, 'lease'>,
  later: Operation,
): Operation {
  const { key, keySent, received: _, receivedBy, ...operation } = later
  const others = new Set([earlier.keySent, keySent].filter((value) => value !== undefined))
  const received = IDENTIFIERS.filter(
    (name) =>
      earlier.receivedBy === receivedBy &&
      earlier.received?.includes(name) &&
      later.received?.includes(name) &&
      (name !== 'key' || others.size < 2),
  )
  const leases = [earlier.lease, later.lease].filter((lease) => lease !== undefined)
  const lease = leases.length === 0 ? {} : { lease: Math.max(...leases) }
  return { ...operation, ...identifiersOf(key, keySent ?? earlier.keySent, received, receivedBy), ...lease }
}

function identifiersOf(
  key: string | null,
  keySent: string | undefined,
  received: readonly Identifier[],
  receivedBy: string | undefined,
): KeptIdentifiers {
  return {
    key,
    ...(keySent === undefined ? {} : { keySent }),
    ...(received.length === 0 ? {} : { received }),
    ...(received.length === 0 || receivedBy === undefined ? {} : { receivedBy }),
  }
}

/** Values of the lines that carry the key. */
function spellings(lines: RawHeaders, policy: KeyPolicy, key: string): string[] {
  const { from, forward } = policy
  const names = from.flatMap((source) => (source.kind === 'header' ? [source.name] : []))
  if (typeof forward === 'object') names.push(forward.header.toLowerCase())
  return [...new Set(names)]
    .flatMap((name) => linesOf(lines, name).map((value) => value.trim()))
    .filter((value) => value === key || spells(value, policy.syntax, key))
}
