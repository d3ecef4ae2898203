/** Loaded before a child (`node --import ./scripts/with-parent.ts …`): it ends with its parent, however that ended. */
process.once('disconnect', () => process.kill(process.pid, 'SIGTERM'))
// The channel tells of the parent's end and keeps nothing alive.
process.channel?.unref()
