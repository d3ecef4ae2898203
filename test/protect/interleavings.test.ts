import t from 'tap'
import { exploreSweepers } from '../reconcile/playing.ts'
import { explore, runsOr } from './playing.ts'

// Many more: interleavings.verify.ts.
explore(t, runsOr(15), runsOr(5))
exploreSweepers(t, runsOr(15))
