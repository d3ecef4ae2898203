import { spawn, spawnSync } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { text } from 'node:stream/consumers'
import { createFileRegistry, type DescService, fromBinary } from '@bufbuild/protobuf'
import { FileDescriptorSetSchema } from '@bufbuild/protobuf/wkt'
import { Code, ConnectError, createClient, type Transport } from '@connectrpc/connect'
import { createConnectTransport, createGrpcTransport, createGrpcWebTransport } from '@connectrpc/connect-node'
import t, { type Test } from 'tap'
import { type PaymentsService, startPayments } from '../../examples/grpc/server.ts'
import { newKey, tempDir } from '../support/e2e.ts'
import { rpcServer, type Told } from '../support/grpc.ts'
import { type ChildProxy, proxyInProcess, proxyProcess } from '../support/proxy.ts'

t.setTimeout(120_000)

/** The example's service behind the proxy, as its README starts them. */
async function example(t: Test): Promise<{ readonly service: PaymentsService; readonly proxy: ChildProxy }> {
  const service = await startPayments()
  t.teardown(() => service[Symbol.asyncDispose]())
  const proxy = await proxyProcess('examples/grpc/proxy.yaml', [], {
    PROXY_LISTEN: '127.0.0.1:0',
    PROXY_ADMIN_LISTEN: '127.0.0.1:0',
    PROXY_UPSTREAM: service.url,
    PROXY_STORE: `sqlite:${tempDir(t)}/store.db`,
  })
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return { service, proxy }
}

async function run(command: string, args: readonly string[]): Promise<string> {
  const child = spawn(command, args, { stdio: ['ignore', 'pipe', 'inherit'] })
  return text(child.stdout)
}

void t.test('the example pays once, however often its client runs', async (t) => {
  const { service, proxy } = await example(t)
  const pay = () =>
    run(process.execPath, ['examples/grpc/pay.ts', `127.0.0.1:${proxy.port}`, 'order-1001', '4200'])
  t.strictSame([await pay(), await pay()], Array(2).fill('{"id":"pay_1","amount":"4200"}\n'))
  t.strictSame(service.made, ['4200'])
})

const PYTHON = ['python3', '/usr/bin/python3'].find(
  (python) => spawnSync(python, ['-c', 'import grpc']).status === 0,
)

void t.test("Debian's python3-grpcio", { skip: PYTHON === undefined && 'no python3 has grpc' }, async (t) => {
  const seen: string[] = []
  const server = await rpcServer((message): Told => {
    seen.push(String(message))
    return String(message) === 'none'
      ? { code: 'NOT_FOUND', trailers: { 'x-why': 'gone' } }
      : { message: 'paid', metadata: { 'x-shop': 'a' }, trailers: { 'x-cost': '1' } }
  })
  t.teardown(() => server[Symbol.asyncDispose]())
  const proxy = await proxyInProcess(`
listen: { address: "127.0.0.1:0", http2: true }
upstream: { url: "${server.url}", http2: true }
store: { url: "memory:" }
routes:
  - { name: payments, match: { grpc: shop.Payments/* }, key: required }
`)
  t.teardown(() => proxy.drain())
  const call = async (...args: string[]) =>
    JSON.parse(await run(PYTHON as string, ['test/clients/grpc_call.py', `127.0.0.1:${proxy.port}`, ...args]))
  const key = newKey()
  const first = await call(key, 'pay')
  t.match(first, { code: 'OK', message: 'paid', metadata: { 'x-shop': 'a' }, trailers: { 'x-cost': '1' } })
  const { 'idempotent-replayed': replayed, ...metadata } = (await call(key, 'pay', 'gzip')).metadata
  t.strictSame([metadata, replayed], [first.metadata, 'true'])
  t.match(await call(key, 'pay more'), {
    code: 'INVALID_ARGUMENT',
    trailers: { 'idempotency-retry': 'no', 'grpc-status-details-bin': /^08/ },
  })
  t.match(await call('', 'pay'), { code: 'INVALID_ARGUMENT', details: /idempotency-key/ })
  const other = newKey()
  for (let n = 0; n < 2; n++)
    t.match(await call(other, 'none'), { code: 'NOT_FOUND', trailers: { 'x-why': 'gone' } })
  t.strictSame(seen, ['pay', 'none'])
})

const SERVICE = createFileRegistry(
  fromBinary(FileDescriptorSetSchema, readFileSync('examples/grpc/payments.binpb')),
).getService('shop.v1.Payments') as DescService

