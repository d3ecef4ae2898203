import { createHmac, createPublicKey, generateKeyPairSync, type KeyObject, randomBytes } from 'node:crypto'
import { exportSPKI, type JWTPayload, SignJWT } from 'jose'
import t from 'tap'
import { verifier } from '../../src/credentials/callers.ts'
import { checkKeyText } from '../../src/credentials/key-text.ts'
import { certificate } from '../support/certificates.ts'
import { bearer, NOW, type Pair, POLICY, pair, part, subject, token, told } from './support.ts'

const rsa = await pair('RS256')
const other = await pair('RS256')
const KEY_FILE = JSON.stringify({ keys: [rsa.jwk] })
const FILE = { ...POLICY, keyFile: KEY_FILE }
const clock = (): number => NOW
const SECOND = 1000
const FORGED = 'refused: the signature of the bearer token is wrong'
const NO_JWT = 'refused: the bearer token is not a signed JWT'
const NO_KEY = 'refused: the bearer token is not signed with a key of its issuer'
const ALGORITHM = 'refused: the bearer token is signed in a way that is not accepted here ("alg" or "crit")'

t.test('S04 a rotated bearer token gives the same sub', async (t) => {
  const tokens = verifier([FILE], { clock })
  const first = await token(rsa, { iat: 1, jti: 'a' })
  const second = await token(rsa, { iat: 2, jti: 'b' })
  t.not(first, second)
  t.equal(await subject(tokens, FILE, first), 'u1')
  t.equal(await subject(tokens, FILE, second), 'u1')
  t.equal(await subject(tokens, FILE, await token(rsa, { sub: 'u2' })), 'u2')
})

t.test('S04 a forged token is refused with a message that quotes nothing of it', async (t) => {
  const tokens = verifier([FILE], { clock })
  const good = await token(rsa)
  const [head = '', body = '', signature = ''] = good.split('.')
  const none = part({ alg: 'none' })
  const spki = await exportSPKI(rsa.publicKey)
  const hs256 = part({ alg: 'HS256', kid: 'k1' })
  const der = createPublicKey(spki).export({ type: 'spki', format: 'der' })
  const hmac = (secret: string | Buffer): string =>
    `${hs256}.${body}.${createHmac('sha256', secret).update(`${hs256}.${body}`).digest('base64url')}`
  const victim = part({ sub: 'victim', exp: NOW / 1000 + 60 })
  const forgeries: readonly (readonly [string, string, string])[] = [
    ['another key under the same id', await token(other), FORGED],
    ['another key without an id', await token(other, {}, { kid: undefined }), FORGED],
    ['an unknown key id', await token(other, {}, { kid: 'k9' }), NO_KEY],
    ['a tampered payload', `${head}.${victim}.${signature}`, FORGED],
    ['a tampered header', `${part({ alg: 'RS512', kid: 'k1' })}.${body}.${signature}`, FORGED],
    [
      'an algorithm of another kind of key',
      `${part({ alg: 'ES256', kid: 'k1' })}.${body}.${signature}`,
      NO_KEY,
    ],
    ['no algorithm', `${none}.${victim}.${signature}`, ALGORITHM],
    ['no algorithm, in capitals', `${part({ alg: 'NONE' })}.${victim}.${signature}`, ALGORITHM],
    ['no signature', `${none}.${victim}.`, NO_JWT],
    ['no "alg"', `${part({ kid: 'k1' })}.${body}.${signature}`, ALGORITHM],
    ['"alg" that is a list', `${part({ alg: ['RS256'] })}.${body}.${signature}`, ALGORITHM],
    ['HMAC under the public key in PEM', hmac(spki), ALGORITHM],
    ['HMAC under the public key in PEM with a newline', hmac(`${spki}\n`), ALGORITHM],
    ['HMAC under the public key in DER', hmac(der), ALGORITHM],
    ['HMAC under the key file', hmac(KEY_FILE), ALGORITHM],
    ['HMAC under nothing', hmac(''), ALGORITHM],
    ['a key of its own in the header', await token(other, {}, { kid: undefined, jwk: other.jwk }), FORGED],
    ['a key set of its own', await token(other, {}, { kid: 'k9', jku: 'http://127.0.0.1:1/' }), NO_KEY],
    ['a header that is not JSON', `${part('{')}.${body}.${signature}`, NO_JWT],
    ['a header that is not an object', `${part('"a"')}.${body}.${signature}`, NO_JWT],
    ['five parts', `${good}.a.b`, NO_JWT],
    ['an opaque token', 'd6Cf0pWjtDUKWLXEJqQ', NO_JWT],
    ['nothing', '', NO_JWT],
    ['two tokens', `${good}, Bearer ${good}`, NO_JWT],
    ['a space inside', `${good.slice(0, 40)} ${good.slice(40)}`, NO_JWT],
  ]
  for (const [what, forged, expected] of forgeries)
    t.equal(await subject(tokens, FILE, forged), expected, what)
  t.equal(await subject(tokens, FILE, good), 'u1', 'the genuine token still counts')
})

