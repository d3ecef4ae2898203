import { once } from 'node:events'
import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { text } from 'node:stream/consumers'
import type { Test } from 'tap'
import { until } from './e2e.ts'

/** Numbered as in OTLP. */
export const KIND = { server: 2, client: 3 } as const

export interface SpanSeen {
  readonly traceId: string
  readonly spanId: string
  readonly parentSpanId: string
  readonly name: string
  readonly kind: number
  readonly attributes: Readonly<Record<string, unknown>>
  readonly links: readonly { readonly traceId: string; readonly spanId: string }[]
  /** 2: error. */
  readonly status: number
}

/** A stand-in for an OpenTelemetry collector: accepts OTLP/JSON over HTTP and keeps it. */
export interface Collector {
  readonly url: string
  readonly spans: SpanSeen[]
  /** Everything received. */
  readonly said: string[]
  /** The spans of a trace, once there are that many. */
  trace(traceId: string, count: number): Promise<SpanSeen[]>
}

interface Otlp {
  readonly resourceSpans: {
    readonly scopeSpans: {
      readonly spans: (Omit<SpanSeen, 'attributes' | 'links' | 'status'> & {
        readonly attributes?: Attribute[]
        readonly links?: SpanSeen['links']
        readonly status?: { readonly code?: number }
      })[]
    }[]
  }[]
}
interface Attribute {
  readonly key: string
  readonly value: Readonly<Record<string, unknown>>
}

export async function collector(t: Test): Promise<Collector> {
  const spans: SpanSeen[] = []
  const said: string[] = []
  const server = createServer((request, response) => {
    void text(request).then((body) => {
      said.push(body)
      const { resourceSpans } = JSON.parse(body) as Otlp
      for (const { scopeSpans } of resourceSpans)
        for (const scope of scopeSpans)
          for (const span of scope.spans)
            spans.push({
              ...span,
              parentSpanId: span.parentSpanId ?? '',
              attributes: Object.fromEntries(
                (span.attributes ?? []).map(({ key, value }) => [key, Object.values(value)[0]]),
              ),
              links: span.links ?? [],
              status: span.status?.code ?? 0,
            })
      response.writeHead(200, { 'Content-Type': 'application/json' }).end('{}')
    })
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => server.close().closeAllConnections())
  const of = (traceId: string): SpanSeen[] => spans.filter((span) => span.traceId === traceId)
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    spans,
    said,
    async trace(traceId, count) {
      await until(() => of(traceId).length >= count)
      return of(traceId)
    },
  }
}
