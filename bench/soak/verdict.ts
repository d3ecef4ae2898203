import { median } from '../machine.ts'

/** Measurements at one quiet point, in bytes or counts. */
export interface Sample {
  /** Sent so far. */
  readonly requests: number
  /** Executions that the upstream has seen so far. */
  readonly executed: number
  readonly minutes: number
  readonly resident: number
  readonly descriptors: number
  readonly heapUsed: number
  readonly external: number
  readonly arrayBuffers: number
  readonly resources: Readonly<Record<string, number>>
  readonly objects: Readonly<Record<string, number>>
  /** The proxy's own gauges, all of which must be 0. */
  readonly gauges: Readonly<Record<string, number>>
  readonly store: {
    readonly records: number
    /** Unresolved records, according to the driver's count at the upstream. */
    readonly expected: number
    /** Members of the indexes of unresolved records. */
    readonly indexed: number
    /** Members whose record is gone. */
    readonly orphans: number
    readonly memory: number
    readonly channels: number
    readonly clients: number
  }
}

export interface Finding {
  readonly what: string
  readonly detail: string
}

/** Growth between the medians of the two halves. */
interface Between {
  readonly requests: number
  readonly records: number
  /** Operations that the proxy now remembers (`RegeneratedKeys`), up to its bound. */
  readonly remembered: number
}

interface Measure {
  readonly what: string
  readonly of: (sample: Sample) => number
  /** Allowed growth between the halves. */
  readonly allowed: (between: Between) => number
}

const MIB = 1024 * 1024
/** Bytes. Quiet points of one run differ by up to 10 MiB of resident memory; a leak of 100 bytes in every 15th request shows. */
const HELD_PER_REQUEST = 2
const HELD_NOISE = 900_000
const RESIDENT_PER_REQUEST = 32
const RESIDENT_NOISE = 16 * MIB
const STORED_PER_RECORD = 2048
const STORED_NOISE = MIB
/** A leak of one per segment exceeds this between the halves of eight samples or more. */
const COUNT_NOISE = 2

/** `MOST_OPERATIONS` of src/protect/recent.ts, and the size of an entry: a digest, an id, slots in two maps. */
const REMEMBERED_MOST = 10_000
const REMEMBERED_BYTES = 400

/** Objects of a kind that come and go with connections to the upstream and their timers. */
const OBJECT_NOISE = 16

const few = (): number => COUNT_NOISE
/** Records that expired since the last sweep, about a second ago. */
const UNSWEPT = 16

function measures(samples: readonly Sample[]): Measure[] {
  const kinds = new Set(samples.flatMap(({ resources }) => Object.keys(resources)))
  const objects = new Set(samples.flatMap((sample) => Object.keys(sample.objects)))
  return [
    {
      what: 'heap and external memory',
      of: ({ heapUsed, external }) => heapUsed + external,
      allowed: ({ requests, remembered }) =>
        Math.max(HELD_NOISE, requests * HELD_PER_REQUEST) + remembered * REMEMBERED_BYTES,
    },
    {
      what: 'resident memory',
      of: ({ resident }) => resident,
      allowed: ({ requests }) => Math.max(RESIDENT_NOISE, requests * RESIDENT_PER_REQUEST),
    },
    { what: 'file descriptors', of: ({ descriptors }) => descriptors, allowed: few },
    ...[...kinds].map((kind) => ({
      what: `active ${kind}`,
      of: ({ resources }: Sample) => resources[kind] ?? 0,
      allowed: few,
    })),
    ...[...objects].map((kind) => ({
      what: `objects ${kind}`,
      of: (sample: Sample) => sample.objects[kind] ?? 0,
      allowed: () => OBJECT_NOISE,
    })),
    {
      what: 'memory of Redis',
      of: ({ store }) => store.memory,
      allowed: ({ records }) => STORED_NOISE + records * STORED_PER_RECORD,
    },
    { what: 'channels of Redis', of: ({ store }) => store.channels, allowed: few },
    { what: 'connections of Redis', of: ({ store }) => store.clients, allowed: few },
    {
      what: 'index entries of Redis without a record',
      of: ({ store }) => store.orphans,
      allowed: () => UNSWEPT,
    },
  ]
}

export interface Judged {
  readonly what: string
  readonly earlier: number
  readonly later: number
  readonly allowed: number
}

/**
 * Compares the medians of the two equal halves after the warm-up. A slope would depend on single points; a median of half of
 * them does not.
 *
 * @throws if fewer than two samples are left.
 */
export function compare(samples: readonly Sample[], warmUp: number): Judged[] {
  const warm = samples.slice(warmUp)
  const half = warm.length >> 1
  if (half === 0) throw new Error('comparing takes at least two samples after the warm-up')
  const earlier = warm.slice(0, half)
  const later = warm.slice(-half)
  const grown = (of: (sample: Sample) => number): number => median(later.map(of)) - median(earlier.map(of))
  const between = {
    requests: grown((sample) => sample.requests),
    records: Math.max(
      0,
      grown(({ store }) => store.records),
    ),
    remembered: grown(({ executed }) => Math.min(executed, REMEMBERED_MOST)),
  }
  return measures(samples).map(({ what, of, allowed }) => ({
    what,
    earlier: median(earlier.map(of)),
    later: median(later.map(of)),
    allowed: allowed(between),
  }))
}

/** Figures that grew too much, or were not at rest at a quiet point. */
export function growth(samples: readonly Sample[], warmUp: number): Finding[] {
  const grew = compare(samples, warmUp)
    .filter(({ earlier, later, allowed }) => later - earlier > allowed)
    .map(({ what, earlier, later, allowed }) => ({
      what: `${what} grew`,
      detail: `from ${earlier.toFixed(0)} to ${later.toFixed(0)}, where ${allowed.toFixed(0)} more would be noise`,
    }))
  const busy = samples.flatMap(({ requests, gauges }) =>
    Object.entries(gauges)
      .filter(([, value]) => value !== 0)
      .map(([name, value]) => ({
        what: `${name} is not 0 at rest`,
        detail: `${value} after ${requests} requests`,
      })),
  )
  const kept = samples
    .filter(({ store }) => store.records !== store.indexed - store.orphans)
    .map(({ requests, store }) => ({
      what: 'records other than unresolved ones are kept beyond their retention',
      detail: `${store.records}, where ${store.indexed - store.orphans} are unresolved, after ${requests} requests`,
    }))
  return [...grew, ...busy, ...kept]
}
