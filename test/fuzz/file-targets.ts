import { writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { loadConfig } from '../../src/config/load.ts'
import { verifier } from '../../src/credentials/callers.ts'
import { exampleOf } from '../../src/describe/openapi/example.ts'
import { operationsOf } from '../../src/describe/openapi/operations.ts'
import { readDescription } from '../../src/describe/openapi/read.ts'
import { decodeRecord, encodeDraft } from '../../src/store/record/codec.ts'
import { CorruptRecord } from '../../src/store/register.ts'
import { entryFrame, readSegment } from '../../src/store/spool/log.ts'
import { decodeEntry } from '../../src/store/spool/outbox.ts'
import { bearer, NOW, POLICY, pair, token } from '../credentials/support.ts'
import { draft, newToken } from '../store/fixtures.ts'
import { same, type Target } from './engine.ts'

const issuer = await pair('ES256')
const GOOD = await token(issuer)
const JWT = { ...POLICY, keyFile: JSON.stringify({ keys: [issuer.jwk] }) }
const tokens = verifier([JWT], { clock: () => NOW })

/** Only the token itself is believed: no other header, payload or signature. */
export const jwt: Target = {
  name: 'jwt',
  files: ['credentials/'],
  seeds: [
    GOOD,
    `Bearer ${GOOD}`,
    `bearer  ${GOOD}`,
    'a.b.c',
    `${Buffer.from('{"alg":"none"}').toString('base64url')}.e30.`,
  ],
  // biome-ignore format: a list
  words: [
    '.', '=', 'eyJ', 'e30', 'Bearer ', ' ', 'none', '-', '_', '+', '/', '\t', GOOD.split('.')[0] as string,
    GOOD.split('.')[1] as string, GOOD.split('.')[2] as string,
  ],
  async check(input) {
    const text = input.toString('latin1')
    if (/[\r\n\0]/.test(text)) return
    for (const line of [text, `Bearer ${text}`]) {
      const verified = await tokens.verify(JWT, ['Authorization', line])
      if (verified.kind === 'refused' && text.length > 16 && verified.detail.includes(text))
        throw new Error('the token is quoted')
      if (verified.kind !== 'claims') continue
      const [head, payload] = line
        .trim()
        .replace(/^bearer[ \t]+/i, '')
        .split('.')
      same('the signed text', `${head}.${payload}`, GOOD.split('.', 2).join('.'))
      same('the claims', verified.claims['sub'], 'u1')
    }
    same('the good one', (await tokens.verify(JWT, bearer(GOOD))).kind, 'claims')
  },
}

const CONFIG = `upstream: { url: "http://127.0.0.1:3000", timeout: 5s }
store: { url: "memory:" }
routes:
  - name: pay
    match: { methods: [POST], path: /pay/:id }
    key: { presence: required, pattern: "^[a-z]+$" }
    outcomes: { "503": release, 5xx: unknown }
`

/** A configuration is read, or each error says where it is and what was found. */
export const config: Target = {
  name: 'config',
  files: ['config/'],
  seeds: [
    CONFIG,
    'upstream: { url: "unix:/a" }\ndefaults: { ttl: 7d, lease: 30s }\n',
    'listen: ${PORT:-1}\n',
  ],
  // biome-ignore format: a list
  words: [
    '\n', '  ', '- ', ': ', '{', '}', '[', ']', '"', "'", '#', '&a', '*a', '<<: *a', '!!binary ', '---\n',
    '|', '>', '${A}', '${A:-b}', 'null', '~', 'ttl: 1s', 'lease: -1s', '99999999999d', '1e3', '.inf',
    'routes:', 'defaults:', 'reconcile:', 'scope:', '__proto__:', 'constructor:', '\t', '\0', '\xc3\xa9',
    '? ',
  ],
  check(input) {
    const text = input.toString()
    const loaded = loadConfig({ file: 'f.yaml', text, env: { A: 'a' }, flags: {} })
    if (Object.hasOwn(Object.prototype, 'polluted'))
      throw new Error('the prototype of all objects has changed')
    if (loaded.ok) return
    if (loaded.errors.length === 0) throw new Error('refused without an error')
    for (const { message, line, column } of loaded.errors)
      if (message === '' || !(line >= 0 && column >= 0))
        throw new Error(`an error without a place: ${message}`)
  },
}

const OPENAPI = `openapi: 3.1.0
paths:
  /payments/{id}:
    parameters: [{ in: path, name: id, example: 1 }, { in: query, name: q, required: true, schema: { enum: [a] } }]
    post:
      operationId: pay
      parameters: [{ $ref: "#/components/parameters/K" }]
      requestBody: { content: { application/json: { schema: { properties: { a: { type: string } } } } } }
      responses: { "201": {} }
components:
  parameters: { K: { in: header, name: Idempotency-Key, schema: { type: string } } }
`
const described = join(tmpdir(), `fuzz-openapi-${process.pid}.yaml`)

/** A description is read, or refused with a place; examples of its operations are requests to its API. */
export const openapi: Target = {
  name: 'openapi',
  files: ['describe/openapi/'],
  seeds: [OPENAPI, '{"openapi":"3.0.3","paths":{}}', 'swagger: "2.0"\n'],
  // biome-ignore format: a list
  words: [
    '\n', '  ', '- ', ': ', '{', '}', '[', ']', '"', '$ref: ', '#/components/', '#/', '~1', '~0', 'paths:',
    'null', '&a', '*a', 'allOf:', '__proto__', '3.1', '\0', '{id}', 'x-',
  ],
  check(input) {
    writeFileSync(described, input)
    const read = readDescription(described)
    if (!read.ok && read.errors.some(({ message }) => message === ''))
      throw new Error('refused without a word')
    if (!read.ok) return
    for (const operation of operationsOf(read.description).found) {
      const made = exampleOf(read.description, operation)
      if (typeof made === 'object' && URL.parse(made.path, 'http://api')?.host !== 'api')
        throw new Error(`an example elsewhere: ${made.path}`)
    }
  },
}

const RECORDS = [
  draft('in_progress', newToken()),
  draft('completed', newToken()),
  draft('unknown', newToken()),
  draft('failed_retryable', newToken()),
].map(encodeDraft)

/** A record is read as it was written, or refused; what was read is written again as it was. */
export const record: Target = {
  name: 'record',
  files: ['store/record/codec'],
  seeds: RECORDS,
  words: ['IP', '\x01', '\0\0', '\xff\xff', '\x05', '\x02', 'key', 'told', '\0\x03key'],
  check(input) {
    try {
      const read = decodeRecord(Buffer.from(input))
      const { state, token: owner } = read
      if (
        owner.length !== 16 ||
        !['in_progress', 'completed', 'failed_retryable', 'unknown', 'expired'].includes(state)
      )
        throw new Error('half a record')
      const again = decodeRecord(encodeDraft(read))
      same('state', again.state, state)
      same('fingerprint', again.fingerprint, read.fingerprint)
    } catch (error) {
      if (!(error instanceof CorruptRecord)) throw error
    }
  },
}

const MARKER = Buffer.alloc(16, 7)
const PAYLOADS = [Buffer.from('one'), Buffer.alloc(40, 2), Buffer.from('three')]

/** Of a damaged file of the spool what is read was written: nothing else, nothing twice as long. */
export const spool: Target = {
  name: 'spool',
  files: ['store/spool/log', 'store/spool/outbox'],
  seeds: [Buffer.concat(PAYLOADS.map((payload, n) => entryFrame(MARKER, n, payload)))],
  words: [MARKER.toString('latin1'), '\0\0\0\0', '\xff\xff\xff\xff', '\x01', '\x02'],
  check(input) {
    const pieces = readSegment(Buffer.from(input), MARKER)
    let bytes = 0
    for (const piece of pieces) {
      if (piece.kind === 'entry' && !PAYLOADS.some((one) => one.equals(piece.payload)))
        throw new Error('an entry that nobody wrote')
      bytes += piece.kind === 'unreadable' ? piece.bytes : 0
    }
    if (bytes > input.length) throw new Error('more than there is')
    decodeEntry(input, 'payments', null)
  },
}
