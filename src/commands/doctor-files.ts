import { constants } from 'node:fs'
import { access, readdir } from 'node:fs/promises'
import { setTimeout as wait } from 'node:timers/promises'
import type { Config } from '../config/config.ts'
import { type Verified, verifyAudit } from '../observe/audit.ts'
import { isDamagedName } from '../store/spool-file.ts'
import { readSpool } from '../store/spool-read.ts'
import type { Checked } from './checked.ts'
import { counted } from './plain.ts'

/** A line that is being written right now is whole then. */
const WRITTEN_BY_THEN = 250

export function configChecks({ warnings }: Config): Checked[] {
  return warnings.length === 0
    ? [{ check: 'configuration', found: 'fine', detail: 'gives up no promise' }]
    : warnings.map((detail) => ({ check: 'configuration', found: 'note', detail }))
}

/** What lies in the spool: outcomes that the store has not taken. Nothing of it is touched. */
export async function spoolChecks({ store }: Config): Promise<Checked[]> {
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
      found.length === 0
        ? { check: 'spool', found: 'fine', detail: `${directory} is empty` }
        : {
            check: 'spool',
            found: 'finding',
            detail: `${counted(found.length, 'outcome')} in ${directory} that the store has not taken; a proxy that runs on it writes them when the store answers, else start one`,
          },
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

/** Whether a line of the audit log was removed or edited. */
export async function auditChecks({ audit }: Config): Promise<Checked[]> {
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
