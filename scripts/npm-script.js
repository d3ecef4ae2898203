/**
 * Loaded before every npm script that is TypeScript (`node --import ./scripts/npm-script.js …`). JavaScript, because a Node that
 * cannot read TypeScript has to run it.
 *
 * - An older Node gets one sentence instead of a stack.
 * - The script ends with the npm that runs it: npm passes a signal to its shell, which ends without passing it on, and a killed npm
 *   passes nothing.
 */
import { spawnSync } from 'node:child_process'
import { readFileSync } from 'node:fs'

const { engines } = JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8'))
const wanted = engines.node.replace('>=', '')
const [major, minor] = wanted.split('.').map(Number)
const [ownMajor, ownMinor] = process.versions.node.split('.').map(Number)
if (ownMajor < major || (ownMajor === major && ownMinor < minor)) {
  process.stderr.write(
    `idempotency-proxy needs Node ${wanted} or later; this is ${process.version}. \`npm ci\` installs one for the npm scripts.\n`,
  )
  process.exit(2)
}

const shell = process.ppid
const npm = npmAbove(shell)
if (npm !== null) {
  const watch = setInterval(() => {
    if (process.ppid === shell && isRunning(npm)) return
    // Once: many programs take a second signal as an order to stop at once.
    clearInterval(watch)
    process.kill(process.pid, 'SIGTERM')
  }, 250).unref()
}

/** The npm that runs this script: the parent, or the parent of the shell between them. Null where there is none. */
function npmAbove(pid) {
  if (process.env.npm_lifecycle_event === undefined) return null
  for (const one of [pid, told(pid, 'ppid')])
    if (/^npm\b|npm-cli\.js/.test(told(Number(one), 'args'))) return Number(one)
  return null
}

function told(pid, column) {
  return spawnSync('ps', ['-o', `${column}=`, '-p', String(pid)], { encoding: 'utf8' }).stdout?.trim() ?? ''
}

function isRunning(pid) {
  try {
    return process.kill(pid, 0)
  } catch {
    return false
  }
}