t.test('S04 a token counts within its times, give or take 30 s, and needs an "exp"', async (t) => {
  const tokens = verifier([FILE], { clock })
  const now = NOW / 1000
  const expired = 'refused: the bearer token has expired'
  const early = 'refused: the bearer token is not valid yet'
  for (const [claims, expected] of [
    [{ exp: now + 1 }, 'u1'],
    [{ exp: now - 29 }, 'u1'],
    [{ exp: now - 30 }, expired],
    [{ exp: 0 }, expired],
    [{ nbf: now + 30 }, 'u1'],
    [{ nbf: now + 31 }, early],
    [{ exp: undefined }, 'refused: the bearer token has no "exp"'],
    [{ exp: String(now + 60) }, 'refused: "exp" of the bearer token is not a time'],
    [{ nbf: null }, 'refused: "nbf" of the bearer token is not a time'],
  ] as const)
    t.equal(
      await subject(tokens, FILE, await token(rsa, claims as JWTPayload)),
      expected,
      JSON.stringify(claims),
    )
})

t.test('S04 issuer and audience are checked if they are configured', async (t) => {
  const strict = { ...FILE, issuer: 'https://id.example', audience: ['orders', 'payments'] }
  const tokens = verifier([FILE, strict], { clock })
  const issuer = 'refused: the bearer token is from another issuer'
  const audience = 'refused: the bearer token is for another audience'
  for (const [iss, aud, expected] of [
    ['https://id.example', 'payments', 'u1'],
    ['https://id.example', ['mail', 'orders'], 'u1'],
    ['https://id.example', ['mail'], audience],
    ['https://id.example', 'pay', audience],
    ['https://id.example', [], audience],
    ['https://id.example', undefined, 'refused: the bearer token has no "aud"'],
    ['https://id.example/', 'payments', issuer],
    [['https://id.example'], 'payments', issuer],
    [undefined, 'payments', 'refused: the bearer token has no "iss"'],
  ] as const) {
    const claims = { iss, aud } as JWTPayload
    const made = await token(rsa, claims)
    t.equal(await subject(tokens, strict, made), expected, JSON.stringify(claims))
    t.equal(await subject(tokens, FILE, made), 'u1', 'not configured')
  }
})

t.test('a header with critical extensions is refused', async (t) => {
  const tokens = verifier([FILE], { clock })
  const [, body = '', signature = ''] = (await token(rsa)).split('.')
  for (const [header, expected] of [
    [{ crit: ['exp'], exp: 1 }, ALGORITHM],
    [{ crit: [] }, NO_JWT],
    [{ crit: ['b64'], b64: false }, FORGED],
  ] as const) {
    const head = part({ alg: 'RS256', kid: 'k1', ...header })
    t.equal(await subject(tokens, FILE, `${head}.${body}.${signature}`), expected, JSON.stringify(header))
  }
  const unencoded = await new SignJWT({ sub: 'u1', exp: NOW / 1000 + 60 })
    .setProtectedHeader({ alg: 'RS256', kid: 'k1', crit: ['x'], x: 1 })
    .sign(rsa.privateKey, { crit: { x: true } })
  t.equal(await subject(tokens, FILE, unencoded), ALGORITHM, 'signed, but still not understood')
})

