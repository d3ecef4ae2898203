import { readFileSync } from 'node:fs'
import t from 'tap'
import { pairProblem } from '../../src/runtime/pem.ts'

const fileOf = (name: string): Buffer => readFileSync(new URL(`../config/files/${name}`, import.meta.url))

void t.test('a pair that cannot be served says why', async (t) => {
  const [cert, key] = [fileOf('listener.pem'), fileOf('listener-key.pem')]
  t.equal(pairProblem({ cert, key }), null)
  t.match(pairProblem({ cert: cert.subarray(0, 200), key }), /^cert is not a complete PEM file/)
  t.match(pairProblem({ cert, key: key.subarray(0, 80) }), /^the key cannot be read \(/)
  t.match(
    pairProblem({ cert, key: fileOf('expired-key.pem') }),
    /^the key does not belong to the certificate/,
  )
  const expired = { cert: fileOf('expired.pem'), key: fileOf('expired-key.pem') }
  t.equal(pairProblem(expired), 'the certificate expired at 2020-01-02T00:00:00.000Z')
})
