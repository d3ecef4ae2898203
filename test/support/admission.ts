import { runInNewContext } from 'node:vm'
import type { Manifest } from './charts.ts'

type Patch = { readonly op: string; readonly path: string; readonly value: unknown }

/**
 * Applies a MutatingAdmissionPolicy of JSON patches to an object, without an API server: the few CEL constructs that the policy uses
 * (message literals, `has`, `in`, `exists`, `?:`) are translated to JavaScript and run; anything else is a syntax error.
 */
export function admitted(policy: Manifest, object: unknown): Manifest {
  const result = structuredClone(object) as Manifest
  for (const { expression } of policy['spec'].matchConditions)
    if (evaluate(expression, result) !== true) return result
  for (const { jsonPatch } of policy['spec'].mutations)
    for (const patch of evaluate(jsonPatch.expression, result) as Patch[]) apply(result, patch)
  return result
}

function evaluate(cel: string, object: unknown): unknown {
  const script = cel
    .replace(/\b(?:Object(?:\.\w+)*|JSONPatch)\s*\{/g, '({')
    // A message literal ends at its closing brace.
    .replace(/\bhas\(([\w.[\]]+)\)/g, '($1 !== undefined)')
    .replace(/\.exists\((\w+), /g, '.some(($1) => ')
  return JSON.parse(
    JSON.stringify(runInNewContext(`(${closed(script)})`, { object: structuredClone(object) })),
  )
}

/** Adds the closing bracket to the `({ … }` of a message literal. */
function closed(script: string): string {
  let out = ''
  const braces: boolean[] = []
  let quote = ''
  for (const [i, char] of script.split('').entries()) {
    out += char
    if (quote !== '') {
      if (char === quote) quote = ''
    } else if (char === '"' || char === "'") quote = char
    else if (char === '{') braces.push(script[i - 1] === '(')
    else if (char === '}' && braces.pop() === true) out += ')'
  }
  return out
}

function apply(target: Manifest, { op, path, value }: Patch): void {
  if (op !== 'add') throw new Error(`${op} is not known here`)
  const names = path.slice(1).split('/')
  const last = names.pop() as string
  let at: Record<string, unknown> | unknown[] = target
  for (const name of names) at = (at as Record<string, typeof at>)[name] as typeof at
  if (Array.isArray(at)) at.splice(last === '-' ? at.length : Number(last), 0, value)
  else at[last] = value
}