t.test('a token is absent without a Bearer line, and two lines are refused', async (t) => {
  const tokens = verifier([FILE], { clock })
  const good = await token(rsa)
  const verdict = async (...headers: string[]): Promise<unknown> => told(await tokens.verify(FILE, headers))
  for (const headers of [
    [],
    ['Host', 'api'],
    ['Authorization', ''],
    ['Authorization', '  '],
    ['Authorization', 'Basic dTpw'],
    ['Authorization', `Bearer2 ${good}`],
    ['X-Authorization', `Bearer ${good}`],
    ['Cookie', `token=${good}`],
  ])
    t.equal(await verdict(...headers), 'absent', JSON.stringify(headers).slice(0, 40))
  for (const line of [`Bearer ${good}`, `bearer ${good}`, `BEARER   ${good} `, `Bearer\t${good}`])
    t.equal(await verdict('authorization', line), 'u1', line.slice(0, 10))
  const two = 'refused: 2 Authorization lines; one is allowed'
  const line = ['Authorization', `Bearer ${good}`]
  t.equal(await verdict(...line, ...line), two, 'even equal ones')
  t.equal(await verdict(...line, 'AUTHORIZATION', ''), two)
  t.equal(await verdict('Authorization', 'Bearer'), NO_JWT)
})

t.test('claims have only the members of the token', async (t) => {
  const tokens = verifier([FILE], { clock })
  const verified = await tokens.verify(FILE, bearer(await token(rsa, { sub: 'u1' })))
  const claims = verified.kind === 'claims' ? verified.claims : {}
  t.strictSame(Object.keys(claims).sort(), ['exp', 'sub'])
  t.equal(claims.constructor, undefined)
  t.equal(claims.__proto__, undefined)
})

t.test('every asymmetric algorithm is verified, and only with the key it names', async (t) => {
  const algorithms = 'RS256 RS384 RS512 PS256 PS384 PS512 ES256 ES384 ES512 EdDSA Ed25519'.split(' ')
  const pairs = await Promise.all(algorithms.map((alg) => pair(alg, alg)))
  const all = { ...POLICY, keyFile: JSON.stringify({ keys: pairs.map(({ jwk }) => jwk) }) }
  const tokens = verifier([all], { clock })
  for (const by of pairs) t.equal(await subject(tokens, all, await token(by)), 'u1', by.alg)
  const [first, second] = pairs as [Pair, Pair]
  t.equal(await subject(tokens, all, await token(first, {}, { kid: second.kid })), FORGED)
})

t.test('a token without a key id is tried with every fitting key, and the reverse', async (t) => {
  const { kid: _, ...nameless } = rsa.jwk
  const both = { ...POLICY, keyFile: JSON.stringify({ keys: [other.jwk, rsa.jwk] }) }
  const single = { ...POLICY, keyFile: JSON.stringify(nameless) }
  const pem = { ...POLICY, keyFile: await exportSPKI(rsa.publicKey) }
  const tokens = verifier([both, single, pem], { clock })
  const stranger = await pair('RS256')
  for (const policy of [both, single, pem]) {
    t.equal(await subject(tokens, policy, await token(rsa, {}, { kid: undefined })), 'u1')
    t.equal(await subject(tokens, policy, await token(stranger, {}, { kid: undefined })), FORGED)
  }
  for (const policy of [single, pem]) {
    t.equal(await subject(tokens, policy, await token(rsa, {}, { kid: 'other' })), 'u1')
    t.equal(await subject(tokens, policy, await token(stranger)), FORGED)
  }
  t.equal(await subject(tokens, both, await token(rsa, {}, { kid: 'other' })), NO_KEY)
})

t.test('a token without a key id is tried with at most eight keys', async (t) => {
  const { kid: _, ...key } = other.jwk
  const policyOf = (strangers: number): typeof FILE => ({
    ...FILE,
    keyFile: JSON.stringify({ keys: [...Array.from({ length: strangers }, () => key), rsa.jwk] }),
  })
  const seven = policyOf(7)
  const eight = policyOf(8)
  const tokens = verifier([seven, eight], { clock })
  const made = await token(rsa, {}, { kid: undefined })
  t.equal(await subject(tokens, seven, made), 'u1')
  t.equal(await subject(tokens, eight, made), FORGED)
})

