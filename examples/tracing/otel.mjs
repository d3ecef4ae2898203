/*
 * OpenTelemetry for idempotency-proxy: node --import ./otel.mjs <the proxy>. Spans go to OTEL_EXPORTER_OTLP_ENDPOINT
 * (http://localhost:4318 where it is not set), as OTLP over HTTP.
 */
import { context, propagation, trace } from '@opentelemetry/api'
import { AsyncLocalStorageContextManager } from '@opentelemetry/context-async-hooks'
import { CompositePropagator, W3CBaggagePropagator, W3CTraceContextPropagator } from '@opentelemetry/core'
import { OTLPTraceExporter } from '@opentelemetry/exporter-trace-otlp-http'
import { resourceFromAttributes } from '@opentelemetry/resources'
import {
  AlwaysOnSampler,
  BatchSpanProcessor,
  ParentBasedSampler,
  TraceIdRatioBasedSampler,
  TracerProvider,
} from '@opentelemetry/sdk-trace'

const ratio = process.env.TRACE_RATIO
const delay = Number(process.env.OTEL_BSP_SCHEDULE_DELAY ?? 5000)
const root = ratio === undefined ? new AlwaysOnSampler() : new TraceIdRatioBasedSampler(Number(ratio))

context.setGlobalContextManager(new AsyncLocalStorageContextManager().enable())
propagation.setGlobalPropagator(
  new CompositePropagator({ propagators: [new W3CTraceContextPropagator(), new W3CBaggagePropagator()] }),
)
trace.setGlobalTracerProvider(
  new TracerProvider({
    resource: resourceFromAttributes({
      'service.name': process.env.OTEL_SERVICE_NAME ?? 'idempotency-proxy',
    }),
    sampler: new ParentBasedSampler({ root }),
    spanProcessors: [
      new BatchSpanProcessor({ exporter: new OTLPTraceExporter(), scheduledDelayMillis: delay }),
    ],
  }),
)
