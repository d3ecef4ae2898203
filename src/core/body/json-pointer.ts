/** RFC 6901 pointer → reference tokens. */
export function pointerTokens(pointer: string): string[] {
  return pointer
    .split('/')
    .slice(1)
    .map((token) => token.replaceAll('~1', '/').replaceAll('~0', '~'))
}

/** A place in a document that pointers name or lead through: one pass serves all pointers. */
export interface PointerNode {
  /** A pointer ends here. */
  isNamed: boolean
  readonly members: Map<string, PointerNode>
  /** Items by index. */
  readonly items: Map<number, PointerNode>
  /** Lengths of the members' names, in UTF-8 bytes. */
  readonly lengths: Set<number>
}

/** The root of all places that the pointers name. */
export function placesOf(pointers: readonly string[]): PointerNode {
  const root = newPlace()
  for (const pointer of pointers) nodeAt(root, pointer).isNamed = true
  return root
}

/** The place that the pointer names. */
export function nodeAt(root: PointerNode, pointer: string): PointerNode {
  let place = root
  for (const token of pointerTokens(pointer)) place = next(place, token)
  return place
}

function next(place: PointerNode, token: string): PointerNode {
  let found = place.members.get(token)
  if (found === undefined) {
    found = newPlace()
    place.members.set(token, found)
    place.lengths.add(Buffer.byteLength(token))
    if (isIndex(token)) place.items.set(Number(token), found)
  }
  return found
}

function newPlace(): PointerNode {
  return { isNamed: false, members: new Map(), items: new Map(), lengths: new Set() }
}

/** As RFC 6901 spells it. */
function isIndex(token: string): boolean {
  return /^(?:0|[1-9]\d*)$/.test(token)
}
