/** Probes six APIs by the draft. `node test/probe/reports.ts` writes what it found into docs/guides/probe.md. */
import { readFileSync, writeFileSync } from 'node:fs'
import type { Report } from '../../src/probe/run.ts'
import { command } from '../support/commands.ts'
import {
  expressIdempotency,
  nodeIdempotency,
  powertools,
  type Target,
  unprotected,
} from '../support/probe-targets.ts'
import { PROBE_WORDS } from '../support/probed.ts'
import { proxyInProcess } from '../support/proxy.ts'

export const GUIDE = new URL('../../docs/guides/probe.md', import.meta.url)
const MARKED = /(?<=<!-- reports -->\n).*(?=<!-- end -->)/s

async function reportOf(url: string, countUrl: string, profile = 'ietf'): Promise<Report> {
  const { out, err } = await command([
    'probe',
    url,
    ...PROBE_WORDS,
    '--count-url',
    countUrl,
    '--profile',
    profile,
  ])
  if (err !== '') throw new Error(err)
  return JSON.parse(out) as Report
}

export async function proxied(path: string, profile = 'ietf'): Promise<Report> {
  await using api = await unprotected()
  const ours = profile === 'stripe' ? 'stripe' : 'standard'
  const yaml = `upstream: { url: "${api.url}" }\nstore: { url: "memory:" }\ndefaults: { profile: ${ours} }\n`
  await using proxy = await proxyInProcess(yaml)
  return await reportOf(`${proxy.url}${path}`, `${api.url}/count`, profile)
}

export async function direct(
  start: () => Promise<Target>,
  path = '/orders',
  profile = 'ietf',
): Promise<Report> {
  await using api = await start()
  return await reportOf(`${api.url}${path}`, `${api.url}/count`, profile)
}

export async function sixReports(): Promise<Readonly<Record<string, Report>>> {
  return {
    'this proxy': await proxied('/orders'),
    'this proxy, a stream': await proxied('/events'),
    nothing: await direct(unprotected),
    'express-idempotency': await direct(expressIdempotency),
    '@node-idempotency/core': await direct(nodeIdempotency),
    Powertools: await direct(powertools),
  }
}

function tableOf(reports: Readonly<Record<string, Report>>): string {
  const [first] = Object.values(reports) as [Report]
  const rows = first.cases.map(({ id }) => [
    `\`${id}\``,
    ...Object.values(reports).map(({ cases }) => {
      const { verdict, outcomes } = cases.find((one) => one.id === id) as Report['cases'][number]
      const found = [...new Set(outcomes)].join(', ')
      return verdict === 'passed' ? '✓' : verdict === 'failed' ? `**${found}**` : found
    }),
  ])
  return [['case', ...Object.keys(reports)], rows[0]?.map(() => '-') ?? [], ...rows]
    .map((cells) => `|${cells.join('|')}|\n`)
    .join('')
}

export function withReports(text: string, reports: Readonly<Record<string, Report>>): string {
  return text.replace(MARKED, `\n${tableOf(reports)}\n`)
}

if (import.meta.main) {
  writeFileSync(GUIDE, withReports(readFileSync(GUIDE, 'utf8'), await sixReports()))
  process.exit()
}
