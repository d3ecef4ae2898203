import { isUtf8 } from 'node:buffer'
import { SHORT_BODY } from './json-text.ts'
import { MODULE } from './json-usual-wasm.ts'

/** The exports of assembly/json-usual.ts. */
interface Exports {
  readonly memory: { readonly buffer: ArrayBuffer }
  readonly bodyAt: () => number
  readonly textAt: () => number
  readonly read: (length: number) => number
}

/** TypeScript declares it only in the DOM library. */
interface WebAssemblyNamespace {
  readonly Module: new (bytes: Buffer) => object
  readonly Instance: new (module: object) => { readonly exports: unknown }
}

/** Reads the JSON that most clients send, sixteen bytes at a time (docs/adr/0098). */
export class UsualJson {
  readonly #memory: Uint8Array
  readonly #bodyAt: number
  readonly #textAt: number
  readonly #read: (length: number) => number

  /** Null: WebAssembly is switched off (`--jitless`), has no vectors, or may not reserve its addresses (`ulimit -v`). */
  static load(scope: object = globalThis): UsualJson | null {
    try {
      const { WebAssembly: wasm } = scope as { WebAssembly: WebAssemblyNamespace }
      const module = new wasm.Module(Buffer.from(MODULE, 'base64'))
      return new UsualJson(new wasm.Instance(module).exports as Exports)
    } catch {
      return null
    }
  }

  private constructor({ memory, bodyAt, textAt, read }: Exports) {
    this.#memory = new Uint8Array(memory.buffer)
    this.#bodyAt = bodyAt()
    this.#textAt = textAt()
    this.#read = read
  }

  /**
   * The result of `canonicalJson`, which the next call overwrites; the body itself if it is canonical. Null: the body is longer than
   * {@link SHORT_BODY}, not JSON, or contains something rare.
   */
  textOf(body: Buffer): Buffer | null {
    if (body.length > SHORT_BODY || !isUtf8(body)) return null
    this.#memory.set(body, this.#bodyAt)
    const length = this.#read(body.length)
    if (length < 0) return body
    return length === 0 ? null : Buffer.from(this.#memory.buffer, this.#textAt, length)
  }
}
