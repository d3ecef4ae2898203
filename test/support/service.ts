import { LISTEN } from './front.ts'

/** The service for a configuration without one. */
export const SERVICE = 'test'

/** Shared stores require a service; one in the configuration stays. */
export function serviceLine(yaml: string): string {
  return /^service:/m.test(yaml) || !/(?:rediss?|postgres(?:ql)?):\/\//.test(yaml)
    ? ''
    : `service: ${SERVICE}\n`
}

/** A shared store that is flushed or replaced holds claims for a while; only tests of that want it. */
export function withoutGrace(yaml: string): string {
  if (/\bgrace:/.test(yaml) || !/\b(rediss?|postgres(ql)?)[+:]/.test(yaml)) return yaml
  return yaml.replace(/^store: \{ /m, 'store: { grace: off, ').replace(/^store:\n/m, 'store:\n  grace: off\n')
}

/** Set by suites that also run on Node's reader of requests and undici's pool: what these do otherwise is in docs/adr/0128. */
export const IS_STOCK = process.env['TRAFFIC_HTTP'] === 'node'

/** The configuration with free ports to listen on and, if it has none, a `service`. */
export function headed(yaml: string): string {
  const admin = /^admin:/m.test(yaml) ? '' : 'admin: { listen: "127.0.0.1:0" }\n'
  const listen = /^listen:/m.test(yaml) ? '' : `listen: ${LISTEN}\n`
  return `${listen}${IS_STOCK ? 'http: node\n' : ''}${admin}${serviceLine(yaml)}${withoutGrace(yaml)}`
}
