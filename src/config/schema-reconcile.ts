import { type Static, Type } from 'typebox'
import { TOKEN } from '../core/headers.ts'
import type { ScalarValue } from './scalars.ts'
import { choice, closed, orOff, scalar } from './schema-parts.ts'

/** A mapping of names that the file makes up. */
function mapOf<N extends 'jsonText' | 'headerText'>(
  pattern: string,
  name: N,
  what: string,
  description: string,
) {
  return Type.Unsafe<Readonly<Record<string, ScalarValue<N>>>>({
    type: 'object',
    patternProperties: { [pattern]: { $ref: `#/definitions/${name}` } },
    additionalProperties: false,
    $comment: what,
    description,
  })
}

const POINTER = '^(/([^~/]|~[01])*)+$'
const POINTERS = 'JSON pointers, such as /data/0/id'
const HEADER = `^${TOKEN}$`

const when = Type.Optional(
  mapOf(
    POINTER,
    'jsonText',
    POINTERS,
    'What the response must also contain: JSON pointers and their values.',
  ),
)
const status = scalar('answerStatus', 'Status of such a response; required.')

const request = Type.Object(
  {
    method: choice(
      ['GET', 'POST'],
      'Method of the status query; it has no body and must be free of side effects.',
      'GET',
    ),
    path: scalar(
      'questionTarget',
      'Where the upstream is asked; needed. `{key}` and `{record}` (the record id) stand in it, percent-encoded.',
    ),
    headers: Type.Optional(
      mapOf(
        HEADER,
        'headerText',
        'names of headers',
        'Headers of the question, its credentials among them; `{key}` and `{record}` stand in their values. Nothing of the client is sent.',
      ),
    ),
  },
  closed,
)

const completedPattern = Type.Object(
  {
    status,
    when,
    json: scalar(
      'jsonPart',
      'JSON pointer to what is kept as the answer of the request. Default: the whole body.',
    ),
    response: Type.Optional(
      Type.Object(
        {
          status: scalar('answerStatus', 'Status that it is replayed with. Default: that of the answer.'),
          headers: Type.Optional(
            mapOf(
              HEADER,
              'headerText',
              'names of headers',
              'Headers that it is replayed with. Default: `Content-Type: application/json`.',
            ),
          ),
        },
        closed,
      ),
    ),
  },
  closed,
)
type CompletedConfig = Static<typeof completedPattern>

const pattern = Type.Object({ status, when }, closed)

export const reconcile = Type.Object(
  {
    request: Type.Optional(request),
    identity: Type.Optional(
      Type.Unsafe<Readonly<Record<string, string>> | null>({
        anyOf: [
          { $ref: '#/definitions/none' },
          {
            type: 'object',
            patternProperties: { [POINTER]: { $ref: '#/definitions/jsonText' } },
            additionalProperties: false,
            $comment: POINTERS,
          },
        ],
        description:
          'What shows that an answer is about this record: JSON pointers and their values, in which `{key}` and `{record}` stand. `none`: whatever answers is believed. Needed.',
      }),
    ),
    completed: Type.Optional(
      Type.Unsafe<CompletedConfig | readonly CompletedConfig[]>({
        anyOf: [completedPattern, { type: 'array', items: completedPattern, minItems: 1 }],
        description:
          'An answer that shows what became of the request; one, or a list of which the first counts. Needed.',
      }),
    ),
    notFound: orOff(
      'none',
      pattern,
      'An answer that shows that nothing was done. It counts when it comes twice in a row, and not before `after`.',
    ),
    pending: orOff(
      'none',
      pattern,
      'An answer that leaves it open; goes before the others. So does every answer that nothing fits.',
    ),
    after: scalar('retention', '"Not found" counts so long after the claim. Default: `upstream.timeout`.'),
    every: scalar('retention', 'Time until the first status query; the pauses double, up to an hour.', '5s'),
    attempts: scalar('questions', 'Number of status queries before the record is dead-lettered.', 20),
  },
  closed,
)
export type ReconcileConfig = Static<typeof reconcile>
