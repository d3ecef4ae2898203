/**
 * Loaded before the code of a replica (`--import`, worker threads too): its wall clock is ahead by the milliseconds in the file that
 * CLOCK names, read ten times a second. Timers and `performance.now()` go on, as they do when a machine's clock is set.
 */
import { readFileSync } from 'node:fs'

const file = process.env['CLOCK'] as string
const RealDate = Date
let ahead = 0

function look(): void {
  ahead = Number(readFileSync(file, 'utf8'))
}

look()
setInterval(look, 100).unref()

const now = (): number => RealDate.now() + ahead
globalThis.Date = new Proxy(RealDate, {
  construct: (target, args: [], newTarget) =>
    Reflect.construct(target, args.length === 0 ? [now()] : args, newTarget) as Date,
  get: (target, name) => (name === 'now' ? now : (Reflect.get(target, name) as unknown)),
})
