import t from 'tap'
import { forwardedCertificate } from '../../src/http/client-certificate.ts'

const NOTHING = { 'san-uri': null, 'san-dns': null, subject: null, fingerprint: null }

void t.test('X-Forwarded-Client-Cert: the last element counts, as Envoy writes it', async (t) => {
  const cases: readonly [lines: readonly string[], expected: object | null][] = [
    [[], null],
    [[''], null],
    [
      ['By=spiffe://b;Hash=AB12;Subject="CN=a,O=\\"x;y\\"";URI=spiffe://a;DNS=a.example;DNS=b.example'],
      {
        'san-uri': 'spiffe://a',
        'san-dns': 'a.example, b.example',
        subject: 'CN=a,O="x;y"',
        fingerprint: 'ab12',
      },
    ],
    [
      ['URI=spiffe://evil, Subject="O=a,b";URI=spiffe://good'],
      { ...NOTHING, subject: 'O=a,b', 'san-uri': 'spiffe://good' },
    ],
    [['URI=spiffe://evil', 'URI=spiffe://good'], { ...NOTHING, 'san-uri': 'spiffe://good' }],
    [['URI=spiffe://evil,'], null],
    [['Subject=";URI=spiffe://a'], null],
    [['URI=spiffe://evil;Subject="x', 'Hash=1;Subject="CN=me";URI=spiffe://me'], null],
    [['uri=spiffe://a'], { ...NOTHING, 'san-uri': 'spiffe://a' }],
  ]
  for (const [lines, expected] of cases)
    t.same(
      forwardedCertificate(lines.flatMap((line) => ['X-Forwarded-Client-Cert', line])),
      expected,
      lines.join(),
    )
})
