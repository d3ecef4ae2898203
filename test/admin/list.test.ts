import t from 'tap'
import type { AdminPorts } from '../../src/admin/api.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { Records } from '../../src/store/records.ts'
import type { Page } from '../../src/store/register.ts'
import { bytesOf, newId, newToken, SPANS } from '../store/fixtures.ts'
import { injecting } from '../support/admin.ts'

interface Listed {
  readonly records: readonly { readonly id: string; readonly state: string }[]
  readonly next: string | null
}

type Asked = Partial<AdminPorts['store']> & Partial<Pick<Records, 'get'>>

async function page(asked: Asked, query: Record<string, string>): Promise<Listed> {
  const inject = await injecting({ records: asked, store: asked } as AdminPorts, (error) => {
    throw error
  })
  const answer = await inject('GET', `/v1/records?${new URLSearchParams(query).toString()}`)
  t.equal(answer.status, 200)
  return answer.body as Listed
}

void t.test('paging finds each of a few matching records among many once', async (t) => {
  const register = memoryStore({ clock: Date.now, maxBytes: MEMORY_BYTES })
  for (let n = 0; n < 12_000; n++)
    await register.put(
      newId(),
      bytesOf(n % 4000 === 3999 ? 'completed' : 'failed_retryable', newToken()),
      SPANS,
    )
  let lists = 0
  const records = new Records(register)
  const counted: Asked = {
    ping: () => register.ping(),
    get: (id) => records.get(id),
    list: (...args) => {
      lists++
      return register.list(...args)
    },
  }
  const found: string[] = []
  let next: string | null = null
  let pages = 0
  do {
    const one: Listed = await page(counted, {
      state: 'completed',
      limit: '1',
      ...(next === null ? {} : { cursor: next }),
    })
    found.push(...one.records.map(({ id }) => id))
    next = one.next
    pages++
  } while (next !== null)
  t.equal(new Set(found).size, 3)
  t.equal(found.length, 3)
  t.ok(pages <= 6, `${pages} pages`)
  t.ok(lists < 100, `${lists} list calls`)

  const none = await page(counted, { route: 'nobody', limit: '10' })
  t.same(none.records, [])
  t.type(none.next, 'string', 'a page looks at a limited number and says where to continue')
})

void t.test('a page ends even if the store lists nothing but empty pages', async (t) => {
  let asked = 0
  const empty: Asked = {
    ping: async () => 1,
    list: async (): Promise<Page> => ({ ids: [], next: String(++asked) }),
  }
  const one = await page(empty, {})
  t.type(one.next, 'string')
  t.equal(asked, 500)
})

void t.test('names that every object has are unknown parameters', async (t) => {
  const inject = await injecting({} as AdminPorts, (error) => {
    throw error
  })
  for (const name of ['__proto__', 'constructor', 'toString'])
    for (const path of ['/v1/records', '/v1/report']) {
      const answer = await inject('GET', `${path}?${name}=1`)
      t.equal(answer.status, 400, `${path}?${name}`)
      t.match(answer.body, { detail: `?${name}: unknown` })
    }
})
