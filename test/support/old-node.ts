import { spawnSync } from 'node:child_process'
import { delimiter, join } from 'node:path'

/** A Node on the PATH that is too old for this project, or null. */
export const OLD_NODE = findOldNode()

function findOldNode(): string | null {
  for (const directory of (process.env.PATH ?? '').split(delimiter)) {
    const node = join(directory, 'node')
    const { status, stdout } = spawnSync(node, ['--version'], { encoding: 'utf8' })
    if (status === 0 && Number(/^v(\d+)/.exec(stdout)?.[1]) < 24) return node
  }
  return null
}
