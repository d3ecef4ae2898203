import { type Static, Type } from 'typebox'
import { shadowRow } from './shadow-schema.ts'

const closed = { additionalProperties: false }
const count = (description: string) => Type.Integer({ minimum: 0, description })
const time = (description: string) => Type.String({ format: 'date-time', description })
const route = Type.String({ description: 'Name of the route.' })

const figures = {
  records: count('Keys that were used for the first time.'),
  executed: count('Of these: done.'),
  expired: count('Of the executed: their answers are no longer kept.'),
  notExecuted: count('Of these: not done; a retry executes.'),
  running: count('Of these: still running.'),
  unknown: count('Of these: nobody knows.'),
  attempts: count(
    'How often they were sent upstream; of duplicates in shadow mode, those that the histories have.',
  ),
  replayed: count('Retries that got the stored answer.'),
  prevented: count('Retries that were not executed, these included.'),
  misuse: count('Requests refused since the key had come with another content.'),
  lapsed: count('Leases that lapsed.'),
  recovered: count('Outcomes written again since the record had gone.'),
  stale: count('Late outcomes that were refused.'),
  reconciled: count('Unknown outcomes that the upstream settled when it was asked.'),
  resolved: count('Unknown outcomes that were decided from outside.'),
}

const unknown = {
  under1h: count('Created less than an hour ago.'),
  under1d: count('Created less than a day ago.'),
  under7d: count('Created less than seven days ago.'),
  older: count('Created before.'),
  deadLettered: count('Of all of these: a person has to decide.'),
}

const counted = {
  executed: count('Requests that were executed.'),
  replayed: figures.replayed,
  prevented: figures.prevented,
  misuse: figures.misuse,
  unknown: count('Outcomes that were recorded as unknown.'),
  lapsed: figures.lapsed,
  recovered: figures.recovered,
  stale: figures.stale,
  deadLettered: count('Unknown records that a person has to decide about.'),
  expiring: count('Unknown records that are about to be dropped unresolved.'),
}

const asked = {
  eligible: count('Completed records of the period that can be asked about.'),
  sampled: count('Of these, chosen at random: looked at anew.'),
  agreed: count('Of the sampled: the upstream says what is stored.'),
  differing: count('Of the sampled: done, but with another value than the one that is stored.'),
  disagreed: count('Of the sampled: not done, done with the other outcome, or another operation’s.'),
  undecided: count('Of the sampled: the answer decides nothing.'),
  notAsked: count('Of the sampled: could not be asked.'),
}

/** What happened, by route. Four tables with four scopes, which must not be mixed. */
export const report = Type.Object(
  {
    since: time('Begin of the period.'),
    now: time('The store’s time.'),
    looked: count('Records looked at.'),
    complete: Type.Boolean({
      description:
        'False: there are more records than one report looks at; the period’s figures are too low.',
    }),
    unreadable: count('Records that this version cannot read.'),
    period: Type.Array(Type.Object({ route, ...figures }, closed), {
      description:
        'Of records that were created in the period and are still there, by what they and their histories say.',
    }),
    unknown: Type.Array(Type.Object({ route, ...unknown }, closed), {
      description: 'Of records whose outcome is unknown now, whenever they were created, by age.',
    }),
    counted: Type.Union(
      [
        Type.Object(
          {
            since: time('When the process started.'),
            routes: Type.Array(Type.Object({ route, ...counted }, closed)),
            shadow: Type.Array(shadowRow, {
              description: 'What enforce would have done, where routes are in shadow mode.',
            }),
          },
          closed,
        ),
        Type.Null(),
      ],
      { description: 'What this process alone has counted since it started; null: no proxy was asked.' },
    ),
    asked: Type.Union(
      [
        Type.Object(
          {
            routes: Type.Array(Type.Object({ route, ...asked }, closed)),
            found: Type.Array(
              Type.Object(
                {
                  id: Type.String({ description: 'Record id.' }),
                  route,
                  verdict: Type.Unsafe<'disagrees' | 'differs'>({
                    type: 'string',
                    enum: ['disagrees', 'differs'],
                  }),
                  why: Type.String({ description: 'Statuses and pointers; nothing of a body.' }),
                },
                closed,
              ),
              { description: 'The sampled records that do not agree, the worst first.' },
            ),
          },
          closed,
        ),
        Type.Null(),
      ],
      {
        description:
          'What the upstream said when it was asked anew about a sample of completed records; null: `sample` was not given.',
      },
    ),
  },
  closed,
)

export type Report = Static<typeof report>
export type PeriodRow = Report['period'][number]
export type UnknownRow = Report['unknown'][number]
export type AskedRow = NonNullable<Report['asked']>['routes'][number]
export type CountedRow = NonNullable<Report['counted']>['routes'][number]

/** The figures by their names, in the order of the tables. */
export const PERIOD = Object.keys(figures) as (keyof typeof figures)[]
export const UNKNOWN = Object.keys(unknown) as (keyof typeof unknown)[]
export const ASKED = Object.keys(asked) as (keyof typeof asked)[]
export const COUNTED = Object.keys(counted) as (keyof typeof counted)[]
