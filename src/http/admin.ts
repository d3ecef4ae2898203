import type { RequestListener, Server } from 'node:http'
import type { AdminAccess } from '../admin/api.ts'
import type { AppOptions } from '../admin/app.ts'
import type { Millis } from '../core/record.ts'
import { Once } from '../runtime/scheduling.ts'
import { type Secure, TrafficServer } from './connections.ts'
import type { Health } from './health.ts'
import type { StreamRequest, StreamResponse } from './request.ts'

type OnBug = AppOptions['onBug']

export function opsServer(health: Health, onBug: OnBug, secure: Secure | null = null): Server {
  return onDemand(onBug, secure, async (options) => (await import('./admin-app.ts')).opsApp(health, options))
}

export function adminServer(
  health: Health,
  access: AdminAccess | null,
  onBug: OnBug,
  secure: Secure | null = null,
): Server {
  return onDemand(onBug, secure, async (options) =>
    (await import('./admin-app.ts')).apiApp(health, access, options),
  )
}

/** Time for a request to arrive completely. */
const UPLOAD: Millis = 30_000

/** A listener whose application is loaded and created on the first request (docs/adr/0074). */
function onDemand(
  onBug: OnBug,
  secure: Secure | null,
  make: (options: Pick<AppOptions, 'onBug' | 'server'>) => Promise<void>,
): Server {
  let handle: RequestListener
  const application = new Once(() =>
    make({
      onBug,
      server: (listener) => {
        handle = listener
        return server
      },
    }),
  )
  const server: Server = new TrafficServer(
    { secure, requestTimeout: UPLOAD, connectionsCheckingInterval: UPLOAD / 10 },
    (request, response) => {
      void application
        .get()
        .then(() => handle(request as StreamRequest, response as StreamResponse))
        .catch((error: unknown) => {
          onBug(error)
          request.socket.destroy()
        })
    },
    onBug,
  )
  return server
}
