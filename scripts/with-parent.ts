/** Preloaded into a child (`node --import ./scripts/with-parent.ts …`) so that it ends with its parent, however the parent ended. */
process.once('disconnect', () => process.kill(process.pid, 'SIGTERM'))
// The channel reports the parent's end and does not keep the child alive.
process.channel?.unref()
