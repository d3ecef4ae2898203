import { spawn } from 'node:child_process'
import { createHash } from 'node:crypto'
import { once } from 'node:events'
import {
  appendFileSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { Audit, type AuditEvent, type AuditLine, verifyAudit } from '../../src/observe/audit.ts'
import { lockFile } from '../../src/runtime/file-lock.ts'

function fileIn(t: Test): string {
  const dir = mkdtempSync(join(tmpdir(), 'audit-'))
  t.teardown(() => rmSync(dir, { recursive: true }))
  return join(dir, 'audit.log')
}

function change(n: number): AuditEvent {
  const who = { address: '127.0.0.1', by: n % 2 ? 'ann' : null }
  const before = { state: 'unknown', version: n }
  return {
    who,
    what: 'resolve',
    record: `r${n}`,
    before,
    after: { state: 'completed' },
    reason: `line ${n}\n ü`,
  }
}

async function written(file: string, count: number, service = 'test'): Promise<void> {
  const audit = await Audit.open(file, service, () => {})
  await Promise.all(Array.from({ length: count }, (_, n) => audit.write(change(n))))
  await audit.close()
}

void t.test('each line carries the hash of the one before, across restarts', async (t) => {
  const file = fileIn(t)
  await written(file, 3)
  await written(file, 2)
  const lines = readFileSync(file, 'utf8')
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line) as AuditLine)
  t.equal(lines.length, 5)
  t.equal(lines[0]?.prev, '0'.repeat(64))
  for (const [n, line] of lines.entries()) {
    t.match(line.hash, /^[0-9a-f]{64}$/)
    if (n > 0) t.equal(line.prev, lines[n - 1]?.hash)
  }
  t.match(lines[1], { ...change(1), time: /^\d{4}-.*Z$/ })
  t.same(await verifyAudit(file), { ok: true, lines: 5, head: lines[4]?.hash })
  t.equal(statSync(file).mode & 0o777, 0o600)
})

