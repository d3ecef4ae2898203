import type { Millis } from '../core/record.ts'
import { VERSION } from '../version.ts'
import { type CheckResult, finding } from './check-result.ts'
import type { RecordSource } from './record-source.ts'

const TIMEOUT: Millis = 10_000
/** What a store's grade means (contract §13). */
const GRADES = ['unfit', 'volatile', 'unknown', 'strict']

/** What a running proxy tells of itself. */
export async function proxyChecks(source: RecordSource, origin: string): Promise<CheckResult[]> {
  const token = await source.ask({ method: 'GET', path: '/v1/config' })
  if (!token.ok && token.code === 'unreachable')
    return [{ check: 'proxy', found: 'finding', detail: `${origin} does not answer: ${token.detail}` }]
  const ready = await get(`${origin}/readyz`)
  const samples = samplesOf((await get(`${origin}/metrics`))?.text ?? '')
  return [
    { check: 'proxy', found: 'fine', detail: `${origin} answers` },
    token.ok
      ? { check: 'proxy token', found: 'fine', detail: 'opens the admin API' }
      : { check: 'proxy token', found: 'finding', detail: `${token.code}: ${token.detail}` },
    ready === null || ready.status !== 200
      ? {
          check: 'proxy readiness',
          found: 'finding',
          detail: `not ready: ${ready?.text.trim() ?? 'no answer'}`,
        }
      : { check: 'proxy readiness', found: 'fine', detail: 'ready' },
    ...samples.flatMap(sampleCheck),
  ]
}

interface Sample {
  readonly name: string
  readonly labels: string
  readonly value: number
}

/** Gauges that show trouble; what is as it should be is left out, but for the version. */
function sampleCheck({ name, labels, value }: Sample): CheckResult[] {
  switch (name) {
    case 'idempotency_build_info': {
      const version = /version="([^"]*)"/.exec(labels)?.[1] ?? '?'
      const same = version === VERSION
      const detail = same ? version : `${version}; this command is ${VERSION}`
      return [{ check: 'proxy version', found: same ? 'fine' : 'note', detail }]
    }
    case 'idempotency_store_up':
      return value === 1 ? [] : [finding('proxy store', 'the store does not answer it')]
    case 'idempotency_breaker_state':
      return value === 0
        ? []
        : [finding('proxy store', 'its breaker is open: protected requests are refused')]
    case 'idempotency_store_grade':
      return value === 3
        ? []
        : [finding('proxy store', `its store is graded ${GRADES[value] ?? value}, not strict`)]
    case 'idempotency_spooled':
      return value === 0 ? [] : [finding('proxy spool', `${value} outcomes wait for the store`)]
    default:
      return []
  }
}

function samplesOf(text: string): Sample[] {
  return text.split('\n').flatMap((line) => {
    const [, name, labels = '', value] = /^(\w+)(?:\{(.*)\})? (\S+)$/.exec(line) ?? []
    return name === undefined ? [] : [{ name, labels, value: Number(value) }]
  })
}

async function get(url: string): Promise<{ readonly status: number; readonly text: string } | null> {
  try {
    const response = await fetch(url, { signal: AbortSignal.timeout(TIMEOUT), redirect: 'error' })
    return { status: response.status, text: await response.text() }
  } catch {
    return null
  }
}
