import type { RoutePolicy } from '../core/policy.ts'
import { normalisePath, WELL_KNOWN } from '../core/route.ts'
import type { Findings } from './errors.ts'

/** What is of use under a condition alone. */
interface Use {
  readonly property: string
  readonly isUsedBy: (policy: RoutePolicy) => boolean
  readonly message: string
}

const USES: readonly Use[] = [
  {
    property: 'inFlight.wait',
    isUsedBy: ({ inFlight }) => inFlight.mode === 'wait',
    message: 'found a wait where nothing waits; allowed: it with `inFlight.mode: wait`',
  },
  {
    property: 'scope.jwt',
    isUsedBy: ({ scope }) => scope.jwt !== null,
    message: 'found jwt where no caller comes from a token; allowed: it with a `scope.caller` of jwt:<claim>',
  },
]

/**
 * Nothing is ignored (contract §10): what a route says must be of use to it, and what `defaults` says to one of those that
 * start from there.
 */
export function checkUses(findings: Findings, defaults: RoutePolicy, routes: readonly RoutePolicy[]): void {
  const bases = [
    { base: 'defaults', users: [defaults, ...routes] },
    ...routes.map((route, i) => ({ base: `routes[${i}]`, users: [route] })),
  ]
  for (const { property, isUsedBy, message } of USES) {
    for (const { base, users } of bases) {
      const path = `${base}.${property}`
      if (!findings.isWritten(path) || users.some(isUsedBy)) continue
      // Not where what would use it could not be read.
      const section = property.split('.')[0] as string
      findings.conflict([path, ...bases.map((each) => `${each.base}.${section}`)], message)
    }
  }
}

/** Paths that the proxy answers itself go before every route, so that no route may have one of them alone. */
export function checkOwnPaths(
  findings: Findings,
  status: string | null,
  issuer: string | null,
  wellKnown: boolean,
  routes: readonly RoutePolicy[],
): void {
  if (status !== null && status === issuer) {
    findings.conflict(
      ['issuer.path', 'status.path'],
      `found ${JSON.stringify(status)} for both \`status.path\` and \`issuer.path\`; allowed: a path of its own for each`,
    )
  }
  if (wellKnown && status === WELL_KNOWN) {
    findings.conflict(
      ['status.path', 'wellKnown'],
      `found ${JSON.stringify(WELL_KNOWN)}, which \`wellKnown\` answers; allowed: another path`,
    )
  }
  for (const { path, property, method } of [
    { path: status, property: 'status.path', method: 'GET' },
    { path: issuer, property: 'issuer.path', method: 'POST' },
    { path: wellKnown ? WELL_KNOWN : null, property: 'wellKnown', method: 'GET' },
  ]) {
    for (const [i, { match }] of routes.entries()) {
      if (path === null || !match.methods.includes(method) || !isAlone(match.path, path)) continue
      findings.conflict(
        [`routes[${i}].match`, property],
        `found a match whose ${method} requests no route gets, since \`${property}\` is ${JSON.stringify(path)}; allowed: another path, or other methods`,
      )
    }
  }
}

/** A pattern may well match more: then the rest is what it is there for. */
function isAlone(pattern: string, path: string): boolean {
  return !/\/(:|\*$)/.test(pattern) && normalisePath(pattern) === path
}
