import { isFramed, MessageCount } from '../core/rpc/messages.ts'
import type { UpstreamRequest } from '../upstream/port.ts'
import type { ProtectedRequest } from './request.ts'

/** How to receive the answer. A call's answer is buffered, whatever its media type, until it turns out to be a stream. */
export function responding({
  route,
  protocol,
}: ProtectedRequest): Pick<UpstreamRequest, 'responseLimit' | 'stream' | 'streams' | 'keepsStream'> {
  const isCall = protocol !== null && route.stream === 'auto'
  return {
    responseLimit: route.limits.response,
    stream: isCall ? 'never' : route.stream,
    ...(isCall && isFramed(protocol) ? { streams: new MessageCount().saw } : {}),
    keepsStream: route.keep === 'stream',
  }
}
