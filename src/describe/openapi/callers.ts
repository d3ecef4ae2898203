import { type Description, isObject, member, textOf } from './read.ts'

/** What tells callers apart, by the security of an operation. */
export interface CallerHint {
  /** For `scope.caller`, in the order of the description; empty: nothing that a route can look at. */
  readonly sources: readonly string[]
  /** Schemes by name, with what each is. */
  readonly schemes: readonly string[]
  /** Schemes that no header or cookie carries. */
  readonly unseen: readonly string[]
  /** Requests without credentials are let in, too. */
  readonly anonymous: boolean
}

/** What is made anew for each request: a retry would come as another caller, and be executed. */
const FLEETING = /signature|hmac|digest|nonce|timestamp/i
const TOKEN = /^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/

/** `security` of an operation goes before that of the description; an empty one takes it away. */
export function callersOf(description: Description, operation: unknown): CallerHint | null {
  const security = member(operation, 'security') ?? member(description.root, 'security')
  if (!Array.isArray(security)) return null
  const requirements = security.filter(isObject)
  const names = [...new Set(requirements.flatMap((one) => Object.keys(one)))]
  const sources = new Set<string>()
  const schemes: string[] = []
  const unseen: string[] = []
  for (const name of names) {
    const { source, what } = schemeOf(description, name)
    schemes.push(`${name} (${what})`)
    if (source === null) unseen.push(`${name} (${what})`)
    else sources.add(source)
  }
  const anonymous = requirements.length === 0 || requirements.some((one) => Object.keys(one).length === 0)
  return { sources: [...sources], schemes, unseen, anonymous }
}

function schemeOf(
  description: Description,
  name: string,
): { readonly source: string | null; readonly what: string } {
  const place = ['components', 'securitySchemes', name]
  const written = member(member(member(description.root, 'components'), 'securitySchemes'), name)
  const referred = description.follow(written, place)
  const scheme = referred.kind === 'found' ? referred.value : undefined
  const type = textOf(member(scheme, 'type'))
  switch (type) {
    case 'http':
      return { source: 'header:authorization', what: `http ${textOf(member(scheme, 'scheme')) ?? ''}`.trim() }
    case 'oauth2':
    case 'openIdConnect':
      return { source: 'header:authorization', what: type }
    case 'apiKey': {
      const place = textOf(member(scheme, 'in')) ?? 'nowhere'
      const field = textOf(member(scheme, 'name')) ?? ''
      const what = `${place} ${field}`
      if (FLEETING.test(field)) return { source: null, what: `${what}, made anew for each request` }
      if (!TOKEN.test(field) || (place !== 'header' && place !== 'cookie')) return { source: null, what }
      return { source: `${place}:${place === 'header' ? field.toLowerCase() : field}`, what }
    }
    case null:
      return { source: null, what: 'not described' }
    default:
      return { source: null, what: type }
  }
}
