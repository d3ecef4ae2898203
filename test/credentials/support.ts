import { once } from 'node:events'
import { createServer, type RequestListener } from 'node:http'
import type { AddressInfo, Socket } from 'node:net'
import { type CryptoKey, exportJWK, generateKeyPair, type JWK, type JWTPayload, SignJWT } from 'jose'
import type { VerifiedToken } from '../../src/core/identity.ts'
import type { JwtPolicy } from '../../src/core/policy.ts'
import type { Verifier } from '../../src/credentials/callers.ts'

/** 2027-01-15T08:00:00Z, where the clocks of these tests start. */
export const NOW = 1_800_000_000_000
const HOUR = 3600

export const POLICY: JwtPolicy = { jwks: null, keyFile: null, issuer: null, audience: [] }

export interface Pair {
  readonly alg: string
  readonly kid: string
  readonly jwk: JWK
  readonly privateKey: CryptoKey
  readonly publicKey: CryptoKey
}

export async function pair(alg: string, kid = 'k1'): Promise<Pair> {
  const { privateKey, publicKey } = await generateKeyPair(alg, { extractable: true })
  return { alg, kid, privateKey, publicKey, jwk: { ...(await exportJWK(publicKey)), kid } }
}

/** A token of `by`, for an hour from `NOW`, without what `claims` and `header` set to undefined. */
export async function token(by: Pair, claims: JWTPayload = {}, header: object = {}): Promise<string> {
  return new SignJWT({ sub: 'u1', exp: NOW / 1000 + HOUR, ...claims })
    .setProtectedHeader({ alg: by.alg, kid: by.kid, ...header })
    .sign(by.privateKey)
}

export function bearer(credentials: string): string[] {
  return ['Host', 'api', 'Authorization', `Bearer ${credentials}`]
}

/** Encodes a part of a token, or anything else, as a JWT does. */
export function part(value: unknown): string {
  return Buffer.from(typeof value === 'string' ? value : JSON.stringify(value)).toString('base64url')
}

/** `sub` of an accepted token, or else the verdict. */
export async function subject(verifier: Verifier, policy: JwtPolicy, credentials: string): Promise<unknown> {
  return told(await verifier.verify(policy, bearer(credentials)))
}

export function told(verified: VerifiedToken): unknown {
  switch (verified.kind) {
    case 'claims':
      return verified.claims.sub
    case 'absent':
      return 'absent'
    case 'refused':
    case 'unavailable':
      return `${verified.kind}: ${verified.detail}`
  }
}

export interface JwksServer extends AsyncDisposable {
  readonly url: string
  /** How many requests it got. */
  asked: number
  answer: RequestListener
  /** Answers with these keys from now on. */
  publish(...pairs: readonly Pair[]): void
  /** Refuses connections from now on. */
  stop(): Promise<void>
}

/** A key server on loopback. */
export async function jwksServer(...pairs: readonly Pair[]): Promise<JwksServer> {
  const http = createServer((request, response) => {
    server.asked++
    server.answer(request, response)
  })
  const sockets = new Set<Socket>()
  http.on('connection', (socket) => {
    sockets.add(socket)
    socket.on('close', () => sockets.delete(socket))
  })
  http.listen(0, '127.0.0.1')
  await once(http, 'listening')
  const server: JwksServer = {
    url: `http://127.0.0.1:${(http.address() as AddressInfo).port}/jwks`,
    asked: 0,
    answer: () => {},
    publish(...published) {
      const body = JSON.stringify({ keys: published.map(({ jwk }) => jwk) })
      this.answer = (_, response) => response.setHeader('content-type', 'application/json').end(body)
    },
    async stop() {
      if (!http.listening) return
      http.close()
      for (const socket of sockets) socket.destroy()
      await once(http, 'close')
    },
    async [Symbol.asyncDispose]() {
      await this.stop()
    },
  }
  server.publish(...pairs)
  return server
}
