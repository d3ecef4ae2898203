import { lookUp } from './body/json-lookup.ts'
import { linesOf, type RawHeaders } from './headers.ts'
import type { LabelSource, RouteMatch } from './policy.ts'
import { comparedPath, parseTarget, pathParameters } from './route.ts'
import type { Steps } from './steps.ts'

/** UTF-16 units. A label is a search term, not a text. */
const MAX_LABEL = 200

interface Labelled {
  readonly route: { readonly match: RouteMatch }
  /** Origin form, as sent. */
  readonly target: string
  readonly headers: RawHeaders
}

/** The label of a request (contract §15.21), at most {@link MAX_LABEL} long; undefined: it has none. `readable`: the decoded body. */
export function* readLabel(
  source: LabelSource,
  { route: { match }, target, headers }: Labelled,
  readable: { readonly headers: RawHeaders; readonly body: Buffer },
): Steps<string | undefined> {
  switch (source.kind) {
    case 'header':
      return asLabel(linesOf(headers, source.name).join(', ').trim())
    case 'path': {
      const parsed = parseTarget(target)
      // As the client spelled it, unlike the path of the record.
      const path = parsed && comparedPath({ ...match, case: 'sensitive' }, parsed)
      return asLabel(decoded(pathParameters(match, path ?? '').get(source.name) ?? ''))
    }
    case 'json': {
      const found = (yield* lookUp(readable.headers, readable.body, [source.pointer]))?.at(source.pointer)
      return found?.kind === 'literal' ? asLabel(scalarText(found.literal)) : undefined
    }
  }
}

/** As `list --label` compares it. */
export function asLabel(text: string): string | undefined {
  const label = text.slice(0, MAX_LABEL).toWellFormed()
  return label === '' ? undefined : label
}

/** The value of a string, the text of a number or of true and false; empty: anything else. */
function scalarText(literal: string): string {
  if (literal.startsWith('"')) return JSON.parse(literal) as string
  return /^[[{n]/.test(literal) ? '' : literal
}

function decoded(segment: string): string {
  try {
    return decodeURIComponent(segment)
  } catch {
    return segment
  }
}
