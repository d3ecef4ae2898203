interface Gap {
  /** `*` stands for `defaults` and every route; list positions are left out. */
  readonly path: string
  /** Without it: the property as a whole. */
  readonly value?: RegExp
}

/** What the contract names and this version does not do: an error that says so, never ignored (contract §10). */
const GAPS: readonly Gap[] = [
  { path: 'store.cache' },
  { path: 'store.compression' },
  { path: 'store.encryption' },
  { path: 'store.primary' },
  { path: 'store.url', value: /^(redis\+sentinel|redis\+cluster|postgres(ql)?|dynamodb|tiered):/i },
  { path: 'store.wait' },
]

export function unimplementedProperty(path: string): string | null {
  const shared = sharedPath(path)
  return GAPS.some((gap) => gap.path === shared && gap.value === undefined) ? says(shared) : null
}

export function unimplementedValue(path: string, text: string): string | null {
  const shared = sharedPath(path)
  for (const gap of GAPS) {
    const found = gap.path === shared ? gap.value?.exec(text) : null
    // The scheme of a URL is enough to say, and the rest may hold a password.
    if (found) return says(`${shared}: ${found[0].endsWith(':') && shared === 'store.url' ? found[0] : text}`)
  }
  return null
}

function sharedPath(path: string): string {
  return path.replace(/^(?:defaults|routes\[\d+\])\./, '*.').replaceAll(/\[\d+\]/g, '')
}

function says(what: string): string {
  return `\`${what.replace('*.', '')}\` is not implemented in this version`
}
