/**
 * `npm run soak`: sends an hour's mixed traffic (at 100 requests per second) as fast as this machine takes it, and checks the
 * remains. Exit 1 if something has grown, was executed twice or is unexplained. See docs/proof.md.
 *
 *   --quick          a twentieth of it: checks that everything works
 *   --minutes N      spreads the requests evenly over N minutes
 *   --requests N --samples N --warm-up N --lanes N
 *   --snapshots DIR  two heap snapshots to compare, after the warm-up and at the end
 *   --no-build       uses the JavaScript built before
 */
import { join, resolve } from 'node:path'
import { parseArgs } from 'node:util'
import { build, ROOT } from '../../scripts/build.ts'
import { proxyCommand } from '../candidates.ts'
import { tableHead, tableRow, told, verdict } from './report.ts'
import { soak } from './soak.ts'
import { growth } from './verdict.ts'

const HOUR = 360_000

const { values: flags } = parseArgs({
  options: {
    quick: { type: 'boolean', default: false },
    minutes: { type: 'string', default: '0' },
    requests: { type: 'string' },
    samples: { type: 'string' },
    'warm-up': { type: 'string' },
    lanes: { type: 'string', default: '96' },
    snapshots: { type: 'string' },
    'no-build': { type: 'boolean', default: false },
  },
})

const dist = join(ROOT, '.bench/soak')
if (!flags['no-build']) await build(dist)
const samples = Number(flags.samples ?? (flags.quick ? 6 : 16))
const warmUp = Number(flags['warm-up'] ?? Math.floor(samples / 4))
const snapshots = flags.snapshots === undefined ? null : resolve(flags.snapshots)
const result = await soak({
  requests: Number(flags.requests ?? (flags.quick ? HOUR / 20 : HOUR)),
  samples,
  lanes: Number(flags.lanes),
  minutes: Number(flags.minutes),
  command: proxyCommand(dist, []),
  snapshot: (n) =>
    snapshots !== null && (n === warmUp + 1 || n === samples)
      ? join(snapshots, `soak-${n}.heapsnapshot`)
      : null,
  say: (sample) => void process.stderr.write(`${tableRow(sample)}\n`),
})
process.stdout.write(`${tableHead()}\n${result.samples.map(tableRow).join('\n')}\n\n${told(result)}\n\n`)
const findings = [...growth(result.samples, warmUp), ...result.findings]
process.stdout.write(`${verdict(result.samples, warmUp, findings)}\n`)
process.exitCode = findings.length === 0 ? 0 : 1

/** The built JavaScript. */
