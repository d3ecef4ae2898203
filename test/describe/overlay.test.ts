import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { words } from '../core/fixtures.ts'
import { command } from '../support/commands.ts'
import {
  type Any,
  AWKWARD,
  AWKWARD_ROUTES,
  applied,
  CONFIG,
  descriptionFile,
  EXAMPLE,
  overlaid,
  ROUTES,
  withPaths,
} from './support.ts'

void t.test('the overlay adds parameters, headers and answers to the example', async (t) => {
  const { api, overlay } = await applied(t, readFileSync(EXAMPLE, 'utf8'), ROUTES)
  t.equal(overlay.overlay, '1.0.0')
  t.ok(overlay.info.title && overlay.info.version)
  const { paths, components } = api
  const { post, get } = paths['/payments']

  t.strictSame(post.parameters, [{ $ref: '#/components/parameters/Key' }], 'already described')
  const marks = {
    'Idempotent-Replayed': { $ref: '#/components/headers/IdempotentReplayed' },
    'Idempotency-Status': { $ref: '#/components/headers/IdempotencyStatus' },
    'Idempotency-Expires': { $ref: '#/components/headers/IdempotencyExpires' },
  }
  t.strictSame(post.responses['201'].headers, marks)
  t.strictSame(post.responses['402'].headers, marks, 'stored, so replayed')
  t.equal(post.responses['201'].description, 'Created.')
  t.equal(post.responses['409'].description, 'The account is closed.', 'the existing text stays')
  const problem = { schema: { $ref: '#/components/schemas/IdempotencyProblem' } }
  t.strictSame(post.responses['409'].content, {
    'application/json': { schema: { type: 'object' } },
    'application/problem+json': problem,
  })
  t.strictSame(Object.keys(post.responses).sort(), words`201 400 401 402 408 409 413 422 502 503 504`)
  t.match(post.responses['401'].description, /not identified \(idempotency_caller_missing\)/)
  t.notOk(post.responses['401'].headers, 'released, never replayed')
  t.match(post.responses['503'].headers, { 'Retry-After': { schema: { type: 'integer' } } })
  t.strictSame(Object.keys(get.responses), ['200'], 'what is not protected is left alone')

  const change = paths['/payments/{payment-id}'].patch
  t.equal(change.parameters.length, 2, 'completed, not duplicated')
  t.match(change.parameters[1], { name: 'Idempotency-Key', required: true, schema: { maxLength: 64 } })
  const { parameters } = paths['/payments/{payment-id}/evidence'].post
  t.match(parameters[1], {
    name: 'X-Idempotency-Key',
    in: 'header',
    required: false,
    description: /for 24 hours\./,
    schema: { type: 'string', minLength: 1, maxLength: 255 },
  })
  for (const path of ['/payments/search', '/webhooks/orders'])
    t.notMatch(JSON.stringify(paths[path]), /dempoten/, `${path}: ignored or in shadow`)
  t.strictSame(Object.keys(components.schemas), ['IdempotencyProblem'])
  t.match(
    components.schemas.IdempotencyProblem.properties.type.description,
    'https://docs.example.com/problems/',
  )
})

void t.test('what cannot be merged is left alone and reported', async (t) => {
  const { api: made, overlay, err } = await applied(t, AWKWARD, AWKWARD_ROUTES)
  for (const says of [
    /api\.yaml:12: POST \/a: the description does not require Idempotency-Key, the route does: fix the parameter/,
    /api\.yaml:12: POST \/a: its 200 is a reference, whose headers are left unchanged\n/,
    /POST \/a: its 400 is a reference, to which idempotency_key_missing, .* cannot be added\n/,
    /POST \/a: its 409 describes problems already; the proxy adds idempotency_key_in_progress, .*\n/,
  ])
    t.match(err, says)
  const { responses, parameters } = made.paths['/a'].post
  t.notOk(parameters)
  t.strictSame(responses['400'], { $ref: '#/components/responses/Done' })
  t.strictSame(Object.keys(responses['201'].headers), ['idempotent-replayed'])
  for (const status of ['2XX', 'default', '500', '503'])
    t.strictSame(
      responses[status].headers?.['Idempotent-Replayed'],
      { $ref: '#/components/headers/IdempotentReplayed3' },
      status,
    )
  t.notOk(responses['429'].headers, 'released, never replayed')
  t.strictSame(made.components.schemas.IdempotencyProblem, { type: 'string' }, 'the existing one stays')
  t.match(made.components.schemas.IdempotencyProblem2, { type: 'object' })
  t.match(
    made.components.pathItems.One.post.parameters,
    [{ name: 'Idempotency-Key' }],
    'once, where it is defined',
  )
  t.equal(overlay.actions.filter(({ target }) => target.includes("['One']")).length, 1)
  t.ok(overlay.actions.some(({ target }) => target === "$['paths']['/it\\'s/{a b}']['post']"))
})

