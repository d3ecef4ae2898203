/** `note`: worth knowing, such as a deliberate choice, or something that cannot be checked from here. */
export interface CheckResult {
  readonly check: string
  readonly found: 'fine' | 'note' | 'finding'
  readonly detail: string
}

const result =
  (found: CheckResult['found']) =>
  (check: string, detail: string): CheckResult => ({ check, found, detail })
export const fine = result('fine')
export const note = result('note')
export const finding = result('finding')
