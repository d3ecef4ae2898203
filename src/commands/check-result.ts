/** What the doctor looked at. `note`: to be known, such as what somebody chose, or what cannot be told. */
export interface CheckResult {
  readonly check: string
  readonly found: 'fine' | 'note' | 'finding'
  readonly detail: string
}

export function finding(check: string, detail: string): CheckResult {
  return { check, found: 'finding', detail }
}
