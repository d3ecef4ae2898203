import { userInfo } from 'node:os'

/** Who decides, unless they say: the user of this process. A container may have given it no name. */
export function osUser(): string {
  try {
    return userInfo().username
  } catch {
    return `uid ${process.getuid?.() ?? 'unknown'}`
  }
}
