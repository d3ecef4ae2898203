/** The service of a configuration that names none. */
export const SERVICE = 'test'

/** Shared stores need a name; a configuration that brings its own keeps it. */
export function serviceLine(yaml: string): string {
  return /^service:/m.test(yaml) || !/rediss?:\/\//.test(yaml) ? '' : `service: ${SERVICE}\n`
}
