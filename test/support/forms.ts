/** Routes whose keys come from forms and queries. */
export const FORM_KEYS = `  - name: checkout
    match: { path: /checkout }
    statusHeader: true
    key: { from: ["header:idempotency-key", "form:idempotency_key", "query:idempotency_key"], presence: required }
  - name: optional
    match: { path: /optional }
    statusHeader: true
    key: { from: ["query:k", "form:k"] }
  - name: forms
    match: { path: /forms }
    key: { from: ["form:idempotency_key"], presence: required }
    fingerprint: { body: form }
  - name: orders
    match: { path: /orders }
    key: { presence: required, derive: { form: [order] } }
`

export const URLENCODED = { 'content-type': 'application/x-www-form-urlencoded' }
