import t from 'tap'
import { movesAreInTheDiff, requestsFindTheirRecords } from './reload-properties.ts'

t.setTimeout(120_000)

void t.test('O08 after a reload that is not refused, each request finds its record again', async (t) =>
  requestsFindTheirRecords(t, 1500),
)

void t.test('every request that moves to another route is covered by the diff', async (t) =>
  movesAreInTheDiff(t, 2000),
)