void t.test('verification detects a line removed, edited, moved, added or cut off', async (t) => {
  const file = fileIn(t)
  await written(file, 6)
  const text = readFileSync(file, 'utf8')
  const lines = text.trimEnd().split('\n')
  const expect = async (changed: readonly string[], line: number, title: string): Promise<void> => {
    writeFileSync(file, `${changed.join('\n')}\n`)
    t.match(await verifyAudit(file), { ok: false, line }, title)
  }
  for (let n = 0; n < 5; n++) await expect(lines.toSpliced(n, 1), n + 1, `line ${n + 1} removed`)
  for (let n = 0; n < 6; n++) {
    const line = lines[n] as string
    for (const edited of [
      line.replace('completed', 'retryable'),
      line.replace('"127.0.0.1"', '"10.0.0.1"'),
      line.replace(/"time":"\d/, '"time":"1'),
      `${line} `,
      line.replace('{', '{ '),
      '{}',
      'x',
    ])
      await expect(lines.with(n, edited), n + 1, `line ${n + 1} edited`)
  }
  await expect(
    [...lines.slice(0, 2), lines[3] as string, lines[2] as string, ...lines.slice(4)],
    3,
    'two lines moved',
  )
  await expect([...lines.slice(0, 3), lines[2] as string, ...lines.slice(3)], 4, 'a line twice')
  await expect([...lines, lines[5] as string], 7, 'the last line twice')
  // Every byte counts.
  const bytes = Buffer.from(text)
  for (let at = 0; at < bytes.length; at += 31) {
    const flipped = Buffer.from(bytes)
    flipped[at] = (flipped[at] as number) ^ 1
    writeFileSync(file, flipped)
    t.equal((await verifyAudit(file)).ok, false, `byte ${at}`)
  }
  writeFileSync(file, text.slice(0, -10))
  t.match(await verifyAudit(file), { ok: false, line: 6, problem: 'the line is incomplete' })
})

void t.test('a file whose last line was edited opens, but takes no more lines', async (t) => {
  const file = fileIn(t)
  await written(file, 3)
  const text = readFileSync(file, 'utf8')
  for (const edited of [
    text.replace('line 2', 'line 9'),
    `${text}x\n`,
    `${text}\n`,
    `${'x'.repeat(70_000)}\n`,
  ]) {
    writeFileSync(file, edited)
    const audit = await Audit.open(file, 'test', () => {})
    await t.rejects(audit.write(change(4)), { message: /move the file away/ })
    await audit.close()
    t.equal(readFileSync(file, 'utf8'), edited)
  }
})

void t.test('a long file is continued', async (t) => {
  const file = fileIn(t)
  await written(file, 500)
  await written(file, 1)
  t.match(await verifyAudit(file), { ok: true, lines: 501 })
})

void t.test('lines missing at the end change the head hash', async (t) => {
  const file = fileIn(t)
  const heads: string[] = []
  const audit = await Audit.open(file, 'test', ({ hash }) => void heads.push(hash))
  for (let n = 0; n < 3; n++) await audit.write(change(n))
  await audit.close()
  const text = readFileSync(file, 'utf8')
  writeFileSync(file, `${text.trimEnd().split('\n').slice(0, 2).join('\n')}\n`)
  const verified = await verifyAudit(file)
  t.match(verified, { ok: true, lines: 2, head: heads[1] })
  t.not(heads.at(-1), heads[1])
})

void t.test('a line that a crash cut off is removed', async (t) => {
  const file = fileIn(t)
  await written(file, 2)
  const whole = readFileSync(file, 'utf8')
  for (const torn of ['{"time":"20', '{', whole.slice(0, 50)]) {
    writeFileSync(file, `${whole}${torn}`)
    const audit = await Audit.open(file, 'test', () => {})
    t.equal(readFileSync(file, 'utf8'), whole)
    await audit.close()
  }
  writeFileSync(file, whole.slice(0, 20))
  await written(file, 1)
  t.match(await verifyAudit(file), { ok: true, lines: 1 })
})

void t.test('a file that is not an audit log stays unchanged, and takes no line', async (t) => {
  for (const text of ['upstream: { url: "http://h" }', 'a: 1\nb: 2', 'x'.repeat(70_000)]) {
    const file = fileIn(t)
    writeFileSync(file, text)
    const audit = await Audit.open(file, 'test', () => {})
    t.teardown(() => audit.close())
    await t.rejects(audit.write(change(0)), { message: /move the file away/ })
    t.equal(readFileSync(file, 'utf8'), text)
  }
})

void t.test('each line names its service, and older lines without one stay in the chain', async (t) => {
  const file = fileIn(t)
  const content = { time: '2026-01-01T00:00:00.000Z', ...change(0), prev: '0'.repeat(64) }
  const hash = createHash('sha256').update(JSON.stringify(content)).digest('hex')
  writeFileSync(file, `${JSON.stringify({ ...content, hash })}\n`)
  await written(file, 1, 'payments')
  await written(file, 1, 'orders')
  const lines = readFileSync(file, 'utf8').trim().split('\n')
  t.strictSame(
    lines.map((line) => (JSON.parse(line) as Partial<AuditLine>).service),
    [undefined, 'payments', 'orders'],
  )
  t.match(await verifyAudit(file), { ok: true, lines: 3 })
  writeFileSync(file, `${lines.join('\n').replace('"orders"', '"payments"')}\n`)
  t.match(await verifyAudit(file), { ok: false, line: 3, problem: /edited/ })
})

void t.test('writing fails once the file was removed', async (t) => {
  const file = fileIn(t)
  const told: AuditLine[] = []
  const audit = await Audit.open(file, 'test', (line) => void told.push(line))
  t.teardown(() => audit.close())
  await audit.write(change(0))
  rmSync(file)
  await t.rejects(audit.write(change(1)), { message: /the audit file was removed/ })
  t.equal(told.length, 1)
})

void t.test('writing fails while the file holds what somebody else wrote', async (t) => {
  const file = fileIn(t)
  const told: AuditLine[] = []
  const audit = await Audit.open(file, 'test', (line) => void told.push(line))
  t.teardown(() => audit.close())
  const first = await audit.write(change(0))
  appendFileSync(file, 'x\n')
  await t.rejects(audit.write(change(1)), { message: /another program wrote to it/ })
  truncateSync(file)
  await t.rejects(audit.write(change(1)), { message: /another program wrote to it/ })
  t.same(told, [first])
  // Once the file is back as it was, the chain continues.
  writeFileSync(file, `${JSON.stringify(first)}\n`)
  t.equal((await audit.write(change(2))).prev, first.hash)
  t.match(await verifyAudit(file), { ok: true, lines: 2 })
})

void t.test('the chain continues from lines that the command line has added meanwhile', async (t) => {
  const file = fileIn(t)
  const audit = await Audit.open(file, 'test', () => {})
  t.teardown(() => audit.close())
  await audit.write(change(0))
  await written(file, 2)
  const { prev } = await audit.write(change(3))
  t.equal(prev, JSON.parse(readFileSync(file, 'utf8').split('\n')[2] ?? '').hash)
  await audit.write(change(4))
  t.match(await verifyAudit(file), { ok: true, lines: 5 })
})

void t.test('without a file the lines go to the sink, chained', async (t) => {
  const told: AuditLine[] = []
  const audit = await Audit.open(null, 'test', (line) => void told.push(line))
  await Promise.all([audit.write(change(0)), audit.write(change(1))])
  await audit.close()
  t.equal(told[1]?.prev, told[0]?.hash)
})

/** A process that writes `lines` lines and prints the hash of each one written; killed after `killAt` of them. */
async function writer(file: string, lines: number, killAt = Number.POSITIVE_INFINITY): Promise<string[]> {
  const module = new URL('../../src/observe/audit.ts', import.meta.url).href
  const program = `
    import { Audit } from ${JSON.stringify(module)}
    const audit = await Audit.open(${JSON.stringify(file)}, 'test', () => {})
    for (let n = 0; n < ${lines}; n++) {
      const { hash } = await audit.write({ who: { address: 'a', by: null }, what: 'drain', record: null, before: n, after: null, reason: null })
      process.stdout.write(hash + '\\n')
    }
    await audit.close()`
  const child = spawn(process.execPath, ['--input-type=module', '-e', program], {
    stdio: ['ignore', 'pipe', 'inherit'],
    env: { ...process.env, NODE_V8_COVERAGE: '' },
  })
  let said = ''
  for await (const chunk of child.stdout) {
    said += String(chunk)
    if (said.split('\n').length > killAt && !child.killed) child.kill('SIGKILL')
  }
  if (child.exitCode === null && child.signalCode === null) await once(child, 'exit')
  return said.split('\n').filter((line) => line.length === 64)
}

void t.test('several processes write one chain at once, and lose no line, even by kill -9', async (t) => {
  const file = fileIn(t)
  const said = await Promise.all([writer(file, 200), writer(file, 200), writer(file, 100_000, 100)])
  const kept = new Set(
    readFileSync(file, 'utf8')
      .trimEnd()
      .split('\n')
      .map((line) => (JSON.parse(line) as AuditLine).hash),
  )
  t.same([said[0]?.length, said[1]?.length], [200, 200], 'nobody was refused')
  t.ok((said[2]?.length ?? 0) >= 99, 'one was killed in the middle')
  t.same(
    said.flat().filter((hash) => !kept.has(hash)),
    [],
    'a line is in the file before write resolves',
  )
  t.match(await verifyAudit(file), { ok: true, lines: kept.size })
  t.ok(kept.size >= 499)
})

void t.test('close does not wait for a change that waits for the lock; it is not written', async (t) => {
  const file = fileIn(t)
  const audit = await Audit.open(file, 'test', () => {})
  const release = lockFile(`${file}.lock`)
  const refused = t.rejects(audit.write(change(0)), { message: /the process is ending/ })
  await audit.close()
  await refused
  release?.()
  t.equal(readFileSync(file, 'utf8'), '')
})

void t.test('a change fails if the lock is not released in time', async (t) => {
  const file = fileIn(t)
  const audit = await Audit.open(file, 'test', () => {})
  t.teardown(() => audit.close())
  const release = lockFile(`${file}.lock`)
  if (release === null) throw new Error('it is free')
  const { now } = performance
  let late = 0
  performance.now = () => now.call(performance) + (late += 3000)
  t.teardown(() => {
    performance.now = now
  })
  await t.rejects(audit.write(change(0)), { message: /lock of the audit file/ })
  release()
  await audit.write(change(1))
  t.match(await verifyAudit(file), { ok: true, lines: 1 })
})

void t.test('opening fails with the error of the file system', async (t) => {
  await t.rejects(
    Audit.open(join(tmpdir(), 'there-is-no-such-folder', 'a'), 'test', () => {}),
    { code: 'ENOENT' },
  )
  await t.rejects(
    Audit.open(tmpdir(), 'test', () => {}),
    { code: 'EISDIR' },
  )
})
