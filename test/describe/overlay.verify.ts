/** What other tools make of the overlays: they apply them alike, and the result is valid OpenAPI. */
import { readFileSync } from 'node:fs'
import { Validator } from '@seriousme/openapi-schema-validator'
import openapiFormat from 'openapi-format'
import t from 'tap'
import { parse } from 'yaml'
import { type Any, AWKWARD, AWKWARD_ROUTES, applied, EXAMPLE, ROUTES } from './support.ts'

const example = readFileSync(EXAMPLE, 'utf8')

for (const [what, api, routes] of [
  ['the example', example, ROUTES],
  ['the example as OpenAPI 3.0', example.replace('3.1.0', '3.0.3'), ROUTES],
  ['an awkward description', AWKWARD, AWKWARD_ROUTES],
] as const)
  t.test(`the overlay of ${what} is applied by a third-party tool, and the result is valid`, async (t) => {
    const made = await applied(t, api, routes)
    const { data, resultData } = await openapiFormat.openapiOverlay(parse(api), {
      overlaySet: made.overlay,
    } as Any)
    t.equal((resultData as Any).totalUnusedActions, 0, 'every action finds its target')
    t.same(data, made.api)
    const checked = await new Validator().validate(structuredClone(data) as Any)
    t.ok(checked.valid, `valid OpenAPI: ${JSON.stringify(checked.errors)}`)
  })
