import t, { type Test } from 'tap'
import { IS_HTTP2 } from './front.ts'

/** A test of what HTTP/1.1 alone has: versions, reasons, letter case, framing in text, hop-by-hop lines, thousands of lines, pipelining. */
export function http1Test(title: string, run: (t: Test) => Promise<void>): void {
  void t.test(title, { skip: IS_HTTP2 && 'only HTTP/1.1 has it' }, run)
}
