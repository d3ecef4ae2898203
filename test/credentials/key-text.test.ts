import { generateKeyPairSync, type KeyObject } from 'node:crypto'
import t from 'tap'
import { verifier } from '../../src/credentials/callers.ts'
import { checkKeyText } from '../../src/credentials/key-text.ts'
import { certificate } from '../support/certificates.ts'
import { NOW, POLICY, pair, subject, token } from './support.ts'

const rsa = await pair('RS256')
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
    ['a JWK', json(rsa.jwk)],
    ['a JWK with PEM inside', json({ ...rsa.jwk, x5c: [spki(ec)] })],
    ['a secret', json(oct)],
    ['a set, indented, after a byte order mark', `\uFEFF${JSON.stringify({ keys: [rsa.jwk] }, null, 2)}\n`],
    ['a set with both', json({ keys: [rsa.jwk, oct] })],
    ['a set with keys for other uses', json({ keys: [{ ...rsa.jwk, use: 'enc' }, { kty: 'new' }, rsa.jwk] })],
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
    [json({ keys: [rsa.jwk, 'key'] }), 'a JWK without "kty" at keys[1]'],
    [json(privateJwk), 'a private key'],
    [json({ keys: [rsa.jwk, privateJwk] }), 'a private key at keys[1]'],
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
