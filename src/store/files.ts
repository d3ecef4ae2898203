/**
 * A file of `src/store`, in the bundle as well: modules here and its chunks are one folder below the root.
 * @param path below `store`.
 */
export function fileOf(path: string): URL {
  return new URL(`../store/${path}`, import.meta.url)
}
