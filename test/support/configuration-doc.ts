import { publishedSchema } from '../../src/config/schema.ts'

interface Schema {
  readonly properties?: Readonly<Record<string, Schema>>
  readonly items?: Schema
  readonly anyOf?: readonly Schema[]
  readonly $ref?: string
  readonly description?: string
  readonly default?: unknown
  readonly enum?: readonly unknown[]
}

const HEAD = `# Configuration

One YAML file. Generated from the schema that also checks it (\`idempotency-proxy schema\`); editors use it by

\`\`\`yaml
# yaml-language-server: $schema=https://…/schema/idempotency-proxy.schema.json
\`\`\`

- \`\${NAME}\` and \`\${NAME:-default}\` are taken from the environment, in scalars, after parsing. Unset without a default is
  an error.
- Durations are \`250ms 30s 24h 7d\`, sizes \`64KiB 1MiB\`.
- Unknown properties are errors, and so are those that this version does not implement. All errors are told at once, with
  file, line and column: \`idempotency-proxy check FILE\`.
- A value is the route's, else that of \`defaults\`, else the profile's, else the default below.
- \`key.derive: off\` and \`authorizeReplay: none\` turn off what \`defaults\` turned on, as \`none\` and \`off\` do elsewhere. Of
  \`scope.jwt.jwks\` and \`keyFile\`, the one that a route sets takes the place of the other.
- \`status.path\` (GET), \`issuer.path\` (POST) and with \`wellKnown\` \`/.well-known/idempotency\` (GET, HEAD) are answered by the proxy
  before any route: a wider route gets the rest, and one that has such a path alone is an error.
- Paths: exact, \`:name\` for one segment, a trailing \`/*\`. Duplicate slashes, dot segments, a trailing slash and needless
  percent-encoding match the same route (\`match.exact: true\` turns that off); the upstream gets the target as sent.
- \`fingerprint.ignore\` and \`only\` need JSON that is read: under \`auto\`, bodies over 64 KiB or nested deeper than 100 are compared
  as bytes, whole; \`body: json\` has no bound but \`limits.request\` and the depth.
- Routes, \`defaults\` and \`limits\` are reloaded while it runs; the rest needs a restart ([reload.md](reload.md)).
- After a change of key source, \`scope\` or \`match\`, keys used before are other keys: wait out \`ttl\`.

Commented examples: [minimal](../config/minimal.yaml), [payments](../config/payments.yaml),
[webhooks](../config/webhooks.yaml).

`

/** docs/configuration.md, whole. */
export function configurationDoc(): string {
  const schema = JSON.parse(publishedSchema()) as Schema & { definitions: Record<string, Schema> }
  const top: string[] = []
  const policy: string[] = []
  for (const [name, part] of Object.entries(schema.properties ?? {})) {
    if (name === 'defaults') walk('', part, policy)
    else if (name === 'routes') {
      const route = part.items?.properties ?? {}
      for (const own of ['name', 'match']) walk(`routes[].${own}`, route[own] as Schema, top)
    } else walk(name, part, top)
  }
  return `${HEAD}## The file\n\n${table(top)}\n## Of \`defaults\` and of every route\n\n${table(policy)}`
}

function table(rows: readonly string[]): string {
  return `| property | default | meaning |\n|---|---|---|\n${rows.join('\n')}\n`
}

function walk(path: string, schema: Schema, rows: string[]): void {
  const object =
    schema.properties !== undefined ? schema : schema.anyOf?.find((one) => one.properties !== undefined)
  if (object?.properties !== undefined) {
    // A mapping that a word turns off.
    if (schema.default !== undefined) rows.push(row(path, schema))
    for (const [name, part] of Object.entries(object.properties))
      walk(path === '' ? name : `${path}.${name}`, part, rows)
    return
  }
  rows.push(row(path, schema))
}

function row(path: string, schema: Schema): string {
  const value = schema.default === undefined ? '' : `\`${show(schema.default)}\``
  const choices = values(schema)
  const meaning = [schema.description ?? '', choices.length > 0 ? `One of ${choices.join(', ')}.` : '']
  const text = meaning.filter((part) => part !== '').join(' ')
  return `| \`${path}\` | ${value} | ${text.replaceAll('|', '\\|')} |`
}

function values(schema: Schema): string[] {
  const choices = schema.enum ?? schema.anyOf?.find((one) => one.enum !== undefined)?.enum ?? []
  return choices.map((choice) => `\`${String(choice)}\``)
}

function show(value: unknown): string {
  return typeof value === 'string' ? value : JSON.stringify(value)
}
