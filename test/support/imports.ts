import { registerHooks } from 'node:module'

/** Makes the next import of a module fail, as when no file can be opened. */
export function failNextImport(specifier: string): void {
  const hooks = registerHooks({
    resolve(asked, context, next) {
      if (asked !== specifier) return next(asked, context)
      hooks.deregister()
      throw new Error('too many open files')
    },
  })
}
