import { isDeepStrictEqual } from 'node:util'
import { Findings, formatConfigError } from './errors.ts'
import { FileWatch } from './files.ts'

/** `problem`: why the files cannot be used; null: they were read again and are in force. */
export type OnRotation = (path: string, problem: string | null) => void

export interface RotatingSource<T> {
  /** The property that names the files, for messages. */
  readonly path: string
  readonly files: readonly string[]
  /** Null: they cannot be used, as the findings say. */
  readonly read: (findings: Findings) => T | null
  readonly changed?: (now: T) => void
  readonly onRotation: OnRotation
}

/** The content of secret files, read again when they change; unusable content is ignored (contract §15). */
export class Rotating<T> implements Disposable {
  readonly #source: RotatingSource<T>
  readonly #watches: readonly FileWatch[]
  #current: T

  /**
   * @param before stays in force if the files cannot be used yet.
   * @throws {Error} if they cannot, and there is nothing before.
   */
  constructor(source: RotatingSource<T>, before?: T) {
    this.#source = source
    // Watches before reading, so that no change is missed.
    this.#watches = source.files.map((file) => new FileWatch(file, () => this.#again()))
    try {
      this.#current = this.#read()
    } catch (error) {
      if (before === undefined) {
        this[Symbol.dispose]()
        throw error
      }
      this.#current = before
      source.onRotation(source.path, (error as Error).message)
    }
  }

  get current(): T {
    return this.#current
  }

  [Symbol.dispose](): void {
    for (const watch of this.#watches) watch[Symbol.dispose]()
  }

  #read(): T {
    const findings = new Findings('')
    const found = this.#source.read(findings)
    if (found === null) throw new Error(findings.sorted().map(formatConfigError).join('; '))
    return found
  }

  #again(): void {
    const { path, changed, onRotation } = this.#source
    try {
      const found = this.#read()
      if (isDeepStrictEqual(found, this.#current)) return
      this.#current = found
      changed?.(found)
      onRotation(path, null)
    } catch (error) {
      onRotation(path, (error as Error).message)
    }
  }
}
