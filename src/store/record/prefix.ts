import { hash } from 'node:crypto'
import { STATES } from '../../core/record.ts'
import type { Prefix } from '../register.ts'
import { readU48 } from './binary.ts'
import { MAGIC, PREFIX } from './codec.ts'

/*
 * Facts about a record that this release cannot read.
 */

/**
 * The version at which `Register.remove` removes a record of any schema. For other bytes it is the beginning of their SHA-1, which Redis
 * can compute, too.
 */
export function versionOf(bytes: Buffer): number {
  if (hasPrefix(bytes)) return readU48(bytes, PREFIX.version)
  return readU48(hash('sha1', bytes, 'buffer'), 0)
}

export function prefixOf(bytes: Buffer): Prefix {
  const version = versionOf(bytes)
  const state = hasPrefix(bytes) ? (STATES[bytes.readUInt8(PREFIX.state) - 1] ?? null) : null
  return { version, state, leaseUntil: state === 'in_progress' ? readU48(bytes, PREFIX.due) : null }
}

/** It begins like a record of any schema. */
function hasPrefix(bytes: Buffer): boolean {
  return bytes.length >= PREFIX.end && bytes.readUInt16BE(0) === MAGIC
}
