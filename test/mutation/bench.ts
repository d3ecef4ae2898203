import { type ChildProcess, fork } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import type { Mutant } from './mutants.ts'
import type { Covered, Order, Report } from './runner.ts'

/** After so many runs its modules fill the memory. */
const MOST_RUNS = 60
/** A process that was told to tidy up after a failure. */
const TIDYING = 2000
const NO_START = 'the process for the tests does not start'

export interface Verdict {
  /** The test that noticed; null: none did. */
  readonly by: string | null
  readonly why: string
}

export interface Ran {
  readonly test: string
  readonly time: number
  readonly covered: Covered
}

/** Runs test files on mutants in another process, and replaces that where it is stuck, dead or full. */
export class Bench {
  #process: ChildProcess | null = null
  #runs = 0

  close(): void {
    this.#end()
  }

  /** Until the first test that fails. `patience`: how long each may take, in ms; a test that takes longer has noticed the mutant. */
  async run(
    mutant: Mutant | null,
    tests: readonly string[],
    patience: (test: string) => number,
  ): Promise<Verdict> {
    const wasFresh = this.#process === null
    let verdict: Verdict = { by: null, why: '' }
    try {
      await this.#order({ mutant, tests, isCovered: false }, patience, (report) => {
        if (report.kind === 'failed') verdict = { by: report.test, why: report.why }
      })
    } catch (error) {
      if (!(error instanceof Stuck)) throw error
      // What ended the process may be left from runs before: only a new one can say.
      if (verdict.by === null && error.hasEnded && !wasFresh) return this.run(mutant, tests, patience)
      if (error.message === NO_START) throw error
      if (verdict.by === null) verdict = { by: error.test, why: error.message }
    }
    return verdict
  }

  /**
   * What a test executes, and how long it takes, in a process of its own. Its time is that of a second run, if it survives one: loading it and
   * recording what it executes take longer than the test. Throws where it does not pass.
   */
  async cover(test: string): Promise<Ran> {
    this.#end()
    let ran: Ran | null = null
    const run = (isCovered: boolean): Promise<void> =>
      this.#order(
        { mutant: null, tests: [test], isCovered },
        () => 300_000,
        (report) => {
          if (report.kind === 'failed') throw new Error(`${test} fails without a mutant: ${report.why}`)
          if (report.kind !== 'ended') return
          ran = {
            test,
            time: Math.min(report.time, ran?.time ?? report.time),
            covered: ran?.covered ?? report.covered ?? {},
          }
        },
      )
    await run(true)
    await run(false).catch(() => {})
    this.#end()
    return ran as unknown as Ran
  }

  #order(order: Order, patience: (test: string) => number, hear: (report: Report) => void): Promise<void> {
    if (this.#runs > MOST_RUNS) this.#end()
    const process = (this.#process ??= start())
    return new Promise((resolve, reject) => {
      let test = order.tests[0] ?? ''
      let hasStarted = false
      let timer: NodeJS.Timeout | undefined
      const stop = (error: Error | null): void => {
        clearTimeout(timer)
        process.off('message', onReport).off('exit', onExit)
        if (error === null) resolve()
        else {
          this.#end()
          reject(error)
        }
      }
      const wait = (time: number, why: string): void => {
        clearTimeout(timer)
        timer = setTimeout(() => stop(new Stuck(test, why, false)), time)
      }
      const onExit = (code: number | null, signal: NodeJS.Signals | null): void => {
        const why = code === 9 ? 'nothing was left to wait for' : `the process ended with ${code ?? signal}`
        stop(new Stuck(test, hasStarted ? why : NO_START, true))
      }
      const onReport = (report: Report): void => {
        try {
          hear(report)
        } catch (error) {
          stop(error as Error)
          return
        }
        if (report.kind === 'started') {
          test = report.test
          hasStarted = true
          this.#runs++
          wait(patience(test), 'it took too long')
        } else if (report.kind === 'failed') wait(TIDYING, 'it did not tidy up')
        else if (report.kind === 'idle') stop(null)
      }
      process.on('message', onReport).on('exit', onExit)
      // A process that a run before left dying.
      process.send(order, (error) => error !== null && stop(new Stuck(test, NO_START, true)))
    })
  }

  /** With all that its tests have started. */
  #end(): void {
    const pid = this.#process?.pid
    this.#process = null
    this.#runs = 0
    if (pid === undefined) return
    try {
      process.kill(-pid, 'SIGKILL')
    } catch {
      // It has ended by itself.
    }
  }
}

class Stuck extends Error {
  readonly test: string
  /** The process is gone, and not only late. */
  readonly hasEnded: boolean
  constructor(test: string, why: string, hasEnded: boolean) {
    super(why)
    this.test = test
    this.hasEnded = hasEnded
  }
}

function start(): ChildProcess {
  return fork(fileURLToPath(new URL('runner.ts', import.meta.url)), {
    execArgv: ['--import', new URL('plant.ts', import.meta.url).href],
    stdio: ['ignore', 'ignore', process.env['MUTATION_DEBUG'] ? 'inherit' : 'ignore', 'ipc'],
    // A group of its own: servers and threads that tests have started end with it.
    detached: true,
    env: { ...process.env, NODE_V8_COVERAGE: '' },
  })
}
