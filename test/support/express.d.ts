declare module 'express' {
  import type { IncomingMessage, RequestListener, ServerResponse } from 'node:http'
  export type Request = IncomingMessage & { readonly body: unknown; get(name: string): string | undefined }
  export type Response = ServerResponse & {
    status(code: number): Response
    set(headers: Readonly<Record<string, string>>): Response
    send(body: string): void
  }
  export type NextFunction = (error?: unknown) => void
  type Handler = (request: Request, response: Response, next: NextFunction) => unknown
  export interface Application extends RequestListener {
    set(name: string, value: string): void
    use(handler: Handler): void
    get(path: string, handler: Handler): void
    post(paths: readonly string[], ...handlers: readonly Handler[]): void
  }
  export default function express(): Application
  export function json(): Handler
}
