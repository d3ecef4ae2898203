import { unlinkSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { tlsFiles } from '../../src/store/tls-files.ts'
import { certificate } from '../support/certificates.ts'
import { tempDir } from './fixtures.ts'

const NAMES = { ca: 'cacert', cert: 'cert', key: 'key' }

void t.test('§15.20 each connection finds the latest files that can be used', async (t) => {
  using folder = tempDir()
  using one = certificate('IP:127.0.0.1')
  using other = certificate('IP:127.0.0.1')
  const file = (name: string): string => join(folder.path, name)
  const write = (name: string, bytes: Buffer): void => writeFileSync(file(name), bytes)
  write('ca', one.cert)
  write('cert', one.cert)
  write('key', one.key)
  const own = tlsFiles(new URLSearchParams({ cert: file('cert'), key: file('key') }), NAMES, () => {})
  const options = new URLSearchParams({ cacert: file('ca'), cert: file('cert'), key: file('key') })
  const unusable: string[] = []
  const files = tlsFiles(options, NAMES, (_kind, problem) => void unusable.push(problem))
  const before = { ca: one.cert, cert: one.cert, key: one.key }
  t.strictSame(files(), before)
  write('cert', other.cert)
  t.strictSame(files(), before, 'the new certificate has no key yet')
  t.match(unusable.splice(0), [/^store\.url: .*key.*; the previous files are used$/])
  write('key', other.key)
  t.strictSame(own(), { cert: other.cert, key: other.key }, 'without an authority of its own')
  t.strictSame(files(), { ca: one.cert, cert: other.cert, key: other.key })
  const both = Buffer.concat([one.cert, other.cert])
  write('ca', both.subarray(0, both.length - 40))
  t.equal(files().ca?.length, one.cert.length)
  t.strictSame(unusable.splice(0), ['store.url: ca is not a complete PEM file; the previous files are used'])
  write('ca', both)
  t.strictSame(files().ca, both)
  unlinkSync(file('key'))
  t.strictSame(files().key, other.key)
  t.match(unusable.splice(0), [/^store\.url: key cannot be read: ENOENT.*; the previous files are used$/])
})
