/** Work on a peer's input that pauses at each `yield`, about every millisecond, so that other work gets its turn. */
export type Steps<T> = Generator<undefined, T, undefined>

/** Does all steps in one go. */
export function atOnce<T>(steps: Steps<T>): T {
  for (;;) {
    const step = steps.next()
    if (step.done === true) return step.value
  }
}