void t.test('the overlay describes keys as the route takes them', async (t) => {
  const api = withPaths('/a: { post: { responses: { "200": { description: d } } } }')
  const parametersFor = async (key: string): Promise<Any> =>
    (await applied(t, api, `routes: [ { name: a, match: { path: /a }, key: ${key} } ]`)).api.paths['/a'].post
  t.match(await parametersFor('{ syntax: strict, presence: required }'), {
    parameters: [{ required: true, schema: { pattern: '^".*"$' } }],
  })
  t.match(await parametersFor('{ pattern: "[0-9a-f-]{36}" }'), {
    parameters: [{ required: false, schema: { pattern: '^(?:[0-9a-f-]{36})$' } }],
  })
  const alphabetic = await parametersFor('{ pattern: "[[:alpha:]]+" }')
  t.notMatch(JSON.stringify(alphabetic), /alpha/, 'ECMAScript has no such class')
  const several = await parametersFor('{ from: ["header:a", "header:b-c"], presence: required }')
  t.match(several.parameters, [
    { name: 'A', required: false },
    { name: 'B-C', required: false },
  ])
  const query = await parametersFor('{ from: ["query:idempotency_key"], presence: required, syntax: strict }')
  t.match(query.parameters, [
    { name: 'idempotency_key', in: 'query', required: true, schema: { minLength: 1, maxLength: 255 } },
  ])
  t.notOk((await parametersFor('{ from: ["form:key"], presence: required }')).parameters, 'it is in the body')
  t.notOk((await parametersFor('{ from: ["json:/id"], presence: required }')).parameters, 'it is in the body')
  const derived = await parametersFor('{ presence: required, derive: { json: [/a] } }')
  t.match(derived.parameters, [{ required: false }])
  t.ok(derived.responses['200'].headers['Idempotency-Key-Derived'])
})

void t.test('an operation that no route matches is documented if the defaults protect it', async (t) => {
  const api = withPaths('/a: { post: { responses: { "200": { description: d } } } }')
  t.match(await overlaid(t, api, ''), {
    code: 1,
    out: '',
    err: /api\.yaml: found no operation that .*proxy\.yaml protects/,
  })
  const config = descriptionFile(t, 'defaults: { key: required }\n', 'proxy.yaml')
  const file = descriptionFile(t, api)
  const said = await command([
    'routes',
    'overlay',
    file,
    '--config',
    config,
    '--upstream',
    'http://127.0.0.1:1',
  ])
  t.equal(said.code, 0)
  t.match(said.out, /required: false/)
})

void t.test('a configuration or a description that cannot be read exits 1, a usage error 2', async (t) => {
  const api = descriptionFile(t, withPaths('/a: { post: {} }'))
  const bad = descriptionFile(t, 'stor: {}\n', 'proxy.yaml')
  const good = descriptionFile(t, CONFIG, 'proxy.yaml')
  t.match(await command(['routes', 'overlay', api, '--config', bad]), {
    code: 1,
    out: '',
    err: /proxy\.yaml:1:1: stor: found the unknown property/,
  })
  t.match(await command(['routes', 'overlay', join(api, 'none'), '--config', good]), {
    code: 1,
    out: '',
    err: /found no such file/,
  })
  for (const [words, says] of [
    [[], /routes: found nothing; allowed: from, overlay/],
    [['to', api], /routes: found "to"; allowed: from, overlay/],
    [['from'], /`routes from` takes one file, found 0/],
    [['from', api, api], /`routes from` takes one file, found 2/],
    [['overlay', api], /`routes overlay` needs --config FILE/],
    [['from', api, '--config', good], /`routes from` takes no --config/],
    [['from', api, '--upstream', 'ftp://x'], /--upstream: found "ftp:\/\/x"; allowed: http:\/\/host:port/],
  ] as [string[], RegExp][])
    t.match(await command(['routes', ...words]), { code: 2, out: '', err: says }, words.join(' '))
})
