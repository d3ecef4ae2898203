import { readFileSync } from 'node:fs'
import fc from 'fast-check'
import t from 'tap'
import { LARGE, SMALL } from '../../bench/bodies.ts'
import { compiled, MODULE } from '../../scripts/assembly.ts'
import { canonicalJson } from '../../src/core/body/json.ts'
import { MAX_DEPTH } from '../../src/core/body/json-scalars.ts'
import { SHORT_BODY } from '../../src/core/body/json-text.ts'
import { UsualJson } from '../../src/core/fingerprint.ts'

const usual = UsualJson.load() as UsualJson

/** The canonical text; undefined: left to the other reader. @throws if the other reader gives another text. */
function textOf(body: Buffer | string): string | undefined {
  const bytes = Buffer.from(body)
  const found = usual.textOf(bytes)?.toString()
  const text = canonicalJson(bytes)?.toString()
  if (found !== undefined && found !== text)
    throw new Error(`${bytes.toString()}: ${found} instead of ${text}`)
  return found
}

void t.test('the WebAssembly reader reads usual bodies', async (t) => {
  for (const body of [SMALL, LARGE, JSON.stringify(JSON.parse(SMALL), null, 2)])
    t.type(textOf(body), 'string')
  const read = {
    ' 1': '1',
    '{"b":1,"a":2}': '{"a":2,"b":1}',
    ' { "b" : [ ] , "a" : { } } ': '{"a":{},"b":[]}',
    '[10.50,10.00,-0.5,0,true,false,null,"é😀"]': '[10.5,10,-0.5,0,true,false,null,"é😀"]',
    [String.raw`["\/","\\\"\b\f\n\r\t"]`]: String.raw`["/","\\\"\b\f\n\r\t"]`,
    '[{"a":1},{"a" :2}]': '[{"a":1},{"a":2}]',
    '[{"a" :1},{"a" :2}]': '[{"a":1},{"a":2}]',
    '{"b":{"d":[{"z":1,"y": 2},{"z":3,"y":4}],"c":1},"a":1}':
      '{"a":1,"b":{"c":1,"d":[{"y":2,"z":1},{"y":4,"z":3}]}}',
    '{"a name of more than sixteen bytes":1,"a name of more than fifteen bytes":2}':
      '{"a name of more than fifteen bytes":2,"a name of more than sixteen bytes":1}',
  }
  for (const [body, text] of Object.entries(read)) t.equal(textOf(body), text, body)
})

void t.test('a body already in canonical form is returned as it is', async (t) => {
  const body = Buffer.from('{"a":1,"b":[2]}')
  t.equal(usual.textOf(body), body)
})

void t.test('rare, too large or invalid JSON is left to the other reader', async (t) => {
  const wide = Array.from({ length: 33 }, (_, n) => `"${32 - n}":0`)
  const left = [
    ...String.raw`{ [1,] {"a":1,} " "\ "\u0041" {"\n":1} tru nul fals 01 - -0 1. .5 0.0 0.01 1e1 1E1 1.5e1`.split(
      ' ',
    ),
    ...'1234567890123456 1.23456789012345 {"a":1,"a":2} {"b":1,"a":2,"a":3} [{"a":1},{"a":1,"a":2}]'.split(
      ' ',
    ),
    '',
    ' ',
    '"\t"',
    '1 2',
    '\0',
    '[1\0]',
    '{"\ue000":1,"😀":2}',
    `{${wide.join()}}`,
    '['.repeat(MAX_DEPTH + 1) + ']'.repeat(MAX_DEPTH + 1),
    `"${'x'.repeat(SHORT_BODY - 1)}"`,
    `{"b":1${',"":1'.repeat(13_105)}}`,
  ]
  for (const body of left) t.equal(textOf(body), undefined, body.slice(0, 40))
  t.equal(usual.textOf(Buffer.from([0x22, 0xff, 0x22])), null, 'not UTF-8')
})

void t.test('bodies right at the limits are read', async (t) => {
  const deep = '['.repeat(MAX_DEPTH) + ']'.repeat(MAX_DEPTH)
  const wide = Array.from({ length: 32 }, (_, n) => `"${String(31 - n).padStart(2, '0')}":0`)
  const long = `"${'x'.repeat(SHORT_BODY - 2)}"`
  const many = Array.from({ length: 6000 }, (_, n) => `"${String(n).padStart(4, '0')}":1`)
  for (const body of [deep, `{${wide.join()}}`, long, `{${many.join()}}`, '123456789012345'])
    t.type(textOf(body), 'string', body.slice(0, 40))
  const nested = `{"b":${'{"b":0,"a":'.repeat(99)}${'7'.repeat(15)}${'}'.repeat(99)},"a":1}`
  t.type(textOf(nested), 'string')
})

void t.test('the WebAssembly reader never disagrees with the other reader', async () => {
  const runs = { numRuns: 5000, seed: 98 }
  fc.assert(
    fc.property(fc.json({ maxDepth: 5 }), fc.constantFrom(0, 1), (json, indent) => {
      textOf(JSON.stringify(JSON.parse(json), null, indent))
    }),
    runs,
  )
  const bytes = Buffer.from(
    JSON.stringify(JSON.parse(LARGE.slice(0, 4096).replace(/,\{[^}]*$/, '],"note":""}'))),
  )
  const change = fc.tuple(
    fc.nat(bytes.length - 1),
    fc.constantFrom(...String.raw`" \ { } [ ] , : 0 . 5 e E - t a`.split(' '), ' ', '\n', '\0', '\x1f'),
    fc.boolean(),
  )
  fc.assert(
    fc.property(fc.array(change, { minLength: 1, maxLength: 4 }), (changes) => {
      let body = bytes
      for (const [at, character, isMore] of changes)
        body = Buffer.concat([
          body.subarray(0, at),
          Buffer.from(character),
          body.subarray(at + (isMore ? 0 : 1)),
        ])
      textOf(body)
    }),
    runs,
  )
})

void t.test('a process without WebAssembly has only the other reader', async (t) => {
  t.equal(UsualJson.load({}), null)
})

void t.test('the module is what its source compiles to', async (t) => {
  t.equal(readFileSync(MODULE, 'utf8'), compiled(), 'run: node scripts/assembly.ts')
})
