import t from 'tap'

/** Where the end-to-end tests of the first tier run on SQLite, here they run on the other stores. */
const FILES: Readonly<Record<string, string>> = {
  admin: 'memory,redis',
  callers: 'memory,redis',
  faults: 'memory,redis',
  keys: 'memory,redis',
  operators: 'redis,postgres',
  reconcile: 'memory,redis,postgres',
  reload: 'redis',
  services: 'redis',
  shadow: 'memory,redis',
  telling: 'redis',
  waiting: 'memory,redis,postgres',
}

t.setTimeout(1_800_000)

for (const [file, stores] of Object.entries(FILES))
  void t.spawn(
    process.execPath,
    [`test/e2e/${file}.test.ts`],
    { env: { ...process.env, STORES: stores } },
    `${file} on ${stores}`,
  )
