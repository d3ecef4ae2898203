import { type Static, Type } from 'typebox'
import { SHADOW_VERDICTS } from '../protect/outcomes.ts'

const count = (description: string) => Type.Integer({ minimum: 0, description })

const figures = {
  requests: count('Requests that shadow mode looked at.'),
  executed: count('Of these: enforce would have sent them upstream, too.'),
  prevented: count('Duplicates that were executed and would not have been.'),
  differed: count('Of these: the second answer was another one.'),
  refused: count('Requests that would have been refused: their clients have to be mended first.'),
  unjudged: count('Requests that could not be looked at, or not to their end.'),
  newKeys: count('Operations that came again under a new key within a minute: clients that no key protects.'),
  retriedIn1m: count('Retries that found a completed record less than a minute old.'),
  retriedIn1h: count('The same, less than an hour old.'),
  retriedIn1d: count('The same, less than a day old.'),
  retriedLater: count('The same, older.'),
}

/** What `enforce` would have done, by route. */
export const shadowRow = Type.Object(
  {
    route: Type.String({ description: 'Name of the route.' }),
    ...figures,
    verdicts: Type.Object(
      Object.fromEntries(
        Object.entries(SHADOW_VERDICTS).map(([verdict, { says }]) => [verdict, count(says)]),
      ),
      { additionalProperties: false, description: 'Of all requests.' },
    ),
  },
  { additionalProperties: false },
)

export type ShadowRow = Static<typeof shadowRow>

/** The figures by their names, in the order of the table. */
export const SHADOW_FIGURES = Object.keys(figures) as (keyof typeof figures)[]
