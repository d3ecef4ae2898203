import { REQUEST_HEADER, RESPONSE_HEADER } from '../core/headers.ts'

const REQUEST_LINES = Object.values(REQUEST_HEADER).join('|').toLowerCase()
const RESPONSE_LINES = Object.values(RESPONSE_HEADER).join('|').toLowerCase()

/** Headers that a connection makes, or this proxy: what a client sends in them reaches no upstream. */
const MADE_HERE = `cdn-loop|connection|content-length|expect|forwarded|host|http2-settings|${REQUEST_LINES}|keep-alive|proxy-.*|te|trailer|transfer-encoding|upgrade|via|x-forwarded-.*`

/** Headers with a meaning of their own: a key in their place would change what the request says, or who sends it. */
export const TAKEN = new RegExp(
  `^(?:${MADE_HERE}|accept(?:-.*)?|api-key|authorization|cache-control|ce-.*|content-.*|cookie|date|${RESPONSE_LINES}|if-.*|origin|range|referer|repeatability-first-sent|sec-.*|traceparent|tracestate|user-agent|x-api-key|x-http-method-override|x-real-ip)$`,
  'i',
)

/** As `key.from` names them. */
export const SOURCE_MADE_HERE = new RegExp(`^header:(?:${MADE_HERE})$`, 'i')
