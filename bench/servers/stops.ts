/** Loaded into a proxy with `--import …/stops.ts?PORT`: reports there the longest stop of its event loop since the last request. */
import { createServer } from 'node:http'
import { monitorEventLoopDelay } from 'node:perf_hooks'

const delays = monitorEventLoopDelay({ resolution: 1 })
delays.enable()
createServer((_, response) => {
  const { max } = delays
  delays.reset()
  response.end(String(max / 1e6))
})
  .listen(Number(new URL(import.meta.url).search.slice(1)), '127.0.0.1')
  .unref()
