/** Loaded into a proxy with `--import …/stops.ts?PORT`: says there how long its event loop stood still since it was last asked. */
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
