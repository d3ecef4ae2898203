import t from 'tap'
import { prefersHtml } from '../../src/core/headers.ts'
import { words } from './fixtures.ts'

const accepts = (...lines: string[]): boolean => prefersHtml(lines.flatMap((line) => ['Accept', line]))

t.test('a client that prefers HTML gets a page', async (t) => {
  for (const line of [
    // Chrome, Firefox, Safari, opening a page or sending a form.
    'text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8,application/signed-exchange;v=b3;q=0.7',
    'text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8',
    'text/html',
    'Text/HTML; charset=utf-8',
    'text/html;q=0.2, application/json;q=0.1',
    'application/json;q=0.5, text/html;level=1;q=0.7',
    'text/html, application/json;q=0',
    'text/html;q=0.001',
    'text/html;q=1, application/json;q=0.9',
    'text/html;q=0.3, application/json;q=0.2, text/html;q=0.1',
    'text/html;q=0.9, application/*;q=0.8',
    'text/html;q=0.3,*/*;q=0.1,text/html;q=0.2',
  ])
    t.ok(accepts(line), line)
  t.ok(accepts('application/json;q=0.9', 'text/html'), 'several Accept lines count as one list')
})

t.test('a client that does not prefer HTML gets a problem', async (t) => {
  for (const line of [
    ...words`
      */* text/* application/json text/html;q=0 text/html;q=0.0 text/html;q=2 text/html;q=
      text/html;q=0.1234 application/xhtml+xml x-text/html-not ,;q=1,,`,
    ...['', 'application/problem+json, text/html;q=0.9', 'application/json, text/plain, */*'],
    ...['text/html, application/json', 'text/html, application/json;q=1', 'text/html, */*'],
    ...['text/html;q=0.8, application/*', 'text/html;q=0.5, application/problem+json;q=0.5'],
  ])
    t.notOk(accepts(line), line)
  t.notOk(prefersHtml([]))
  t.notOk(prefersHtml(['Accept-Language', 'text/html']))
})
