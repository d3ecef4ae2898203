import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { Rotating } from '../../src/compose/secrets.ts'
import { readTokens, readUpstreamTls } from '../../src/config/files.ts'
import { certificate } from '../support/certificates.ts'
import { tempDir, until } from '../support/e2e.ts'
import { Mount } from '../support/mount.ts'

interface Followed<T> {
  readonly rotating: Rotating<T>
  /** What was reported: null, or a problem. */
  readonly reports: (string | null)[]
}

function tokensIn(t: Test, file: string): Followed<readonly string[]> {
  const reports: (string | null)[] = []
  const rotating = new Rotating({
    path: 'admin.tokenFile',
    files: [file],
    read: (findings) => readTokens(findings, 'admin.tokenFile', file),
    onRotation: (_path, problem) => void reports.push(problem),
  })
  t.teardown(() => rotating[Symbol.dispose]())
  return { rotating, reports }
}

void t.test('§15.20 a file holds one token a line, and is followed by swaps of ..data', async (t) => {
  const mount = new Mount(t, { token: 'old\n', other: 'a' })
  const { rotating, reports } = tokensIn(t, mount.file('token'))
  t.strictSame(rotating.current, ['old'])
  mount.swap({ token: ' new\r\nold \t\n \n', other: 'a' })
  await until(() => reports.length === 1)
  t.strictSame(rotating.current, ['new', 'old'])
  mount.swap({ token: 'new', other: 'a' })
  await until(() => reports.length === 2)
  t.strictSame(rotating.current, ['new'])
  t.strictSame(reports, [null, null])
})

void t.test('§15.20 what cannot be used changes nothing and is reported', async (t) => {
  const file = join(tempDir(t), 'token')
  writeFileSync(file, 'first')
  const { rotating, reports } = tokensIn(t, file)
  for (const [text, why] of [
    ['', /empty file/],
    [
      'two words\n',
      /something else on line 1 in .*; allowed: one token per line, in printable ASCII without spaces/,
    ],
    ['\n\n', /no token/],
    ['fine\nn\u00f6t\n', /something else on line 2/],
  ] as const) {
    writeFileSync(file, text)
    await until(() => reports.length > 0)
    t.match(reports.splice(0), [why])
    t.strictSame(rotating.current, ['first'])
  }
  writeFileSync(file, 'second')
  await until(() => reports.length > 0)
  t.strictSame([...reports, ...rotating.current], [null, 'second'])
})

void t.test('a file that cannot be used at first is an error', async (t) => {
  const file = join(tempDir(t), 'token')
  t.throws(() => tokensIn(t, file), { message: /admin\.tokenFile: found no such file/ })
})

void t.test('§15.20 a certificate is used together with its key, and complete', async (t) => {
  using one = certificate('IP:127.0.0.1')
  using other = certificate('IP:127.0.0.1')
  const pem = (cert: Buffer, key: Buffer, ca: Buffer) => ({
    cert: cert.toString(),
    key: key.toString(),
    ca: ca.toString(),
  })
  const mount = new Mount(t, pem(one.cert, one.key, one.cert))
  const [ca, cert, key] = ['ca', 'cert', 'key'].map((name) => mount.file(name)) as [string, string, string]
  const reports: (string | null)[] = []
  const seen: unknown[] = []
  using rotating = new Rotating({
    path: 'upstream.tls',
    files: [ca, cert, key],
    read: (findings) => readUpstreamTls(findings, { ca, cert, key, servername: null }),
    changed: ({ cert }) => void seen.push(cert),
    onRotation: (_path, problem) => void reports.push(problem),
  })
  const before = { ca: one.cert, cert: one.cert, key: one.key }
  t.strictSame(rotating.current, before)
  mount.swap(pem(other.cert, one.key, one.cert))
  await until(() => reports.length > 0)
  t.match(reports[0], /^upstream\.tls: found files that cannot be used: .*key/)
  mount.swap(pem(one.cert, one.key, one.cert.subarray(0, 200)))
  await until(() => reports.some((one) => /ca is not a complete PEM file/.test(String(one))))
  mount.swap(pem(one.cert, one.key, Buffer.from('what?')))
  await until(() => reports.some((one) => /found no PEM/.test(String(one))))
  t.strictSame(rotating.current, before)
  t.strictSame(seen, [])
  mount.swap(pem(other.cert, other.key, other.cert))
  await until(() => reports.at(-1) === null)
  t.strictSame(rotating.current, { ca: other.cert, cert: other.cert, key: other.key })
  t.strictSame(seen, [other.cert], 'once, although three files have changed')
})
