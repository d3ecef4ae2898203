import { readdirSync, readFileSync } from 'node:fs'
import { Ajv } from 'ajv'
import t from 'tap'
import { parse } from 'yaml'
import { FILE } from '../../src/config/properties.ts'
import { jsonSchema } from '../../src/config/rows.ts'
import { errorsOf, load, routeFile, UPSTREAM } from './support.ts'

const validate = new Ajv({ allowUnionTypes: true }).compile(JSON.parse(jsonSchema(FILE)))

function schemaAccepts(text: string): boolean {
  try {
    return validate(parse(text, { merge: true, logLevel: 'silent' }))
  } catch {
    return false
  }
}

const NEEDED = [
  'request: { path: "/a/{record}" }',
  'identity: { /record: "{record}" }',
  'completed: { status: 200 }',
]

/** What stands before the lines of a case. */
function aroundOf(own: string): string {
  if (!own.startsWith('    ')) return UPSTREAM
  if (!own.startsWith('      ')) return routeFile()
  const needed = NEEDED.filter((line) => !own.includes(`      ${line.split(' ')[0]}`))
  return routeFile('scope: { caller: none }', 'reconcile:', ...needed.map((line) => `  ${line}`))
}

/** The cases, each with its first line, its title, whether it is whole, whether the schema refuses it, and its other lines. */
const CASES = readFileSync('test/config/mistakes.yaml', 'utf8').split(
  /^(.*) {2}# ([\w ]+?)( \(whole\))?( \*)?\n/m,
)

void t.test('every mistake of mistakes.yaml has its messages; the schema finds those of form', async (t) => {
  t.ok(CASES.length > 5 * 300, `${CASES.length / 5} cases`)
  for (let n = 1; n < CASES.length; n += 5) {
    const [first = '', title = '', whole, schema, rest = ''] = CASES.slice(n, n + 5)
    const lines = [first, ...rest.split('\n').slice(0, -1)]
    const own = lines
      .filter((line) => !line.startsWith('#>'))
      .map((line) => `${line}\n`)
      .join('')
    const before = /^upstream:/m.test(own) || whole !== undefined ? '' : aroundOf(own)
    const expected: string[] = []
    let line = before.split('\n').length - 1
    for (const text of lines)
      if (!text.startsWith('#>')) line++
      else expected.push(text.replace(/^#> (\d+: )?/, (_all, column) => (column ? `${line}:${column}` : '')))
    const text = before + own
    const found = errorsOf(text, { env: { WORD: 'secret' } }).map((error) => error.replace(/^c\.yaml: ?/, ''))
    t.strictSame(found, expected, title)
    t.equal(schemaAccepts(text), schema === undefined, `${title}: what the JSON Schema says`)
  }
})

/** Paths of everything that may be written, lists and short forms aside. */
function propertiesOf(schema: Schema, path = ''): string[] {
  const mapping = schema.properties ?? schema.anyOf?.find((one) => one.properties !== undefined)?.properties
  if (mapping === undefined) return [path]
  return Object.entries(mapping).flatMap(([name, property]) =>
    propertiesOf(property, path === '' ? name : `${path}.${name}`),
  )
}

interface Schema {
  readonly properties?: Readonly<Record<string, Schema>>
  readonly anyOf?: readonly Schema[]
  readonly items?: Schema
}

function isWritten(value: unknown, path: readonly string[]): boolean {
  const [name, ...rest] = path
  if (name === undefined) return true
  return typeof value === 'object' && value !== null && name in value && isWritten(Object(value)[name], rest)
}

void t.test('everything.yaml sets every property', async (t) => {
  const schema = JSON.parse(jsonSchema(FILE)) as Required<Schema>
  const { routes: routeSchema, defaults: _, ...top } = schema.properties
  const file = parse(readFileSync('test/config/everything.yaml', 'utf8'), { merge: true })
  // Not allowed with store.migrate: load.test.ts covers them.
  const apart = ['store.primary.url', 'store.cache.url']
  for (const path of propertiesOf({ properties: top }))
    if (!apart.includes(path)) t.ok(isWritten(file, path.split('.')), path)
  for (const path of propertiesOf(routeSchema?.items ?? {}))
    t.ok(
      file.routes.some((route: unknown) => isWritten(route, path.split('.'))),
      `routes[].${path}`,
    )
})

void t.test('the examples of config/ load, and the JSON Schema accepts them', async (t) => {
  const examples = readdirSync('config').filter((name) => name.endsWith('.yaml'))
  t.ok(
    examples.includes('minimal.yaml') &&
      examples.includes('payments.yaml') &&
      examples.includes('webhooks.yaml'),
  )
  for (const name of examples) {
    const text = readFileSync(`config/${name}`, 'utf8')
    t.ok(load(text).upstream.url, name)
    t.ok(schemaAccepts(text), `${name} against the schema`)
    t.match(text, '# yaml-language-server: $schema=../schema/idempotency-proxy.schema.json')
  }
})

void t.test('schema/idempotency-proxy.schema.json is what `idempotency-proxy schema` prints', async (t) => {
  t.equal(readFileSync('schema/idempotency-proxy.schema.json', 'utf8'), jsonSchema(FILE))
})
