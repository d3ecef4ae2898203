import t from 'tap'
import { equalDigestsFindTheSame, movesAreInTheDiff, requestsFindTheirRecords } from './reload-properties.ts'

void t.test('O08 after a reload that is not refused, each request finds its record again', async (t) =>
  requestsFindTheirRecords(t, 150),
)

void t.test(
  'Y20 configurations with the same digest find the same records, and a reload takes no others',
  async (t) => equalDigestsFindTheSame(t, 200),
)

void t.test('every request that moves to another route is covered by the diff', async (t) =>
  movesAreInTheDiff(t, 300),
)
