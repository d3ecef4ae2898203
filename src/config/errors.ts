/** Line and column start at 1; line 0: not from a file (a flag, or nothing is written). */
export interface SourcePosition {
  readonly file: string
  readonly line: number
  readonly column: number
}

export interface ConfigError extends SourcePosition {
  /** Such as `routes[2].lease`; empty for the document as a whole. */
  readonly path: string
  readonly message: string
}

/** `file:line:col: routes[2].lease: found …; allowed: …` */
export function formatConfigError({ file, line, column, path, message }: ConfigError): string {
  const place = line > 0 ? `${file}:${line}:${column}` : file
  return [place, path, message].filter((part) => part !== '').join(': ')
}

function isWithin(path: string, parent: string): boolean {
  return path === parent || path.startsWith(`${parent}.`) || path.startsWith(`${parent}[`)
}

/** The errors of a configuration, and where each of its properties was written. */
export class Findings {
  readonly #document: SourcePosition
  readonly #errors: ConfigError[] = []
  readonly #written = new Map<string, SourcePosition>()

  constructor(file: string) {
    this.#document = { file, line: 0, column: 0 }
  }

  note(path: string, place: SourcePosition): void {
    this.#written.set(path, place)
  }

  isWritten(path: string): boolean {
    return this.#written.has(path)
  }

  /** ` (line 3)`; empty where it was not written in a file. */
  lineOf(path: string): string {
    const { line } = this.#placeOf(path)
    return line > 0 ? ` (line ${line})` : ''
  }

  /** The position of the property, else of its nearest parent, else of the document. */
  #placeOf(path: string): SourcePosition {
    const parent = path.replace(/(\.[^.[]+|\[\d+\])$/, '')
    return this.#written.get(path) ?? (parent === path ? this.#document : this.#placeOf(parent))
  }

  /** Returns `undefined`, so that a reader can return it. */
  add(path: string, message: string, place: SourcePosition = this.#placeOf(path)): undefined {
    this.#errors.push({ ...place, path, message })
    return undefined
  }

  /**
   * Values that conflict, reported at the first of `paths` that is written. Silent if one of them could not be read: the check used a
   * default.
   */
  conflict(paths: readonly string[], message: string): void {
    const unread = paths.some((path) =>
      this.#errors.some((e) => isWithin(path, e.path) || isWithin(e.path, path)),
    )
    if (!unread) this.add(paths.find((path) => this.isWritten(path)) ?? paths[0] ?? '', message)
  }

  /** In file order. A value written once, under an anchor or in `defaults`, is reported once. */
  sorted(): ConfigError[] {
    const unique = new Map(this.#errors.map((error) => [formatConfigError(error), error]))
    return [...unique.values()].toSorted((a, b) => a.line - b.line || a.column - b.column)
  }
}
