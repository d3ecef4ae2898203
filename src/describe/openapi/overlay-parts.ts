import { REFUSALS } from '../../core/refusal.ts'
import { type Json, member, type Pointer } from './read.ts'

/** What the overlay's components are called, so that none of the description's is overwritten. */
export interface Names {
  readonly problem: string
  readonly replayed: string
  readonly derived: string
  readonly status: string
  readonly expires: string
}

export function namesIn(root: Json): Names {
  const free = (section: string, name: string): string => {
    const taken = member(member(root, 'components'), section)
    let own = name
    for (let n = 2; member(taken, own) !== undefined; n++) own = `${name}${n}`
    return own
  }
  return {
    problem: free('schemas', 'IdempotencyProblem'),
    replayed: free('headers', 'IdempotentReplayed'),
    derived: free('headers', 'IdempotencyKeyDerived'),
    status: free('headers', 'IdempotencyStatus'),
    expires: free('headers', 'IdempotencyExpires'),
  }
}

export function reference(section: 'schemas' | 'headers', name: string): object {
  return { $ref: `#/components/${section}/${name}` }
}

/** In words that OpenAPI 3.0 and 3.1 both know. `baseUrl`: what the type of a problem begins with. */
export function componentsOf(names: Names, baseUrl: string): object {
  const text = { type: 'string' }
  return {
    headers: {
      [names.replayed]: {
        description:
          'This is the answer to the first request with the key; nothing was executed for this one.',
        schema: { type: 'string', enum: ['true'] },
      },
      [names.derived]: {
        description: 'The proxy made the key, since the request had none.',
        schema: { type: 'string', enum: ['true'] },
      },
      [names.status]: {
        description: 'What became of the request.',
        schema: { type: 'string', enum: ['executed', 'replayed', 'bypassed', 'ignored'] },
      },
      [names.expires]: {
        description: 'Until when the key is answered with this answer.',
        schema: { type: 'string', format: 'date-time' },
      },
    },
    schemas: {
      [names.problem]: {
        type: 'object',
        description: 'An answer of the proxy in front of the API (RFC 9457).',
        required: ['type', 'title', 'status', 'detail', 'code', 'retry'],
        properties: {
          type: { ...text, description: `${baseUrl} and the code.` },
          title: text,
          status: { type: 'integer' },
          detail: text,
          instance: { ...text, description: 'The id of the record of this key, for support.' },
          code: { type: 'string', enum: Object.keys(REFUSALS) },
          retry: {
            type: 'string',
            enum: ['same-key', 'new-key', 'no'],
            description:
              'What is safe: to send the same request with the same key again, only with a new key, or not at all.',
          },
          originalStatus: { type: 'integer', description: 'Of a first answer that was not kept.' },
          location: { ...text, description: 'Of a first answer that was not kept.' },
        },
      },
    },
  }
}

/** A JSONPath (RFC 9535) of one place. */
export function jsonPath(pointer: Pointer): string {
  return `$${pointer.map((name) => `['${quoted(name)}']`).join('')}`
}

function quoted(name: string): string {
  return name
    .replace(/[\\']/g, '\\$&')
    .replace(/\p{Cc}/gu, (control) => `\\u${control.charCodeAt(0).toString(16).padStart(4, '0')}`)
}
