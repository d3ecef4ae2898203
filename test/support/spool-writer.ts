/** A process to kill: appends forever, and prints what it has kept and what it has dropped. */
import { Spool } from '../../src/store/spool/log.ts'

const directory = process.argv[2] as string
const { spool } = await Spool.open({ directory, maxBytes: 64 * 1024 ** 2, say: () => {} })

for (let n = 0; ; n++) {
  const entries = Array.from({ length: 3 }, (_, i) => {
    const name = `${n}.${i}`
    const entry = spool.append(Buffer.from(`${name} ${'x'.repeat((n * 977 + i * 13_331) % 40_000)}`))
    return { name, entry }
  })
  for (const { name, entry } of entries) {
    if ((await entry.done) === 'kept') process.stdout.write(`kept ${name}\n`)
  }
  // Drops two of three.
  for (const { name, entry } of entries.slice(1)) {
    process.stdout.write(`drop ${name}\n`)
    spool.drop(entry)
  }
}
