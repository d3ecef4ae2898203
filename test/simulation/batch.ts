import { performance } from 'node:perf_hooks'
import { type Result, settingsText, simulate } from './run.ts'

export interface Batch {
  readonly runs: number
  readonly events: number
  readonly executions: number
  readonly answers: number
  /** Of this process. */
  readonly cpuSeconds: number
  /** The first that broke something; null: none did. */
  readonly broken: Result | null
}

const seconds = performance.now.bind(performance)

/** Runs one seed after the other until something breaks, there are no more, or the time is up, of the clock or of the CPU. */
export async function simulateAll(
  first: number,
  runs: number,
  { seconds: forSeconds = Number.POSITIVE_INFINITY, cpuSeconds = Number.POSITIVE_INFINITY } = {},
): Promise<Batch> {
  const began = process.cpuUsage()
  const until = seconds() + forSeconds * 1000
  const bugs: unknown[] = []
  const used = (): number => {
    const { user, system } = process.cpuUsage(began)
    return (user + system) / 1e6
  }
  const note = (bug: unknown): void => void bugs.push(bug)
  process.on('unhandledRejection', note)
  const { stackTraceLimit } = Error
  // A run throws hundreds of errors that nobody looks at.
  Error.stackTraceLimit = 0
  let [events, executions, answers, n] = [0, 0, 0, 0]
  let broken: Result | null = null
  try {
    for (; n < runs && broken === null && seconds() < until && used() < cpuSeconds; n++) {
      const result = await inMacrotask(() => simulate(first + n))
      events += result.events
      executions += result.executions
      answers += result.answers
      if (result.broken !== null) broken = result
      else if (bugs.length > 0)
        broken = {
          ...result,
          broken: { what: `a rejection that nobody hears: ${String(bugs[0])}`, about: null },
        }
    }
  } finally {
    Error.stackTraceLimit = stackTraceLimit
    process.off('unhandledRejection', note)
  }
  return { runs: n, events, executions, answers, cpuSeconds: used(), broken }
}

/** Promise reactions can be run by hand only where none is under way. */
function inMacrotask<T>(work: () => T): Promise<T> {
  return new Promise((resolve, reject) => {
    setImmediate(() => {
      try {
        resolve(work())
      } catch (error) {
        reject(error)
      }
    })
  })
}

/** The same run once more, told: what happened to the operation that went wrong, and to all of them. */
export async function timeline(seed: number): Promise<string> {
  const { lines, broken, scenario } = await inMacrotask(() => simulate(seed, true))
  const about = broken?.about ?? null
  const { first, replicas, hasSpool, weather } = scenario
  const rules = [
    `${replicas} replica(s)`,
    settingsText(first),
    `spool ${hasSpool ? 'on' : 'off'}`,
    ...Object.entries(weather).flatMap(([what, share]) =>
      share > 0 ? [`${what} ${(100 * share).toFixed(1)} %`] : [],
    ),
  ]
  const shown = lines.filter((line) => about === null || line.about === null || line.about === about)
  return [
    `seed ${seed}: ${broken === null ? 'nothing is wrong' : `${broken.what}${about === null ? '' : ` (${about})`}`}`,
    rules.join(', '),
    ...shown.map(({ at, by, what, about: whose }) => {
      const named = about === null && whose !== null ? `${whose}: ` : ''
      return `${(at / 1000).toFixed(4).padStart(10)} s  ${by.padEnd(10)}  ${named}${what}`
    }),
    '',
  ].join('\n')
}
