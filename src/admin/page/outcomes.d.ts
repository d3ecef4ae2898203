/** Served as `/outcomes.js`, made of `protect/outcomes.ts` (`admin/page.ts`). */
type Table = Readonly<Record<string, { readonly says: string; readonly mood?: 'good' | 'bad' }>>

/** What a record's history names, by event; `settled` and `reconciled` by their results. */
export const EVENTS: Table
export const SETTLED: Table
export const RECONCILED: Table
