import type { Bounds, Rules } from './protocol.ts'

/** What is explored, with so many requests for one key. */
export const VARIANTS = (attempts: number): Readonly<Record<string, Rules>> => {
  const bounds: Bounds = { attempts, losses: 0, failovers: 0, decisions: 0, retentions: 0 }
  const plain: Rules = { bounds, retryLapsed: false, isPartOfFleetGraceless: false, mistake: null }
  return {
    plain,
    'onLeaseExpired: retry': { ...plain, retryLapsed: true },
    'a store that forgets once': { ...plain, bounds: { ...bounds, losses: 1 } },
    'an operator who allows another execution': { ...plain, bounds: { ...bounds, decisions: 1 } },
    'the end of a retention': { ...plain, bounds: { ...bounds, retentions: 1 } },
    'a failover with grace': { ...plain, bounds: { ...bounds, failovers: 1 } },
    'a failover with grace on some replicas only': {
      ...plain,
      isPartOfFleetGraceless: true,
      bounds: { ...bounds, failovers: 1 },
    },
  }
}
