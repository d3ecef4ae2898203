import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { connect } from 'node:tls'
import type { Config } from '../config/config.ts'
import { Findings, formatConfigError } from '../config/errors.ts'
import { readUpstreamTls } from '../config/files.ts'
import { parametersIn } from '../core/reconcile/answer.ts'
import type { Millis, RecordId } from '../core/record.ts'
import { policiesOf } from '../core/route.ts'
import { askOnce, reconcileOf } from '../reconcile/ask.ts'
import { Budget } from '../runtime/limits.ts'
import { forwarder } from '../upstream/forward.ts'
import { Habits } from '../upstream/habits.ts'
import { openUpstream, type Upstream } from '../upstream/pool.ts'
import type { Forward } from '../upstream/port.ts'
import { shownUrl } from './record-source.ts'

/** `note`: worth knowing, such as a deliberate choice, or something that cannot be checked from here. */
export interface CheckResult {
  readonly check: string
  readonly found: 'fine' | 'note' | 'finding'
  readonly detail: string
}

const result =
  (found: CheckResult['found']) =>
  (check: string, detail: string): CheckResult => ({ check, found, detail })
export const fine = result('fine')
export const note = result('note')
export const finding = result('finding')

/** An upstream that takes longer is not healthy, whatever `upstream.timeout` says. */
const ANSWERS_WITHIN: Millis = 10_000

/** Asks the upstream: a connection, TLS, `OPTIONS *`, and each route's status query about a request that never existed. */
export async function upstreamChecks(config: Config): Promise<CheckResult[]> {
  const findings = new Findings('')
  const material = readUpstreamTls(findings, config.upstream.tls)
  if (material === null) return [finding('upstream', findings.sorted().map(formatConfigError).join('; '))]
  const upstream = await openUpstream(config.upstream, {
    material,
    habits: new Habits(config.upstream.keepAlive),
    mostHead: () => config.limits.responseHead,
  })
  try {
    const { checked, isUp } = await optionsChecks(config, upstream)
    return isUp ? [...checked, ...(await queryChecks(config, upstream))] : checked
  } finally {
    await upstream.close()
  }
}

interface Checked {
  readonly checked: CheckResult[]
  readonly isUp: boolean
}

/** As the proxy sends requests, so over HTTP/2 where it does. */
async function optionsChecks(config: Config, upstream: Upstream): Promise<Checked> {
  const where = shownUrl(config.upstream.url)
  const startedAt = performance.now()
  const options = { method: 'OPTIONS', target: '*', headers: [], body: Buffer.alloc(0), responseLimit: 0 }
  const result = await asking(config, upstream)({ ...options, stream: 'always' })
  const took = `${(performance.now() - startedAt).toFixed(1)} ms`
  if (result.proof === 'not_sent' || result.proof === 'unknown') {
    const isReached = result.proof === 'unknown' || result.isRefused === true
    const said = isReached ? 'accepts a connection but does not answer OPTIONS *' : 'cannot be reached'
    return { checked: [finding('upstream', `${where} ${said}: ${plainReason(result.reason)}`)], isUp: false }
  }
  if (result.proof === 'live') result.live.abandon()
  const { status } = result.proof === 'live' ? result.live : result.response
  const over = upstream.isHttp2 ? ' over HTTP/2' : ''
  const detail = `${where} answers OPTIONS * with ${status}${over} in ${took}${await tlsText(upstream)}`
  // With these statuses, a gateway says that nothing is behind it.
  const isGateway = status === 502 || status === 503 || status === 504
  return { checked: [(isGateway ? finding : fine)('upstream', detail)], isUp: true }
}

/** Says what to do if the two ends speak different protocols. */
function plainReason(reason: string): string {
  const [, why] = /SSL routines:[^:]*:([^:]+)/.exec(reason) ?? []
  if (why !== undefined) return `it does not speak TLS, or no version that this proxy accepts (${why})`
  return reason.includes('not HTTP/1.1') ? `${reason}; it may want https://` : reason
}

/** Version and certificate of the upstream's TLS. */
async function tlsText({ origin, address, tls, isHttp2 }: Upstream): Promise<string> {
  if (origin.protocol !== 'https:') return ''
  const socket = connect({ ...address, ...tls, ...(isHttp2 ? { ALPNProtocols: ['h2'] } : {}) })
  try {
    await once(socket, 'secureConnect', { signal: AbortSignal.timeout(ANSWERS_WITHIN) })
    const { subject, valid_to: until } = socket.getPeerCertificate()
    return ` (${socket.getProtocol()}, certificate of ${[subject.CN ?? 'no common name'].flat().join(', ')}, valid until ${until})`
  } catch {
    return ''
  } finally {
    socket.destroy()
  }
}

function asking({ upstream: { timeout, idleTimeout }, limits }: Config, { dispatcher }: Upstream): Forward {
  return forwarder(dispatcher, {
    timeout: () => Math.min(ANSWERS_WITHIN, timeout),
    idleTimeout,
    budget: new Budget(limits.buffered),
  })
}

async function queryChecks(config: Config, upstream: Upstream): Promise<CheckResult[]> {
  const forward = asking(config, upstream)
  const checked: CheckResult[] = []
  for (const route of policiesOf(config)) {
    const policy = reconcileOf(route)
    if (policy === null) continue
    const canary = `canary-${randomBytes(27).toString('base64url')}`
    const parameters = new Map(parametersIn(policy).map((name) => [name, canary]))
    const asked = await askOnce(
      { forward },
      { id: canary as RecordId, key: canary, parameters, route, policy },
    )
    const query = `route ${route.name}: ${policy.request.method} ${policy.request.path.split('?')[0]}`
    if (asked.kind === 'not_found')
      checked.push(fine('status query', `${query} does not find a request that never existed`))
    else if (asked.kind === 'completed')
      checked.push(
        finding('status query', `${query} finds a request that never existed: its answers prove nothing`),
      )
    // Without `notFound` it can only confirm what was done.
    else
      checked.push(
        (policy.notFound === null ? note : finding)(
          'status query',
          `${query} about a request that never existed: ${asked.why}`,
        ),
      )
  }
  return checked
}