/** What a client made at run time offers. */
interface Payments {
  create(
    request: { readonly requestId?: string; readonly amount: bigint },
    options: { readonly headers: Record<string, string>; readonly onHeader: (headers: Headers) => void },
  ): Promise<{ readonly id: string }>
}

void t.test("Connect's clients, by each of its protocols", async (t) => {
  const { service, proxy } = await example(t)
  const { url } = proxy
  const before = service.made.length
  const transports: Record<string, Transport> = {
    gRPC: createGrpcTransport({ baseUrl: url }),
    'gRPC, compressed': createGrpcTransport({ baseUrl: url, compressMinBytes: 1 }),
  }
  for (const [name, transport] of Object.entries(transports)) {
    const client = createClient(SERVICE, transport) as unknown as Payments
    const requestId = newKey()
    const headers = { authorization: 'Bearer a' }
    const replayed: (string | null)[] = []
    const onHeader = (got: Headers): void => void replayed.push(got.get('idempotent-replayed'))
    const ask = (amount: bigint, id = requestId) =>
      client.create({ requestId: id, amount }, { headers, onHeader })
    const [first, second] = [await ask(7n), await ask(7n)]
    t.equal(second.id, first.id, name)
    t.strictSame(replayed.slice(0, 2), [null, 'true'], name)
    for (const id of [requestId, '']) {
      const error = await ask(8n, id).then(
        () => null,
        (reason: unknown) => ConnectError.from(reason),
      )
      t.equal(error?.code, Code.InvalidArgument, name)
      t.match(error?.details, [{ type: 'google.rpc.ErrorInfo' }], name)
    }
  }
  t.equal(service.made.length - before, Object.keys(transports).length)
})

void t.test('Connect over HTTP/1.1, and gRPC-Web', async (t) => {
  const { createServer } = await import('node:http')
  const { connectNodeAdapter } = await import('@connectrpc/connect-node')
  let made = 0
  const upstream = createServer(
    connectNodeAdapter({
      routes: (router) =>
        router.service(SERVICE, {
          create: ({ amount }: { amount: bigint }) => {
            made++
            if (amount === 0n) throw new ConnectError('none', Code.FailedPrecondition)
            return { id: `pay_${made}`, amount }
          },
        } as never),
    }),
  )
  await new Promise<void>((resolve) => upstream.listen(0, '127.0.0.1', resolve))
  t.teardown(() => upstream.close())
  const { port } = upstream.address() as { port: number }
  const proxy = await proxyInProcess(`
listen: 127.0.0.1:0
upstream: { url: "http://127.0.0.1:${port}" }
store: { url: "memory:" }
grpc: { descriptors: examples/grpc/payments.binpb }
routes:
  - name: payments
    match: { grpc: shop.v1.Payments/* }
    key: { presence: required, from: ["header:idempotency-key", "json:/requestId"] }
`)
  t.teardown(() => proxy.drain())
  const options = { baseUrl: proxy.url, httpVersion: '1.1' as const }
  for (const [name, transport] of Object.entries({
    'Connect, proto': createConnectTransport({ ...options, useBinaryFormat: true }),
    'Connect, proto, compressed': createConnectTransport({ ...options, compressMinBytes: 1 }),
    'Connect, JSON': createConnectTransport({ ...options, useBinaryFormat: false }),
    'gRPC-Web': createGrpcWebTransport(options),
  })) {
    const client = createClient(SERVICE, transport) as unknown as Payments
    const replayed: (string | null)[] = []
    const onHeader = (got: Headers): void => void replayed.push(got.get('idempotent-replayed'))
    const ask = (amount: bigint, requestId: string) =>
      client.create({ requestId, amount }, { headers: {}, onHeader })
    const failed = (asked: Promise<unknown>): Promise<Code | undefined> =>
      asked.then(
        () => undefined,
        (reason: unknown) => ConnectError.from(reason).code,
      )
    const before = made
    const key = newKey()
    const [first, second] = [await ask(7n, key), await ask(7n, key)]
    t.equal(second.id, first.id, name)
    t.strictSame(replayed, [null, 'true'], name)
    t.equal(await failed(ask(8n, key)), Code.InvalidArgument, name)
    const other = newKey()
    for (let n = 0; n < 2; n++) t.equal(await failed(ask(0n, other)), Code.FailedPrecondition, name)
    t.equal(made - before, 2, name)
  }
})
