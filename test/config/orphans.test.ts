import t from 'tap'
import { orphanedBy } from '../../src/config/diff.ts'
import { load } from './support.ts'

const BY_KEY = 'request: { path: "/p?k={key}" }, identity: { /k: "{key}" }'
const BY_RECORD = 'request: { path: "/p/{record}" }, identity: { /k: "{record}" }'
const config = (route: string, more = 'unmatched: pass') =>
  load(`${more}
upstream: { url: http://127.0.0.1:3000 }
routes:
  - { match: { methods: [POST], path: /pay }, scope: { caller: none }, ${route} }
`)
const asks = (how: string, more = ''): string =>
  `name: pay, reconcile: { ${how}, completed: { status: 200 }, notFound: { status: 404 } }${more}`
const FENCE = ', key: { forwardFence: true }'

void t.test('a change that leaves unknown records without a reconciler is reported by route', async (t) => {
  const told = (before: string, after: string) => orphanedBy(config(before), config(after))
  const old = asks(BY_KEY)
  t.same(told(old, old), [])
  t.match(told(old, old.replace('pay', 'pays')), [
    /^Route `pay`: no route has its name any more, so its unknown records stay unknown until an operator resolves them\.$/,
  ])
  t.match(told(old, 'name: pay'), [/it no longer has reconcile/])
  t.match(told(old, `${old}, mode: shadow`), [/mode shadow, which sends no status queries/])
  t.match(told(old, asks(BY_RECORD, FENCE)), [/\{record\}, which was not sent to the upstream before/])
  t.match(told(asks(BY_RECORD, FENCE), old), [/\{key\}, which was not kept before/])
  t.same(told(asks(BY_KEY, FENCE), asks(BY_RECORD, FENCE)), [], 'the record id was sent before, too')
  t.same(
    told(old, asks(BY_RECORD, FENCE).replace(', notFound: { status: 404 }', '')),
    [],
    'without notFound nothing is freed',
  )
  t.same(told('name: pay', old), [], 'nobody asked before')
  t.same(told(`${old}, mode: shadow`, 'name: pay'), [])
  const everywhere = (reconcile: string) =>
    config('name: pay', `unmatched: protect\ndefaults: { key: { forwardFence: true }, ${reconcile} }`)
  const shared = `reconcile: { ${BY_RECORD}, completed: { status: 200 } }`
  t.equal(orphanedBy(everywhere(shared), everywhere('reconcile: none')).length, 2)
})
