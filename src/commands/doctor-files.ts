import { constants } from 'node:fs'
import { access, readdir } from 'node:fs/promises'
import { setTimeout as wait } from 'node:timers/promises'
import type { Config } from '../config/config.ts'
import { type Verified, verifyAudit } from '../observe/audit.ts'
import { decodeEntry } from '../store/outbox-entry.ts'
import { isDamagedName } from '../store/spool-file.ts'
import { type Found, readSpool } from '../store/spool-read.ts'
import type { CheckResult } from './check-result.ts'
import { counted } from './terminal.ts'

/** A line that is being written right now is whole then. */
const WRITTEN_BY_THEN = 250

export function configChecks({ warnings }: Config): CheckResult[] {
  return warnings.length === 0
    ? [{ check: 'configuration', found: 'fine', detail: 'gives up no promise' }]
    : warnings.map((detail) => ({ check: 'configuration', found: 'note', detail }))
}

/** What lies in the spool: outcomes that the store has not taken. Nothing of it is touched. */
export async function spoolChecks({ service, store }: Config): Promise<CheckResult[]> {
  const directory = store.spool
  if (directory === null)
    return [
      {
        check: 'spool',
        found: 'note',
        detail: 'store.spool is off: outcomes that the store does not take are lost with the process',
      },
    ]
  try {
    await access(directory, constants.R_OK | constants.W_OK | constants.X_OK)
    const { found } = await readSpool(directory, () => {})
    const damaged = (await readdir(directory)).filter(isDamagedName).length
    return [
      ...(found.length === 0
        ? [{ check: 'spool', found: 'fine' as const, detail: `${directory} is empty` }]
        : heldIn(directory, found, service)),
      ...(damaged === 0
        ? []
        : [
            {
              check: 'spool',
              found: 'finding' as const,
              detail: `${counted(damaged, 'damaged file')} kept aside in ${directory}: look at them, and remove them`,
            },
          ]),
    ]
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException
    return code === 'ENOENT'
      ? [
          {
            check: 'spool',
            found: 'note',
            detail: `${directory} is not there yet: a proxy makes it when it starts`,
          },
        ]
      : [{ check: 'spool', found: 'finding', detail: message }]
  }
}

/** Own outcomes, those of each other service, and what nobody can read. */
function heldIn(directory: string, found: readonly Found[], service: string): CheckResult[] {
  const advice = new Map<string, string>()
  const counts = new Map<string, number>()
  for (const { payload } of found) {
    const { of, todo } = ownerOf(payload, service)
    advice.set(of, todo)
    counts.set(of, (counts.get(of) ?? 0) + 1)
  }
  return [...counts].map(([of, count]) => ({
    check: 'spool',
    found: 'finding',
    detail: `${counted(count, 'outcome')} ${of ? `${of} ` : ''}in ${directory} ${advice.get(of)}`,
  }))
}

function ownerOf(payload: Buffer, service: string): { of: string; todo: string } {
  const decoded = decodeEntry(payload, service)
  switch (decoded.kind) {
    case 'own':
      return {
        of: '',
        todo: 'that the store has not taken; a proxy that runs on it writes them when the store answers, else start one',
      }
    case 'foreign':
      return decoded.service === null
        ? {
            of: 'without a service',
            todo: 'that no proxy of this version writes: the version that made them does, else remove the files',
          }
        : {
            of: `of service ${decoded.service}`,
            todo: `that ${service} does not write: start a proxy of ${decoded.service} on it, and give each service a directory of its own`,
          }
    case 'unreadable':
      return { of: 'of another version', todo: `that this one does not read (${decoded.error.message})` }
  }
}

/** Whether a line of the audit log was removed or edited. */
export async function auditChecks({ audit }: Config): Promise<CheckResult[]> {
  const { file } = audit
  if (file === null)
    return [
      {
        check: 'audit log',
        found: 'note',
        detail: 'audit.file is none: changes are written to the log, which is not looked at',
      },
    ]
  let verified: Verified
  try {
    verified = await verifyAudit(file)
    if (!verified.ok) {
      await wait(WRITTEN_BY_THEN)
      verified = await verifyAudit(file)
    }
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException
    return code === 'ENOENT'
      ? [{ check: 'audit log', found: 'note', detail: `${file} is not there yet` }]
      : [{ check: 'audit log', found: 'finding', detail: message }]
  }
  return [
    verified.ok
      ? {
          check: 'audit log',
          found: 'fine',
          detail: `${file}: ${counted(verified.lines, 'line')}, one chain; the last is ${verified.head.slice(0, 12)}`,
        }
      : { check: 'audit log', found: 'finding', detail: `${file}:${verified.line}: ${verified.problem}` },
  ]
}
