import { readFileSync } from 'node:fs'
import t from 'tap'
import { loadConfig } from '../../src/config/load.ts'
import { readDescriptors } from '../../src/core/rpc/descriptors.ts'
import { command } from '../support/commands.ts'
import { descriptionFile } from './support.ts'

const SET = 'examples/grpc/payments.binpb'

void t.test('a descriptor set says what its methods are', async (t) => {
  const reading = readDescriptors(readFileSync(SET))
  if (reading.kind !== 'descriptors') throw new Error(reading.why)
  t.strictSame(
    [...reading.descriptors.methods.values()].map(({ name, streams, safety, fields }) => [
      name,
      streams,
      safety,
      fields.join(),
    ]),
    [
      ['shop.v1.Payments/Create', 'none', 'unknown', 'requestId,amount,order'],
      ['shop.v1.Payments/Get', 'none', 'no side effects', 'id'],
      ['shop.v1.Payments/Watch', 'server', 'unknown', 'id'],
      ['shop.v1.Payments/Echo', 'both', 'unknown', 'id,amount'],
    ],
  )
  const create = reading.descriptors.methods.get('shop.v1.Payments/Create')
  // request_id: "r", amount: 2^53 + 1, a field 9 that the set does not know.
  const message = Buffer.from('0a017210818080808080801048014a0178', 'hex')
  t.equal(create?.jsonOf(message), '{"requestId":"r","amount":"9007199254740993"}')
  t.equal(create?.jsonOf(Buffer.from([0x0a, 0x05, 0x72])), null, 'cut')
  t.match(readDescriptors(Buffer.from('text')), { kind: 'refused' })
})

void t.test('routes from a descriptor set is a configuration that check accepts', async (t) => {
  const { code, out } = await command(['routes', 'from', SET, '--upstream', 'http://10.0.0.9:50051'])
  t.equal(code, 0)
  const loaded = loadConfig({ file: 'draft.yaml', text: out, env: {}, flags: {} })
  if (!loaded.ok) throw new Error(JSON.stringify(loaded.errors))
  const { routes, upstream, listen } = loaded.config
  t.match(
    { routes, upstream, listen },
    {
      listen: { http2: true },
      upstream: { url: 'http://10.0.0.9:50051', http2: true },
      routes: [
        {
          name: 'shop.v1.Payments.Create',
          match: { grpc: 'shop.v1.Payments/Create', path: '/shop.v1.Payments/Create', methods: ['POST'] },
          key: { presence: 'optional', from: [{}, {}, { kind: 'json', pointer: '/requestId' }] },
        },
      ],
    },
  )
  t.equal(routes.length, 1)
  t.match(out, '# 1 of 4 methods; of the others 1 declared idempotent')
})

void t.test('what is no descriptor set, or has nothing to protect, is a finding', async (t) => {
  const file = descriptionFile(t, 'text', 'text.binpb')
  for (const [path, says] of [
    [file, /found no descriptor set/],
    ['absent.pb', /no such file/],
  ] as const) {
    const { code, err } = await command(['routes', 'from', path])
    t.equal(code, 1)
    t.match(err, says)
  }
})
