/**
 * Kills each part of the workflow at each point of each way that a booking can take, lets the client repeat, and prints what came of it: a
 * row for each action, a column for each part and point. See README.md.
 */
import { randomUUID } from 'node:crypto'
import { freePort, until } from '../parts.ts'
import { LANGUAGES, type Language, type Row, STEPS, type Step, World } from './world.ts'

/** Who is killed, and where: before its service has done the action, afterwards, or when the orchestrator has the answer. */
export const POINTS = [
  ['orchestrator', 'received'],
  ['orchestrator', 'done'],
  ['orchestrator', 'answered'],
  ['service', 'received'],
  ['service', 'done'],
  ['its proxy', 'received'],
  ['its proxy', 'done'],
  ['front proxy', 'received'],
  ['front proxy', 'done'],
] as const
type Point = (typeof POINTS)[number]

export interface Killed {
  readonly language: Language
  /** The step that says no; none: the booking succeeds. */
  readonly refuse: Step | 'none'
  readonly action: string
  readonly point: Point
  /** `booked` or `cancelled`, or what went wrong. */
  readonly ended: string
}

/** Soon, so that nobody waits. */
const WAITS = { LEASE: '1s', RECONCILE_AFTER: '1ms', RECONCILE_EVERY: '50ms' }

/** The actions of a booking in which this step says no: the steps up to it, and compensations of those before it, in reverse. */
export function actionsOf(refuse: Step | 'none'): string[] {
  if (refuse === 'none') return [...STEPS]
  const before = STEPS.slice(0, STEPS.indexOf(refuse))
  return [...before, refuse, ...before.toReversed().map((step) => `undo-${step}`)]
}

/** What is tried: orchestrator and services everywhere, proxies, which know no language, in the longest way alone. */
export function* plan(languages: readonly Language[]): Generator<Omit<Killed, 'ended'>> {
  for (const language of languages)
    for (const refuse of ['none', ...STEPS] as const)
      for (const action of actionsOf(refuse))
        for (const point of POINTS) {
          const isProxy = point[0].endsWith('proxy')
          if (!isProxy || (language === 'typescript' && refuse === 'notify'))
            yield { language, refuse, action, point }
        }
}

/** The first request meets a death; the client repeats it until it is told how the booking ended. */
export async function killAt(
  world: World,
  { refuse, action, point }: Omit<Killed, 'ended'>,
): Promise<string> {
  const booking = randomUUID()
  const earlier = new Set((await world.work()).map(idOf))
  const service = action.replace('undo-', '')
  const [who, where] = point
  const demo = where === 'answered' ? `SIGKILL orchestrator after ${action}` : `SIGSTOP ${action} ${where}`
  const first = book(world, booking, refuse, demo).catch(() => null)
  if (where === 'answered') await until(() => !world.part('orchestrator').isRunning)
  else {
    const stopped = world.part(service)
    await until(() => stopped.isStopped)
    const done = stopped.count(`done ${action}`)
    await world.part(partOf(who, service)).kill()
    // Whoever is not killed goes on, and may finish what nobody waits for any more.
    stopped.resume()
    if (stopped.isRunning && where === 'received') await until(() => stopped.count(`done ${action}`) > done)
  }
  await first
  await world.part(where === 'answered' ? 'orchestrator' : partOf(who, service)).start()
  let last: Answer = { status: 0, body: '', replayed: false }
  await until(async () => {
    last = await book(world, booking, refuse, '').catch(() => last)
    return last.status === 201 || last.status === 424
  })
  const again = await book(world, booking, refuse, '')
  if (again.body !== last.body || !again.replayed) return `${last.body}, then ${again.body}`
  return verdict(
    (await world.work()).filter((row) => !earlier.has(idOf(row))),
    booking,
    refuse,
    last,
  )
}

function partOf(who: Point[0], service: string): string {
  return {
    orchestrator: 'orchestrator',
    service,
    'its proxy': `proxy of ${service}`,
    'front proxy': 'proxy of orchestrator',
  }[who]
}

function idOf({ id, action }: Row): string {
  return `${action.replace('undo-', '')} ${id}`
}

interface Answer {
  readonly status: number
  readonly body: string
  readonly replayed: boolean
}

export async function book(world: World, booking: string, refuse: string, demo: string): Promise<Answer> {
  const response = await fetch(`${world.url}/bookings`, {
    method: 'POST',
    headers: { 'Idempotency-Key': booking, 'Content-Type': 'application/json', 'X-Demo': demo },
    body: JSON.stringify({ booking, refuse }),
  })
  const replayed = response.headers.get('idempotent-replayed') === 'true'
  return { status: response.status, body: await response.text(), replayed }
}

/** All actions of the way, each once, and nothing else. */
export function verdict(
  work: readonly Row[],
  booking: string,
  refuse: Step | 'none',
  { body }: Pick<Answer, 'body'>,
): string {
  const { state } = JSON.parse(body) as { state: string }
  const counts = new Map<string, number>()
  for (const { action } of work) counts.set(action, (counts.get(action) ?? 0) + 1)
  const expected = actionsOf(refuse)
  const wrong = [...new Set([...expected, ...counts.keys()])]
    .map((action) => [action, counts.get(action) ?? 0] as const)
    .filter(([action, count]) => count !== (expected.includes(action) ? 1 : 0))
    .map(([action, count]) => `${action} ${count}×`)
  if (state !== (refuse === 'none' ? 'booked' : 'cancelled')) wrong.push(`${state}, though ${refuse} refused`)
  // A compensation takes back what this booking did.
  for (const { action, about } of work) {
    const step = action.replace('undo-', '')
    const of = step === action ? booking : String(work.find((row) => row.action === step)?.id)
    if (about !== of) wrong.push(`${action} of ${about}`)
  }
  return wrong.length === 0 ? state : wrong.join(', ')
}

/** In each language in a world of its own. */
export async function killEverywhere(languages: readonly Language[]): Promise<Killed[]> {
  const all = languages.map(async (language) => {
    await using world = await World.start(language, await freePort(), WAITS)
    const killed: Killed[] = []
    for (const one of plan([language])) killed.push({ ...one, ended: await killAt(world, one) })
    return killed
  })
  return (await Promise.all(all)).flat()
}

/** Markdown. Languages share a cell: the same came of each death in both, or the cell says what. */
export function table(killed: readonly Killed[]): string {
  const head = ['refused', 'killed at', ...POINTS.map(([who, where]) => `${who}, ${where}`)]
  const lines = [head, head.map(() => '-')]
  for (const [refuse, ofWay] of Map.groupBy(killed, (one) => one.refuse))
    for (const [action, ofAction] of Map.groupBy(ofWay, (one) => one.action)) {
      const cells = POINTS.map((point) => {
        const ended = ofAction.filter((one) => one.point === point).map((one) => one.ended)
        return [...new Set(ended)].join('; ')
      })
      lines.push([refuse, action, ...cells])
    }
  return lines.map((cells) => `|${cells.join('|')}|\n`).join('')
}

if (import.meta.main) {
  try {
    const killed = await killEverywhere(Object.keys(LANGUAGES) as Language[])
    process.stdout.write(
      `${table(killed)}\n${killed.length} deaths in ${Object.keys(LANGUAGES).join(' and ')}\n`,
    )
    const wrong = killed.filter(({ ended }) => !['booked', 'cancelled'].includes(ended))
    process.exitCode = wrong.length === 0 ? 0 : 1
  } catch (error) {
    process.stderr.write(`${(error as Error).message}\n`)
    process.exitCode = 1
  }
}
