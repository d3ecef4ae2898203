import { Ajv } from 'ajv'
import t, { type Test } from 'tap'
import { parse } from 'yaml'
import { FILE } from '../../src/config/properties.ts'
import { jsonSchema } from '../../src/config/rows.ts'
import { errorsOf, UPSTREAM } from './support.ts'

const validate = new Ajv({ allowUnionTypes: true }).compile(JSON.parse(jsonSchema(FILE)))

/** What contract §10 names and this version does not do, as it would be written. */
const AT_TOP: Record<string, string> = {
  'store.wait': 'store: { wait: { replicas: 1, timeout: 1s } }',
  'store.encryption': 'store: { encryption: { keys: [] } }',
  'store.compression': 'store: { compression: zstd }',
  'store.primary': 'store: { primary: { url: "redis://h" } }',
  'store.cache': 'store: { cache: { url: "redis://h" } }',
  'store.url: redis+sentinel:': 'store: { url: "redis+sentinel://u:p@h1:26379,h2:26379/m/0" }',
  'store.url: redis+cluster:': 'store: { url: "redis+cluster://h1:7000,h2:7001" }',
  'store.url: postgres:': 'store: { url: "postgres://u:p@h/d" }',
  'store.url: dynamodb:': 'store: { url: "dynamodb://eu-central-1/t" }',
  'store.url: tiered:': 'store: { url: "tiered:" }',
}

function refused(t: Test, what: string, text: string): void {
  const errors = errorsOf(text)
  t.equal(errors.length, 1, what)
  t.match(errors[0], `: \`${what}\` is not implemented in this version`)
  t.match(errors[0], /^c\.yaml:\d+:\d+: /)
  t.notOk(validate(parse(text)), 'the JSON Schema does not offer it')
}

for (const [what, line] of Object.entries(AT_TOP)) {
  void t.test(`${what} is not implemented, and says so`, async (t) =>
    refused(t, what, `${UPSTREAM}${line}\n`),
  )
}
