import type { Draft, DraftRoute } from './draft.ts'

/** Longest line of a comment. */
const WIDTH = 118

/** A draft as a configuration file, line by line. Lines may still hold what a terminal obeys. */
export function draftText(
  { title, servers, defaults, routes }: Draft,
  from: string,
  upstream: string,
  all: number,
): string[] {
  return [
    ...comment(
      '',
      `Routes for idempotency-proxy, drafted from ${from}${title === '' ? '' : ` (${title})`} by: idempotency-proxy routes from`,
    ),
    ...comment(
      '',
      'A draft: a description does not say what a retry may do. DECIDE marks what only a person can. Then: idempotency-proxy check FILE',
    ),
    ...comment(
      '',
      `${routes.length} routes of ${all} operations: POST and PATCH, and of PUT and DELETE what declares a key. The rest is idempotent by itself (RFC 9110 §9.2.2) and streams through.`,
    ),
    '',
    'upstream:',
    ...comment('  ', 'DECIDE: where the service listens.'),
    ...servers.slice(0, 5).map((url) => `  # Clients connect to ${url}: that is where this proxy is to be.`),
    `  url: ${JSON.stringify(upstream)}`,
    '',
    'defaults:',
    ...comment(
      '  ',
      'DECIDE: shadow first forwards everything and tells what enforce would have done (docs/shadow.md).',
    ),
    '  mode: enforce',
    ...comment(
      '  ',
      'DECIDE: how long a finished request answers retries; longer than any client goes on trying.',
    ),
    '  ttl: 24h',
    ...defaults.comments.flatMap((text) => comment('  ', text)),
    ...defaults.lines.map((line) => `  ${line}`),
    '',
    'routes:',
    ...routes.flatMap(routeText),
  ]
}

function routeText({ name, method, path, lines, comments }: DraftRoute): string[] {
  return [
    ...comments.flatMap((text) => comment('  ', text)),
    `  - name: ${JSON.stringify(name)}`,
    `    match: { methods: [${method}], path: ${JSON.stringify(path)} }`,
    ...lines.map((line) => `    ${line}`),
    '',
  ]
}

/** Broken between words. A text of the description stays on its line, whatever is in it. */
function comment(indent: string, text: string): string[] {
  const lines: string[] = []
  let line = ''
  for (const word of text.split(' ')) {
    if (line !== '' && indent.length + 2 + line.length + 1 + word.length > WIDTH) {
      lines.push(line)
      line = word
    } else line = line === '' ? word : `${line} ${word}`
  }
  return [...lines, line].map((one) => `${indent}# ${one}`.trimEnd())
}
