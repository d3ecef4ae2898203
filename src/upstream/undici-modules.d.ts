/** Modules of undici that load almost nothing else: its index adds 13 MB and tens of milliseconds (docs/adr/0074). */
declare module 'undici/lib/dispatcher/dispatcher.js' {
  import { Dispatcher } from 'undici'

  export default Dispatcher
}

declare module 'undici/lib/handler/wrap-handler.js' {
  import type { Dispatcher } from 'undici'

  /** Gives handlers of undici 6, as `request()` still makes them, the callbacks of undici 7. */
  const WrapHandler: { wrap(handler: Dispatcher.DispatchHandler): Dispatcher.DispatchHandler }
  export default WrapHandler
}

declare module 'undici/lib/core/errors.js' {
  import { errors } from 'undici'

  export default errors
}
