/** A payment of exactly `size` bytes of JSON: members of all kinds, filled up with lines of an order. */
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
/** The most whose canonical form `fingerprint.body: auto` takes. */
export const LARGE = payment(64 * 1024)
