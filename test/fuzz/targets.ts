import { readFileSync } from 'node:fs'
import { fingerprint, form, json, mediaType, multipart } from './body-targets.ts'
import type { Target } from './engine.ts'
import { config, jwt, openapi, record, spool } from './file-targets.ts'
import { httpHead, key, keyPattern, pattern, target } from './http-targets.ts'
import { upstreamResponse } from './upstream-targets.ts'

export const TARGETS: readonly Target[] = [
  httpHead,
  target,
  pattern,
  key,
  keyPattern,
  mediaType,
  json,
  form,
  multipart,
  fingerprint,
  jwt,
  config,
  openapi,
  record,
  spool,
  upstreamResponse,
]

/** What earlier runs have found to take ways of its own, one input a line. */
export function corpusOf({ name, seeds }: Target): Buffer[] {
  const file = corpusFile(name)
  let lines: string[] = []
  try {
    lines = readFileSync(file, 'utf8').split('\n')
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw error
  }
  const kept = lines.filter((line) => line !== '' && !line.startsWith('#'))
  return [
    ...seeds.map((seed) => Buffer.from(seed as string, 'latin1')),
    ...kept.map((line) => Buffer.from(line, 'base64')),
  ]
}

export function corpusFile(name: string): URL {
  return new URL(`corpus/${name}.txt`, import.meta.url)
}
