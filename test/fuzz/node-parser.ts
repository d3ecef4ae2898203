import { createRequire } from 'node:module'

/** Node's own parser of HTTP, as `node:http` uses it. */
export interface NodeParser {
  initialize(type: number, resource: object): void
  execute(bytes: Buffer): number | Error
  /** The connection has ended. */
  finish(): number | Error | undefined
  [callback: number]: unknown
}
interface ParserClass {
  new (): NodeParser
  readonly REQUEST: number
  readonly RESPONSE: number
  readonly kOnHeaders: number
  readonly kOnHeadersComplete: number
  readonly kOnBody: number
  readonly kOnMessageComplete: number
}
export const { HTTPParser, methods } = createRequire(import.meta.url)('_http_common') as {
  readonly HTTPParser: ParserClass
  readonly methods: readonly string[]
}
