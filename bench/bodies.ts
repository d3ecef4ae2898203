/** A payment of exactly `size` bytes of JSON: members of all kinds, padded with lines of an order. */
function payment(size: number): string {
  const line = (n: number): object => ({
    sku: `sku-${n}`,
    quantity: n % 7,
    price: n + 0.25,
    gift: n % 2 === 0,
  })
  const lines: object[] = []
  const text = (note: string): string =>
    JSON.stringify({
      amount: 1999,
      currency: 'EUR',
      customer: { id: 'cus_8sK2mQ', name: 'Zoë Example', country: 'DE' },
      lines,
      note,
    })
  for (let n = 1; Buffer.byteLength(text('')) + 60 < size; n++) lines.push(line(n))
  return text('.'.repeat(size - Buffer.byteLength(text(''))))
}

export const SMALL = payment(300)
/** The largest body that `fingerprint.body: auto` canonicalises. */
export const LARGE = payment(64 * 1024)

const MIB = 1024 * 1024

/** As many of them as fit. */
function filled(part: (n: number) => string, size = MIB, [open, close] = '[]'): string {
  const parts: string[] = []
  let left = size - 2
  for (let n = 0; ; n++) {
    const next = part(n)
    left -= next.length + 1
    if (left < 0) return open + parts.join(',') + close
    parts.push(next)
  }
}

const order = {
  id: 12345,
  amount: 10.5,
  currency: 'EUR',
  customer: { name: 'Zoe', paid: true },
  items: [1, 2],
}

/** A request of 1 MiB. */
export interface MibRequest {
  readonly path: string
  readonly type: string
  /** Some have the key in the body, the others in the header line. */
  readonly keyed: boolean
  readonly body: (key: string) => string
}

/** Bodies of real clients, and of an attacker who wants to keep the proxy busy. */
export const MIB_REQUESTS: Readonly<Record<string, MibRequest>> = {
  ...shapes({
    'orders, as clients send them': () => filled(() => JSON.stringify(order)),
    'orders, indented': () => filled(() => JSON.stringify(order, null, 2)),
    '99 nested arrays of two': () => filled(() => '['.repeat(98) + '1' + ',1]'.repeat(98)),
    'one object, names in no order': () =>
      filled((n) => `"${((n * 7919) % 1000003).toString(36)}":1`, MIB, '{}'),
    'objects of two, the later name first': () => filled(() => '{"b":1,"a":1}'),
    'numbers with an exponent': () => filled(() => '1e20'),
    'numbers of 17 digits': () => filled((n) => String(1 / (n + 3))),
    'strings with needless escapes': () => filled(() => '"\\/"'),
    'a blank before each item': () => filled(() => ' 1'),
  }),
  'orders, with the key at a JSON pointer': {
    path: '/v1/keyed',
    type: 'application/json',
    keyed: true,
    body: (key) => `{"orders":${filled(() => JSON.stringify(order), MIB - 100)},"id":"${key}"}`,
  },
  'a form, with the key in its last field': {
    path: '/v1/form',
    type: 'application/x-www-form-urlencoded',
    keyed: true,
    body: (key) => `${'f=%41&'.repeat((MIB - 100) / 6)}id=${key}`,
  },
  'a multipart form that is almost its delimiter': {
    path: '/v1/payments',
    type: 'multipart/form-data; boundary=a',
    keyed: false,
    body: () =>
      `--a\r\nContent-Disposition: form-data; name="f"\r\n\r\n${'\r'.repeat(MIB - 100)}\r\n--a--\r\n`,
  },
  'bytes, as they are': {
    path: '/v1/payments',
    type: 'application/octet-stream',
    keyed: false,
    body: () => 'x'.repeat(MIB),
  },
}

/** JSON that is compared as values. */
function shapes(bodies: Readonly<Record<string, () => string>>): Record<string, MibRequest> {
  const entries = Object.entries(bodies).map(([shape, body]) => [
    `JSON as values: ${shape}`,
    { path: '/v1/json', type: 'application/json', keyed: false, body },
  ])
  return Object.fromEntries(entries) as Record<string, MibRequest>
}