t.test('HMAC tokens need an oct key in the file, and asymmetric ones another', async (t) => {
  const secret = randomBytes(64)
  const k = secret.toString('base64url')
  const oct = { ...POLICY, keyFile: JSON.stringify({ kty: 'oct', k, kid: 's1' }) }
  const pinned = { ...POLICY, keyFile: JSON.stringify({ kty: 'oct', k, alg: 'HS512' }) }
  const mixed = { ...POLICY, keyFile: JSON.stringify({ keys: [{ kty: 'oct', k }, rsa.jwk] }) }
  const tokens = verifier([oct, pinned, mixed], { clock })
  const hmac = async (alg: string, kid: string | undefined, key = secret): Promise<string> =>
    new SignJWT({ sub: 'u1', exp: NOW / 1000 + 60 })
      .setProtectedHeader({ alg, ...(kid === undefined ? {} : { kid }) })
      .sign(key)
  for (const alg of ['HS256', 'HS384', 'HS512']) {
    t.equal(await subject(tokens, oct, await hmac(alg, 's1')), 'u1', alg)
    t.equal(await subject(tokens, oct, await hmac(alg, undefined)), 'u1', `${alg} without an id`)
    t.equal(await subject(tokens, oct, await hmac(alg, 's1', randomBytes(64))), FORGED)
    t.equal(await subject(tokens, pinned, await hmac(alg, 'any')), alg === 'HS512' ? 'u1' : NO_KEY)
  }
  t.equal(await subject(tokens, oct, await hmac('HS256', 's2')), NO_KEY)
  t.equal(await subject(tokens, oct, await token(rsa)), ALGORITHM)
  t.equal(await subject(tokens, mixed, await token(rsa)), 'u1')
  t.equal(await subject(tokens, mixed, await hmac('HS256', undefined)), 'u1')
  const confused = await hmac('HS256', 'k1', Buffer.from(await exportSPKI(rsa.publicKey)))
  t.equal(await subject(tokens, mixed, confused), FORGED, 'a public key is not a secret')
})

t.test('a verifier refuses a key file without a key', async (t) => {
  t.throws(() => verifier([{ ...POLICY, keyFile: 'secret' }]), {
    message: /^scope\.jwt\.keyFile: found neither PEM nor a JSON object; allowed: /,
  })
  t.throws(() => verifier([POLICY]), { message: /^scope\.jwt\.keyFile: found / })
})

t.test('a verifier without a clock uses the wall clock, and rejects unknown policies', async (t) => {
  const tokens = verifier([FILE])
  const made = await token(rsa, { exp: Math.floor(Date.now() / SECOND) - 60 })
  t.equal(await subject(tokens, FILE, made), 'refused: the bearer token has expired')
  const equal = { ...FILE }
  t.equal(
    await subject(tokens, equal, made),
    'refused: the bearer token has expired',
    'an equal policy is known',
  )
  await t.rejects(tokens.verify({ ...POLICY, keyFile: 'x' }, bearer(made)))
  await tokens.close()
})

const RSA = await pair('RS256')
const oct = { kty: 'oct', k: Buffer.alloc(32, 7).toString('base64url') }

function spki(key: KeyObject): string {
  return key.export({ type: 'spki', format: 'pem' }) as string
}
function json(value: unknown): string {
  return JSON.stringify(value)
}

t.test('a key file is PEM, a JWK or a JWK Set', async (t) => {
  const ec = generateKeyPairSync('ec', { namedCurve: 'P-521' }).publicKey
  const { publicKey } = generateKeyPairSync('rsa', { modulusLength: 2048 })
  for (const [what, text] of [
    ['RSA', spki(publicKey)],
    ['RSA in PKCS #1', publicKey.export({ type: 'pkcs1', format: 'pem' }) as string],
    ['EC', spki(ec)],
    ['Ed25519', spki(generateKeyPairSync('ed25519').publicKey)],
    ['text around PEM', `issued by ops\r\n${spki(ec).replaceAll('\n', '\r\n')}\r\n`],
    ['a JWK', json(RSA.jwk)],
    ['a JWK with PEM inside', json({ ...rsa.jwk, x5c: [spki(ec)] })],
    ['a secret', json(oct)],
    ['a set, indented, after a byte order mark', `\uFEFF${JSON.stringify({ keys: [RSA.jwk] }, null, 2)}\n`],
    ['a set with both', json({ keys: [RSA.jwk, oct] })],
    ['a set with keys for other uses', json({ keys: [{ ...rsa.jwk, use: 'enc' }, { kty: 'new' }, RSA.jwk] })],
  ] as const)
    t.equal(checkKeyText(text), null, what)
})

