/** What the bearer token of a request says, as far as it is proven (contract §5). Details never quote the token. */
export type VerifiedToken =
  | { readonly kind: 'claims'; readonly claims: Readonly<Record<string, unknown>> }
  /** No `Authorization`, or of another scheme. */
  | { readonly kind: 'absent' }
  /** Forged, expired, for somebody else. */
  | { readonly kind: 'refused'; readonly detail: string }
  /** The keys cannot be had now. */
  | { readonly kind: 'unavailable'; readonly detail: string }
