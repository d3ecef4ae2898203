import { createHmac } from 'node:crypto'
import fc from 'fast-check'
import t from 'tap'
import { Hmac, hmacOf } from '../../src/core/identity.ts'

t.test('Hmac computes HMAC-SHA-256 for keys and messages of any length', async (t) => {
  for (const length of [0, 1, 63, 64, 65, 200]) {
    const key = Buffer.alloc(length, 0xa5)
    t.same(new Hmac(key).of(key), createHmac('sha256', key).update(key).digest(), `${length} bytes`)
  }
  const bytes = (maxLength: number) => fc.uint8Array({ maxLength }).map((array) => Buffer.from(array))
  fc.assert(
    fc.property(bytes(200), bytes(500), bytes(40), (key, message, another) => {
      const hmac = new Hmac(key)
      for (const one of [message, another, message])
        t.same(hmac.of(one), createHmac('sha256', key).update(one).digest())
    }),
  )
})

t.test('hmacOf keeps one instance for each secret', async (t) => {
  const secret = Buffer.from('a secret of sixteen')
  t.equal(hmacOf(secret), hmacOf(secret))
  t.not(hmacOf(secret), hmacOf(Buffer.from(secret)))
})
