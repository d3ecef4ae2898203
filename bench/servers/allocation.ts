/** Loaded into a candidate with `--import …/allocation.ts?PORT`: reports there the bytes allocated since the last request. */
import { createServer } from 'node:http'
import { GCProfiler, getHeapStatistics } from 'node:v8'

let profiler = new GCProfiler()
profiler.start()
let used = getHeapStatistics().used_heap_size

/** Growth of the heap between collections, which alone make it smaller. */
function allocated(): number {
  let bytes = 0
  for (const { beforeGC, afterGC } of profiler.stop()?.statistics ?? []) {
    bytes += beforeGC.heapStatistics.usedHeapSize - used
    used = afterGC.heapStatistics.usedHeapSize
  }
  const now = getHeapStatistics().used_heap_size
  bytes += now - used
  used = now
  profiler = new GCProfiler()
  profiler.start()
  return bytes
}

createServer((_, response) => response.end(String(allocated())))
  .listen(Number(new URL(import.meta.url).search.slice(1)), '127.0.0.1')
  .unref()