t.test('a certificate counts for its key, whatever its dates', async (t) => {
  using cert = certificate('DNS:localhost')
  const policy = { ...POLICY, keyFile: cert.cert.toString() }
  t.equal(checkKeyText(policy.keyFile), null)
  const tokens = verifier([policy], { clock: () => NOW })
  const { importPKCS8 } = await import('jose')
  const by = { ...(await pair('ES256')), privateKey: await importPKCS8(cert.key.toString(), 'ES256') }
  t.equal(await subject(tokens, policy, await token(by)), 'u1')
  t.match(await subject(tokens, policy, await token(await pair('ES256'))), /^refused: the signature/)
})

t.test('a bad key file is refused with what is wrong and what is allowed', async (t) => {
  const { publicKey, privateKey } = generateKeyPairSync('rsa', { modulusLength: 2048 })
  const small = generateKeyPairSync('rsa', { modulusLength: 1024 }).publicKey
  const koblitz = generateKeyPairSync('ec', { namedCurve: 'secp256k1' }).publicKey
  const pem = spki(publicKey)
  const privateJwk = privateKey.export({ format: 'jwk' })
  for (const [text, found] of [
    ['', 'neither PEM nor a JSON object'],
    ['s3cret-s3cret-s3cret-s3cret-s3cret', 'neither PEM nor a JSON object'],
    ['[]', 'neither PEM nor a JSON object'],
    ['{"kty":', 'malformed JSON'],
    [pem + pem, '2 PEM blocks'],
    [privateKey.export({ type: 'pkcs8', format: 'pem' }) as string, 'a private key'],
    [privateKey.export({ type: 'pkcs1', format: 'pem' }) as string, 'a private key'],
    [pem.replaceAll(/[A-Z]/g, 'A'), 'neither PEM nor a JSON object'],
    ['-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----', 'PEM that holds no readable public key'],
    ['-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----', 'PEM that holds no readable public key'],
    [spki(small), 'an RSA key of 1024 bits'],
    [spki(koblitz), 'an EC key on secp256k1'],
    [spki(generateKeyPairSync('x25519').publicKey), 'a key of type x25519'],
    [spki(generateKeyPairSync('ed448').publicKey), 'a key of type ed448'],
    [spki(generateKeyPairSync('rsa-pss', { modulusLength: 2048 }).publicKey), 'a key of type rsa-pss'],
    [json({}), 'a JWK without "kty"'],
    [json({ keys: 'none' }), 'a JWK without "kty"'],
    [json({ keys: [] }), 'a JWK Set without keys'],
    [json({ keys: [RSA.jwk, 'key'] }), 'a JWK without "kty" at keys[1]'],
    [json(privateJwk), 'a private key'],
    [json({ keys: [RSA.jwk, privateJwk] }), 'a private key at keys[1]'],
    [json({ keys: [{ kty: 'AKP', priv: 'AAAA' }] }), 'a private key at keys[0]'],
    [json({ kty: 'oct', k: Buffer.alloc(31).toString('base64url') }), 'an oct JWK of 31 bytes'],
    [json({ kty: 'oct' }), 'an oct JWK of 0 bytes'],
    [json({ kty: 'oct', k: 'no base64url, but long enough for a secret' }), 'an oct JWK of 0 bytes'],
    [json({ ...rsa.jwk, use: 'enc' }), 'a JWK for another "use" than sig'],
    [json({ ...rsa.jwk, key_ops: ['encrypt'] }), 'a JWK whose "key_ops" lack verify'],
    [json({ ...rsa.jwk, key_ops: 'verify' }), 'a JWK whose "key_ops" lack verify'],
    [json({ kty: 'RSA', n: 'AQAB' }), 'a JWK that holds no readable public key'],
    [json({ kty: 'AKP', alg: 'new' }), 'a JWK that holds no readable public key'],
    [
      json({ keys: [small.export({ format: 'jwk' }), { ...rsa.jwk, use: 'enc' }] }),
      'an RSA key of 1024 bits',
    ],
  ] as const) {
    const message = checkKeyText(text) ?? 'nothing'
    t.equal(message.split('; allowed: ')[0], `found ${found}`)
    t.match(message, /; allowed: one public key or X\.509 certificate in PEM, a JWK or a JWK Set; of RSA/)
  }
})
