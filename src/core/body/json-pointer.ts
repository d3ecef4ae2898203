/** RFC 6901 pointer → reference tokens. */
export function pointerTokens(pointer: string): string[] {
  return pointer
    .split('/')
    .slice(1)
    .map((token) => token.replaceAll('~1', '/').replaceAll('~0', '~'))
}

/** A place in a document that pointers name or lead through: one pass serves all pointers. */
export interface Place {
  /** A pointer ends here. */
  isNamed: boolean
  readonly members: Map<string, Place>
  /** By tokens that are an index. */
  readonly items: Map<number, Place>
  /** Lengths of the members' names, in UTF-8 bytes. */
  readonly lengths: Set<number>
}

/** The root of all places that the pointers name. */
export function placesOf(pointers: readonly string[]): Place {
  const root = newPlace()
  for (const pointer of pointers) placeOf(root, pointer).isNamed = true
  return root
}

/** The place that the pointer names. */
export function placeOf(root: Place, pointer: string): Place {
  let place = root
  for (const token of pointerTokens(pointer)) place = next(place, token)
  return place
}

function next(place: Place, token: string): Place {
  let found = place.members.get(token)
  if (found === undefined) {
    found = newPlace()
    place.members.set(token, found)
    place.lengths.add(Buffer.byteLength(token))
    if (isIndex(token)) place.items.set(Number(token), found)
  }
  return found
}

function newPlace(): Place {
  return { isNamed: false, members: new Map(), items: new Map(), lengths: new Set() }
}

/** As RFC 6901 spells it. */
function isIndex(token: string): boolean {
  return /^(?:0|[1-9]\d*)$/.test(token)
}
