/** Modules of undici that load almost nothing else: its index adds 13 MB and tens of milliseconds (docs/adr/0074). */
declare module 'undici/lib/dispatcher/dispatcher.js' {
  export { Dispatcher as default } from 'undici'
}
declare module 'undici/lib/core/errors.js' {
  export { errors as default } from 'undici'
}
/** Gives handlers of undici 6, as `request()` still makes them, the callbacks of undici 7. */
declare module 'undici/lib/handler/wrap-handler.js' {
  type Handler = import('undici').Dispatcher.DispatchHandler
  const WrapHandler: { wrap(handler: Handler): Handler }
  export default WrapHandler
}
