import type { Following } from '../../src/upstream/response-parser.ts'

export const OK = 'HTTP/1.1 200 OK\r\n'
export const LENGTH = 'Content-Length: 2\r\n'
export const CHUNKED = `${OK}Transfer-Encoding: chunked\r\n\r\n`

/** Answers with the body `ok` that nginx and curl carry, but for the one with an empty line before it, and what may follow each. `head`: as reported. */
export const CARRIED: readonly (readonly [bytes: string, following: Following, head?: string])[] = [
  [`${OK}${LENGTH}\r\nok`, 'explicit'],
  [`${OK}Content-Length:\t2 \t\r\n\r\nok`, 'explicit'],
  ['HTTP/1.1 200 OK\nContent-Length: 2\nX: y\n\nok', 'nothing', '200|OK|Content-Length|2|X|y'],
  ['HTTP/1.1 200 OK\r\nContent-Length: 2\n\r\nok', 'nothing'],
  ['HTTP/1.1 200 OK\nContent-Length: 2\r\n\nok', 'nothing'],
  ['HTTP/1.1 100 Continue\n\nHTTP/1.1 200 OK\nContent-Length: 2\n\nok', 'nothing'],
  [`${OK}${LENGTH}${LENGTH}\r\nok`, 'nothing', '200|OK|Content-Length|2'],
  [`${OK}Content-Length: 2, 2\r\n\r\nok`, 'nothing', '200|OK|Content-Length|2'],
  [`${OK}Content-Length: 00000000000000000002\r\n\r\nok`, 'explicit'],
  [
    `${OK}Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n`,
    'nothing',
    '200|OK|Transfer-Encoding|chunked',
  ],
  [
    `${OK}Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n2\r\nok\r\n0\r\n\r\n`,
    'nothing',
    '200|OK|Transfer-Encoding|chunked',
  ],
  [`${CHUNKED}2\r\nok\r\n0\r\n\r\n`, 'explicit'],
  [`${OK}transfer-encoding: CHUNKED\r\n\r\n2\r\nok\r\n0\r\n\r\n`, 'explicit'],
  [`${OK}Transfer-Encoding:\tchunked\t\r\n\r\n2\r\nok\r\n0\r\n\r\n`, 'explicit'],
  [`${OK}Transfer-Encoding: chunked, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n`, 'nothing'],
  [`${OK}Transfer-Encoding: chunked, \r\n\r\n2\r\nok\r\n0\r\n\r\n`, 'nothing'],
  [`${OK}Transfer-Encoding: chunked, identity\r\n\r\n2\r\nok\r\n0\r\n\r\n`, 'nothing'],
  [`${OK}Transfer-Encoding: identity, ,chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n`, 'nothing'],
  [`${OK}Transfer-Encoding: identity\r\n${LENGTH}\r\nok`, 'nothing'],
  [`${OK}Transfer-Encoding:\r\n\r\nok`, 'nothing'],
  [
    'HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n',
    'nothing',
  ],
  [`${OK}\r\nok`, 'nothing'],
  [`${OK}X(1): y\r\nX\xc3\xa9: z\r\n${LENGTH}\r\nok`, 'nothing', '200|OK|Content-Length|2'],
  [`HTTP/1.1  200 OK\r\n${LENGTH}\r\nok`, 'nothing', '200|OK|Content-Length|2'],
  [`HTTP/1.1 200\r\n${LENGTH}\r\nok`, 'explicit', '200||Content-Length|2'],
  [`\r\n${OK}${LENGTH}\r\nok`, 'nothing'],
  [`${OK}Transfer-Encoding: chunked\r\n\r\n2\nok\n0\n\n`, 'nothing'],
  [`${CHUNKED}2\r\nok\n0\r\n\r\n`, 'nothing'],
  [`${CHUNKED}2  \r\nok\r\n0 \r\n\r\n`, 'nothing'],
  [`${CHUNKED}1\t\r\no\r\n1 ;a\r\nk\r\n0\t\r\n\r\n`, 'nothing'],
  [`${CHUNKED}2;a=;;"=\x01\r\nok\r\n0;z\r\n\r\n`, 'nothing'],
  [`${CHUNKED}0000000000000002\r\nok\r\n00000\r\n\r\n`, 'explicit'],
  [`${CHUNKED}2\r\nok\r\n0\r\nX-T: 1\r\n\r\n`, 'explicit'],
  [`${CHUNKED}2\r\nok\r\n0\r\nX-T: 1\n\n`, 'nothing'],
  [`${CHUNKED}2\r\nok\r\n0\r\nX-T: 1\r\nContent-Length: 9\r\n\r\n`, 'nothing'],
  [`${CHUNKED}2\r\nok\r\n0\r\nX-T: 1\r\nX: \x01\r\nNone\r\nY : 2\r\n folded\r\n\r\n`, 'nothing'],
]
