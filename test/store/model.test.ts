import t from 'tap'
import { followModel } from './model.ts'

// Longer sequences, and Redis: model.verify.ts.
followModel(t, 3, 15)
