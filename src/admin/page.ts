import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'

/** A file of the operators' page, as it is sent. */
export interface PageFile {
  readonly body: Buffer
  readonly headers: Readonly<Record<string, string>>
}

/** Paths on the admin listener, each a file beside this one. */
const FILES: Readonly<Record<string, string>> = {
  '/': 'index.html',
  '/page.css': 'page.css',
  ...Object.fromEntries(
    [
      'page',
      'api',
      'counters',
      'decide',
      'dom',
      'metrics',
      'queue',
      'record',
      'routes',
      'search',
      'words',
    ].map((name) => [`/${name}.js`, `${name}.js`]),
  ),
}

const TYPES: Readonly<Record<string, string>> = {
  html: 'text/html; charset=utf-8',
  css: 'text/css; charset=utf-8',
  js: 'text/javascript; charset=utf-8',
}

/** Nothing but its own files, nothing written into it, and in nobody's frame. */
const POLICY = [
  "default-src 'none'",
  "script-src 'self'",
  "style-src 'self'",
  "connect-src 'self'",
  "img-src 'self' data:",
  "base-uri 'none'",
  "form-action 'none'",
  "frame-ancestors 'none'",
].join('; ')

/**
 * The operators' page, read once (contract §12 `/`). A browser sends no token with its first request, and these files hold no
 * data: they are served to everybody who reaches the listener, and ask the API with the token of whoever opened them.
 */
export function readPage(): ReadonlyMap<string, PageFile> {
  return new Map(
    Object.entries(FILES).map(([path, name]) => {
      const body = readFileSync(new URL(`page/${name}`, import.meta.url))
      const hash = createHash('sha256').update(body).digest('base64url').slice(0, 22)
      const headers = {
        'content-type': TYPES[name.split('.')[1] as string] as string,
        'content-length': String(body.length),
        etag: `"${hash}"`,
        'cache-control': 'no-cache',
        'content-security-policy': POLICY,
        'x-content-type-options': 'nosniff',
        'referrer-policy': 'no-referrer',
      }
      return [path, { body, headers }]
    }),
  )
}
