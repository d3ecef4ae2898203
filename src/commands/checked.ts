/** What the doctor looked at. `note`: to be known, such as what somebody chose, or what cannot be told. */
export interface Checked {
  readonly check: string
  readonly found: 'fine' | 'note' | 'finding'
  readonly detail: string
}

export function finding(check: string, detail: string): Checked {
  return { check, found: 'finding', detail }
}
