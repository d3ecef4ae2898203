import t from 'tap'
import { explore, runsOr } from './playing.ts'

// Many more: interleavings.verify.ts.
explore(t, runsOr(15), runsOr(5))
