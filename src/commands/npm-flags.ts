import type { Io } from './command.ts'

/** Flags of `serve`. */
const FLAGS = ['config', 'upstream', 'listen', 'store', 'service']

/**
 * What to write where npm kept a flag for itself, as `npm start --upstream URL` makes it do: it hands on the value alone, or
 * nothing at all. Empty: it kept none.
 */
export function npmHint(env: Io['env']): string {
  if (env['npm_lifecycle_event'] === undefined) return ''
  const taken = FLAGS.filter((name) => env[`npm_config_${name}`] !== undefined)
  if (taken.length === 0) return ''
  return `; npm took the flag: write npm start -- ${taken.map((name) => `--${name} …`).join(' ')}`
}
